// SPDX-License-Identifier: Apache-2.0
#include "serve/fault_guard.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <mutex>

#include "base/error.hpp"

namespace ugds::serve {

namespace {

/// What a handler may look at at any moment: free where `start` is 0, and otherwise complete.
struct Slot {
  std::atomic<std::uintptr_t> start{0};
  std::atomic<std::size_t> bytes{0};
  std::atomic<int> wake{-1};
  std::atomic<bool> lost{false};
};

constexpr std::size_t kSlots = 32768;
constinit Slot slots[kSlots];
/// Slots beyond were never used.
constinit std::atomic<std::size_t> used{0};
constinit std::mutex changing;
struct sigaction previous;

/// Async-signal-safe. False where the address is in no guarded range.
bool replace(std::uintptr_t address) {
  const std::size_t end = used.load(std::memory_order_acquire);
  for (std::size_t i = 0; i < end; ++i) {
    const std::uintptr_t start = slots[i].start.load(std::memory_order_acquire);
    const std::size_t bytes = slots[i].bytes.load(std::memory_order_relaxed);
    if (start == 0 || address < start || address - start >= bytes) continue;
    // Another range may have taken the slot between the two.
    if (slots[i].start.load(std::memory_order_acquire) != start) continue;
    // The system call itself: a sanitizer's mmap is nothing for a signal handler.
    if (syscall(SYS_mmap, start, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
                -1, 0) == -1)
      return false;
    slots[i].lost.store(true, std::memory_order_release);
    const std::uint64_t one = 1;
    static_cast<void>(!write(slots[i].wake.load(std::memory_order_relaxed), &one, sizeof one));
    return true;
  }
  return false;
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const int kept = errno;
  const bool replaced = info->si_code > 0 && replace(reinterpret_cast<std::uintptr_t>(info->si_addr));
  errno = kept;
  if (replaced) return;
  if ((previous.sa_flags & SA_SIGINFO) != 0) return previous.sa_sigaction(signal, info, context);
  if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) return previous.sa_handler(signal);
  // As if nobody had handled it: the same access faults again, or the signal is sent again.
  ::signal(signal, SIG_DFL);
  if (info->si_code <= 0) raise(signal);
}

void install() {
  static const bool installed = [] {
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, nullptr, &previous);
    sigaction(SIGBUS, &action, nullptr);
    return true;
  }();
  static_cast<void>(installed);
}

}  // namespace

FaultGuard::FaultGuard(void* start, std::size_t bytes, int wake) : slot_(0) {
  install();
  const std::lock_guard guard(changing);
  const std::size_t end = used.load(std::memory_order_relaxed);
  while (slot_ < end && slots[slot_].start.load(std::memory_order_relaxed) != 0) ++slot_;
  if (slot_ == kSlots) fail(ENOSPC, "serve", "as much memory of clients is mapped as can be");
  Slot& slot = slots[slot_];
  slot.bytes.store(bytes, std::memory_order_relaxed);
  slot.wake.store(wake, std::memory_order_relaxed);
  slot.lost.store(false, std::memory_order_relaxed);
  slot.start.store(reinterpret_cast<std::uintptr_t>(start), std::memory_order_release);
  used.store(std::max(end, slot_ + 1), std::memory_order_release);
}

FaultGuard::~FaultGuard() {
  const std::lock_guard guard(changing);
  slots[slot_].start.store(0, std::memory_order_release);
}

bool FaultGuard::lost() const { return slots[slot_].lost.load(std::memory_order_acquire); }

}  // namespace ugds::serve
