// SPDX-License-Identifier: Apache-2.0
//
// The controller's own thread: it polls while there is work, and sleeps when there has been none for a while.
#include <linux/futex.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.hpp"
#include "emulator/impl.hpp"

namespace ugds::emulator {

namespace {

/// A doorbell in plain memory wakes nobody: it is looked at this often at least. After a while of nothing it is looked
/// at less often, since a thousand timers a second cost a virtual machine more than a hundredth of a core.
constexpr std::uint64_t kLongestNap = 1'000'000, kLongNap = 4'000'000, kLongIdle = 100'000'000;
constexpr std::uint64_t kFirstNap = 20'000;
/// How long a sleep lasts that nobody ends, should a wake-up be lost. It then counts as such.
constexpr std::uint64_t kBelt = 100'000'000;
/// Between two late writes.
constexpr std::uint64_t kLateWrites = 200'000;
/// What is due sooner is polled for; what is due later is slept for, but for this much at the end.
constexpr std::uint64_t kWorthSleeping = 50'000, kWakeEarly = 20'000;

/// Returns false at the timeout.
bool futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value, std::uint64_t ns) {
  static_assert(sizeof(word) == sizeof(std::uint32_t));
  timespec timeout;
  timeout.tv_sec = static_cast<time_t>(ns / 1'000'000'000);
  timeout.tv_nsec = static_cast<long>(ns % 1'000'000'000);
  while (word.load(std::memory_order_seq_cst) == value) {
    if (syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, &timeout, nullptr, 0) == 0) continue;
    if (errno == ETIMEDOUT) return word.load(std::memory_order_seq_cst) != value;
    if (errno == EINTR) return true;  // too early is harmless, and the time that is left is not known
  }
  return true;
}

}  // namespace

void Controller::Impl::wake() {
  if (options.pump_by_caller) return;
  // An exchange and not a load: it sees the newest value even where the host's look at an event index was relaxed.
  if (asleep.exchange(0, std::memory_order_seq_cst) == 0) return;
  wakeups.fetch_add(1, std::memory_order_relaxed);
  syscall(SYS_futex, &asleep, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

void Controller::Impl::sleep(std::uint64_t timeout_ns, bool deaf, bool belt) {
  {
    std::lock_guard guard(lock);
    asleep.store(1, std::memory_order_seq_cst);
    ask_to_be_rung();
    // Queues that nobody rings aloud may have come since `deaf` was asked: by a register write, which has woken nobody.
    const bool deafened = !deaf && !hears_every_doorbell();
    if (deafened || doorbells_changed() || quit.load(std::memory_order_seq_cst)) {
      asleep.store(0, std::memory_order_seq_cst);
      return;
    }
  }
  if (!futex_wait(asleep, 1, timeout_ns) && belt) {
    auto changed = [&] {
      std::lock_guard guard(lock);
      return state == State::ready && !removed.load(std::memory_order_relaxed) && doorbells_changed();
    };
    // The host may be between its store and its ring. It is given as long again before it is called a mistake.
    if (changed() && !futex_wait(asleep, 1, timeout_ns) && changed()) {
      std::lock_guard guard(lock);
      ++counters.rescues;
      violations.add("lost-wakeup", "a shadow doorbell changed, its event index asked for a ring, and none came");
    }
  }
  asleep.store(0, std::memory_order_seq_cst);
}

void Controller::Impl::run() {
  prctl(PR_SET_NAME, "ugds-emulated");
  prctl(PR_SET_TIMERSLACK, 1000);
  std::uint64_t idle_since = 0, nap = kFirstNap, polls = 0;
  while (!quit.load(std::memory_order_acquire)) {
    bool worked, deaf, late;
    std::uint64_t next;
    {
      std::lock_guard guard(lock);
      worked = turn_safely();
      deaf = !hears_every_doorbell();
      late = late_writers != 0;
      next = next_event();
    }
    // A mutex is not fair: a host that wants a register would wait for long behind a polling loop.
    for (int i = 0; i < 1000 && waiting.load(std::memory_order_relaxed) != 0; ++i) sched_yield();
    if (worked) {
      idle_since = polls = 0;
      nap = kFirstNap;
      continue;
    }
    const std::uint64_t now = monotonic_ns();
    if (idle_since == 0) idle_since = now;
    const std::uint64_t device_now = clock.now();
    const std::uint64_t left = next <= device_now ? 0 : next - device_now;
    const bool far = next != ~std::uint64_t{0} && left > kWorthSleeping;
    const std::uint64_t patience = far ? std::min(options.idle_ns, kWakeEarly) : options.idle_ns;
    if (left <= kWorthSleeping || now - idle_since < patience) {
      if (++polls < 64) {
        cpu_pause();
      } else {
        sched_yield();
      }
      continue;
    }
    std::uint64_t timeout = deaf ? nap : kBelt;
    if (far) timeout = std::min(timeout, left - kWakeEarly);
    if (late) timeout = std::min(timeout, kLateWrites);
    sleep(timeout, deaf, timeout == kBelt);
    nap = now - idle_since > kLongIdle ? kLongNap : std::min(nap * 2, kLongestNap);
  }
}

}  // namespace ugds::emulator
