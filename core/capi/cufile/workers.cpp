// SPDX-License-Identifier: Apache-2.0
#include "capi/cufile/workers.hpp"

#include <pthread.h>
#include <signal.h>

#include <new>
#include <thread>
#include <utility>

#include "capi/cufile/fork.hpp"

namespace ugds::cufile {

Workers& Workers::instance() {
  static Workers* const one = new Workers;  // NOLINT: its threads run until the process ends
  return *one;
}

void Workers::prepare_for_fork() {
  static const bool hooked = [] {
    instance();
    at_fork({[] { instance().lock_.lock(); }, [] { instance().lock_.unlock(); },
             [] {
               // Another's threads wait for the old words: the child gets new ones.
               new (&instance()) Workers;
             }});
    return true;
  }();
  static_cast<void>(hooked);
}

void Workers::run(std::function<void()> job) {
  prepare_for_fork();
  const std::lock_guard guard(lock_);
  jobs_.push_back(std::move(job));
  if (jobs_.size() > idle_ && threads_ < kMost) {
    // The program's signals are for its own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      std::thread([this] { work(); }).detach();
      ++threads_;
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      if (threads_ != 0) return;  // the others will do it
      jobs_.pop_back();
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  woken_.notify_one();
}

void Workers::work() {
  std::unique_lock guard(lock_);
  for (;;) {
    ++idle_;
    woken_.wait(guard, [&] { return !jobs_.empty(); });
    --idle_;
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    guard.unlock();
    job();
    job = nullptr;
    guard.lock();
  }
}

}  // namespace ugds::cufile
