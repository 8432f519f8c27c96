// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/steps.hpp"
#include "file/io.hpp"

namespace ugds::file {

namespace {

constexpr unsigned kFewest = 4, kMost = 16;

/// Parts, first in first out, linked by themselves.
struct List {
  Part* first = nullptr;
  Part** last = &first;
  void add(Part& part) {
    part.next = nullptr;
    *last = &part;
    last = &part.next;
  }
  Part* pop() {
    Part* const part = first;
    if (part != nullptr && (first = part->next) == nullptr) last = &first;
    return part;
  }
  bool remove(const Part& part) {
    for (Part** at = &first; *at != nullptr; at = &(*at)->next) {
      if (*at != &part) continue;
      *at = part.next;
      if (last == &part.next) last = at;
      return true;
    }
    return false;
  }
};

int ask(Part& part) {
  const Request& r = *part.request;
  const File& file = *r.file;
  const bool past = part.way != Part::Way::buffered || file.buffered() < 0;
  const int descriptor = past && file.direct() >= 0 ? file.direct() : file.buffered();
  iovec memory{part.memory + part.done, part.bytes - part.done};
  const auto offset = static_cast<off_t>(part.offset + part.done);
  ssize_t result = 0;
  switch (r.kind) {
    case Kind::read: result = ::preadv(descriptor, &memory, 1, offset); break;
    case Kind::write: result = ::pwritev2(descriptor, &memory, 1, offset, r.durable ? RWF_DSYNC : 0); break;
    case Kind::flush: result = ::fdatasync(descriptor); break;
    case Kind::discard:
      result =
          ::fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(part.bytes));
      break;
  }
  return result < 0 ? -errno : static_cast<int>(result);
}

class Workers final : public Io {
 public:
  Workers() {
    setup_step("file: threads");
    const auto processors = static_cast<unsigned>(std::max(1l, ::sysconf(_SC_NPROCESSORS_ONLN)));
    const unsigned wanted = std::clamp(processors * 2, kFewest, kMost);
    // Signals are for the program's threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      while (threads_.size() < wanted) threads_.emplace_back([this] { run(); });
    } catch (const std::system_error&) {
      // Those that there are do it.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (threads_.empty()) ugds::fail(EAGAIN, "open", "no thread for a file's I/O", "raise the limit of threads");
  }
  ~Workers() override {
    {
      const std::lock_guard guard(lock_);
      quit_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  const char* name() const override { return "threads"; }

  void give(Part& part) noexcept override {
    {
      const std::lock_guard guard(lock_);
      asked_.add(part);
    }
    changed_.notify_one();
  }
  void push() noexcept override {}

  Part* take() noexcept override {
    if (!has_any()) return nullptr;
    const std::lock_guard guard(lock_);
    Part* const part = answered_.pop();
    if (part != nullptr) count_.fetch_sub(1, std::memory_order_release);
    return part;
  }
  bool has_any() const noexcept override { return count_.load(std::memory_order_acquire) != 0; }

  void cancel(Part& part) noexcept override {
    const std::lock_guard guard(lock_);
    if (!asked_.remove(part)) return;  // a thread is at it, and nothing interrupts that
    part.result = -ECANCELED;
    answer(part);
  }
  void tell(int eventfd) override {
    const std::lock_guard guard(lock_);
    eventfd_ = eventfd;
  }

 private:
  /// Under the lock.
  void answer(Part& part) {
    answered_.add(part);
    count_.fetch_add(1, std::memory_order_release);
    const std::uint64_t one = 1;
    if (eventfd_ >= 0 && ::write(eventfd_, &one, sizeof one) < 0) {
      // It is full: then it is readable.
    }
  }

  void run() {
    prctl(PR_SET_NAME, "ugds-file");
    std::unique_lock guard(lock_);
    for (;;) {
      changed_.wait(guard, [this] { return quit_ || asked_.first != nullptr; });
      Part* const part = asked_.pop();
      if (part == nullptr) return;  // only when it is to end
      guard.unlock();
      const int result = ask(*part);
      guard.lock();
      part->result = result;
      answer(*part);
    }
  }

  std::mutex lock_;
  std::condition_variable changed_;
  List asked_, answered_;
  std::atomic<std::uint32_t> count_{0};
  int eventfd_ = -1;
  bool quit_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Io> make_workers() { return std::make_unique<Workers>(); }

}  // namespace ugds::file
