// SPDX-License-Identifier: Apache-2.0
#include "device/watcher.hpp"

#include <sys/epoll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "base/descriptor.hpp"
#include "base/error.hpp"
#include "base/fork.hpp"

namespace ugds::device {

namespace {

struct Watch {
  int descriptor;
  void (*call)(void*);
  void* context;
};

struct Watcher {
  std::mutex lock;
  std::condition_variable idle;
  std::map<std::uint64_t, Watch> watches;
  std::uint64_t last = 0, running = 0;  ///< `running`: whose call is being made
  std::thread::id thread;
  int epoll = -1;
  unsigned generation = 0;

  void run();
  void start();
};
Watcher& watcher() {
  // NOLINTNEXTLINE: its thread runs to the process's end
  static auto* const one = [] {
    auto* const made = new Watcher;
    on_fork(ForkOrder::watches, {[] { watcher().lock.lock(); }, [] { watcher().lock.unlock(); },
                                 [] {
                                   watcher().watches.clear();
                                   watcher().running = 0;
                                   watcher().lock.unlock();
                                 }});
    return made;
  }();
  return *one;
}

void Watcher::run() {
  prctl(PR_SET_NAME, "ugds-watcher");
  for (;;) {
    epoll_event event{};
    if (epoll_wait(epoll, &event, 1, -1) != 1) continue;
    std::unique_lock guard(lock);
    const auto found = watches.find(event.data.u64);
    if (found == watches.end()) continue;
    const Watch watch = found->second;
    std::uint64_t count = 0;
    if (read(watch.descriptor, &count, sizeof count) != sizeof count) continue;  // somebody else's, or none
    running = event.data.u64;
    guard.unlock();
    watch.call(watch.context);
    guard.lock();
    running = 0;
    idle.notify_all();
  }
}

/// Under the lock.
void Watcher::start() {
  // A child of a fork has neither the thread nor a use for the parent's descriptor.
  if (epoll >= 0 && generation == fork_generation()) return;
  generation = fork_generation();
  epoll = epoll_create1(EPOLL_CLOEXEC);
  if (epoll < 0) fail(errno, "open", "no descriptor for watching the device", "raise the limit of open files");
  std::thread started([this] { run(); });
  thread = started.get_id();
  started.detach();
}

}  // namespace

std::uint64_t watch(int descriptor, void (*call)(void*), void* context) {
  Watcher& w = watcher();
  std::lock_guard guard(w.lock);
  w.start();
  const std::uint64_t id = ++w.last;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = id;
  if (epoll_ctl(w.epoll, EPOLL_CTL_ADD, descriptor, &event) != 0) {
    fail(errno, "open", "the device cannot be watched for removal");
  }
  w.watches.emplace(id, Watch{descriptor, call, context});
  return id;
}

void unwatch(std::uint64_t id) noexcept {
  Watcher& w = watcher();
  std::unique_lock guard(w.lock);
  const auto found = w.watches.find(id);
  if (found == w.watches.end()) return;
  epoll_ctl(w.epoll, EPOLL_CTL_DEL, found->second.descriptor, nullptr);
  w.watches.erase(found);
  if (std::this_thread::get_id() == w.thread) return;
  w.idle.wait(guard, [&] { return w.running != id; });
}

}  // namespace ugds::device
