// SPDX-License-Identifier: Apache-2.0
//
// How waiters of one queue pair sleep until its controller interrupts. An interrupt is a hint, the phase of a
// completion is the authority: a sleeper first announces itself, then looks for completions once more, then sleeps, and
// looks again when it wakes.
//
// One sleeper waits on the eventfd itself; the others wait for that one, since whoever reads the eventfd would leave
// them asleep. Whatever wakes it, it reaps for everyone, wakes the others, and they choose the next.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/descriptor.hpp"
#include "queue/statistics.hpp"

namespace ugds::queue {

class Wakeup {
 public:
  /// Throws Failure(EMFILE) and the like.
  Wakeup();

  int eventfd() const { return eventfd_.get(); }

  /// Sleeps until an interrupt, another sleeper's reaping, a signal, or for `limit_ns`. `ready` looks for completions
  /// and says whether the caller's own is among them; it is called before and after. Returns what it said last.
  template <class Ready>
  bool sleep(Ready&& ready, std::uint64_t limit_ns) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    const std::uint32_t turn = turn_.load(std::memory_order_seq_cst);
    bool done = ready();
    if (!done) {
      if (!leads_.exchange(true, std::memory_order_acquire)) {
        const bool told = wait_for_interrupt(limit_ns);
        done = ready();
        if (!told && done) missed_.fetch_add(1, std::memory_order_relaxed);
        if (told && armed()) missed_.store(0, std::memory_order_relaxed);
        leads_.store(false, std::memory_order_release);
        wake_others();
      } else {
        wait_for_others(turn, limit_ns);
        done = ready();
      }
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return done;
  }

  /// After this many completions in a row that no interrupt told of, its waiters poll.
  static constexpr std::uint32_t kMostMissed = 8;
  /// Completions in a row that were there and that no interrupt told of.
  std::uint32_t missed() const { return missed_.load(std::memory_order_relaxed); }
  /// Whether waiters may sleep.
  bool armed() const { return missed() < kMostMissed; }
  void disarm() { missed_.store(kMostMissed, std::memory_order_relaxed); }
  /// How often a sleeper was woken by an interrupt.
  std::uint64_t woken() const { return woken_.load(std::memory_order_relaxed); }

 private:
  bool wait_for_interrupt(std::uint64_t limit_ns);
  void wait_for_others(std::uint32_t turn, std::uint64_t limit_ns);
  void wake_others();

  Descriptor eventfd_;
  std::atomic<std::uint32_t> sleepers_{0};
  std::atomic<std::uint32_t> turn_{0};  ///< counts whoever led
  std::atomic<bool> leads_{false};
  std::atomic<std::uint32_t> missed_{0};
  std::atomic<std::uint64_t> woken_{0};
};

}  // namespace ugds::queue
