// SPDX-License-Identifier: Apache-2.0
#include "emulator/team.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <system_error>

#include "base/clock.hpp"
#include "base/error.hpp"

namespace ugds::emulator {

namespace {

/// A host that waits for each command before the next is back within this, most of the time.
constexpr std::uint64_t kSpin = 30'000;
/// From here on whoever spins lets others run: there may be fewer processors than threads.
constexpr std::uint64_t kSpinAlone = 3'000;

/// Until `done()`, which is looked at all the time, or for `kSpin`. Whether it came.
template <class Done>
bool spin(Done&& done) {
  const std::uint64_t start = monotonic_ns();
  for (;;) {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      cpu_pause();
    }
    const std::uint64_t spent = monotonic_ns() - start;
    if (spent > kSpin) return false;
    if (spent > kSpinAlone) sched_yield();
  }
}

}  // namespace

std::thread quiet_thread(void (*run)(void*, std::uint32_t), void* context, std::uint32_t number, const char* hint) {
  sigset_t all, before;
  sigfillset(&all);
  sigdelset(&all, SIGBUS);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread(run, context, number);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    fail(error.code().value(), "open", "no thread for the emulated controller", hint);
  }
}

Team::Team(std::uint32_t threads)
    : count_(threads), owner_(getpid()), threads_(std::make_unique<std::vector<std::thread>>()) {
  threads_->reserve(threads);
  try {
    for (std::uint32_t i = 1; i <= threads; ++i)
      threads_->push_back(
          quiet_thread([](void* team, std::uint32_t worker) { static_cast<Team*>(team)->serve(worker); }, this, i,
                       "ask for fewer by copiers=, or raise ulimit -u"));
  } catch (...) {
    end();
    throw;
  }
}

Team::~Team() { end(); }

void Team::end() noexcept {
  if (threads_->empty()) return;
  // The threads are their process's, not its child's: what is left of them there can be neither joined nor detached.
  if (getpid() != owner_) {
    static_cast<void>(threads_.release());
    return;
  }
  quit_.store(true, std::memory_order_relaxed);
  calls_.fetch_add(1, std::memory_order_release);
  calls_.notify_all();
  for (std::thread& thread : *threads_) thread.join();
  threads_->clear();
}

void Team::run(std::uint32_t parts, Part part, void* context) noexcept {
  {
    std::lock_guard guard(lock_);
    part_ = part;
    context_ = context;
    parts_ = parts;
    next_.store(0, std::memory_order_relaxed);
    open_ = true;
  }
  calls_.fetch_add(1, std::memory_order_release);
  for (std::uint32_t i = std::min(count_, parts - 1); i != 0; --i) calls_.notify_one();
  take_parts(0);
  {
    std::lock_guard guard(lock_);
    open_ = false;
  }
  // Acquires what the others have written.
  if (spin([&] { return active_.load(std::memory_order_acquire) == 0; })) return;
  for (std::uint32_t left; (left = active_.load(std::memory_order_acquire)) != 0;) active_.wait(left);
}

void Team::take_parts(std::uint32_t worker) noexcept {
  for (;;) {
    const std::uint32_t mine = next_.fetch_add(1, std::memory_order_relaxed);
    if (mine >= parts_) return;
    part_(context_, mine, worker);
  }
}

void Team::wait_for_work(std::uint32_t seen) const noexcept {
  if (spin([&] { return calls_.load(std::memory_order_acquire) != seen; })) return;
  calls_.wait(seen, std::memory_order_acquire);
}

void Team::serve(std::uint32_t worker) noexcept {
  prctl(PR_SET_NAME, "ugds-copier");
  for (std::uint32_t seen = 0;;) {
    wait_for_work(seen);
    seen = calls_.load(std::memory_order_acquire);
    if (quit_.load(std::memory_order_relaxed)) return;
    {
      std::lock_guard guard(lock_);
      if (!open_) continue;
      active_.fetch_add(1, std::memory_order_relaxed);
    }
    take_parts(worker);
    // Releases what this thread has written.
    if (active_.fetch_sub(1, std::memory_order_acq_rel) == 1) active_.notify_one();
  }
}

}  // namespace ugds::emulator
