// SPDX-License-Identifier: Apache-2.0
#include "queue/wakeup.hpp"

#include <linux/futex.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>

#include "base/error.hpp"
#include "base/steps.hpp"

namespace ugds::queue {

namespace {

timespec to_timespec(std::uint64_t ns) {
  return {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
}

}  // namespace

Wakeup::Wakeup() {
  setup_step("queue pair: eventfd");
  eventfd_ = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!eventfd_) fail(errno, "open", "no descriptor for a queue's interrupts", "raise the limit of open files");
}

bool Wakeup::wait_for_interrupt(std::uint64_t limit_ns) {
  const timespec limit = to_timespec(limit_ns);
  pollfd waited{eventfd_.get(), POLLIN, 0};
  if (ppoll(&waited, 1, &limit, nullptr) != 1) return false;
  std::uint64_t count = 0;
  if (read(eventfd_.get(), &count, sizeof count) != sizeof count) return false;
  woken_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

void Wakeup::wait_for_others(std::uint32_t turn, std::uint64_t limit_ns) {
  static_assert(sizeof(turn_) == sizeof(std::uint32_t));
  const timespec limit = to_timespec(limit_ns);
  syscall(SYS_futex, &turn_, FUTEX_WAIT_PRIVATE, turn, &limit, nullptr, 0);
}

void Wakeup::wake_others() {
  // After leads_ is free: whoever wakes, or comes now, can lead.
  turn_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 1) {
    syscall(SYS_futex, &turn_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
}

}  // namespace ugds::queue
