// SPDX-License-Identifier: Apache-2.0
//
// How much large and background requests may have in flight on one device, over all its queue pairs, so that small
// requests find it responsive. A device serves what it was given in some order of its own: what is not in flight yet is
// all that can still be passed.
//
// While small requests come, the bytes in flight are kept where the latency of a large request's commands is some
// factor above that of an idle device (the idea of TCP Vegas): that much fills the device, and more would only wait
// inside of it. Nobody to protect: no limit. Nobody has a second command in flight while somebody waits for the first,
// and those who wait for it are let in in the order in which they came, so nobody starves.
//
// Background requests get a share of what the device can do, and no more, while any others come. What it can do is
// known from when they had it for themselves, and from a few of their commands that are let in together now and then.
//
// Small requests pay nothing for any of it: they are seen by the queue pairs' own counts.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <vector>

#include "queue/background.hpp"

namespace ugds::queue {

class QueuePair;

/// What a mode may choose of it.
struct Pacing {
  /// Latency over that of an idle device, in 256ths, between which commands of large requests are kept; 0: no limit.
  std::uint32_t latency_low = 358, latency_high = 448;
  /// Of the bytes that the device can move in a time, those that background requests get while others come, in 256ths.
  std::uint32_t background_share = 38;
  /// How long small requests are protected after the last of them.
  std::uint64_t memory_ns = 1'000'000'000;
};

class Pacer {
 public:
  /// `virtual_clock` holds the device's time in nanoseconds, where that is not real time.
  explicit Pacer(const std::atomic<std::uint64_t>* virtual_clock) : virtual_clock_(virtual_clock) {}

  /// `piece`: bytes of a large request's command at most. Thread-safe.
  void configure(const Pacing& pacing, std::uint32_t piece);
  /// Counts a queue pair's commands among those that may be small ones. Before the first command.
  void watch(const QueuePair& pair) { pairs_.push_back(&pair); }

  /// Time as latencies are measured by: the device's own, or `ticks`.
  std::uint64_t now(std::uint64_t ticks) const {
    return virtual_clock_ == nullptr ? ticks : virtual_clock_->load(std::memory_order_relaxed);
  }

  /// Whether a command of a large or background request may be staged; it is counted then. `first`: its request has
  /// nothing in flight. `waits_since` is the request's own, 0 at first: since when it has asked for that one.
  /// Thread-safe.
  bool take(std::uint32_t bytes, bool background, bool first, std::uint64_t& waits_since);
  /// What take() counted has retired, `latency` after it was staged.
  void give(std::uint32_t bytes, bool is_write, bool background, std::uint64_t latency);
  /// What take() counted was not staged after all.
  void put_back(std::uint32_t bytes, bool background);
  /// A command without data is about to be staged: it is nobody's small request.
  void pass() { staged_.fetch_add(1, std::memory_order_relaxed); }

  /// Whether small requests have come lately, and large ones are to be cut finely.
  bool protects() const { return protects_.load(std::memory_order_relaxed); }
  /// Whether background requests give way to others, and are to be cut finely too.
  bool yields() const { return yields_.load(std::memory_order_relaxed); }
  /// Bytes of a command that is cut finely: less than configured where such a one takes the device longer than it takes
  /// to answer, for two of them are in flight even at the least.
  std::uint32_t piece() const { return static_cast<std::uint32_t>(piece_.load(std::memory_order_relaxed)); }
  std::uint64_t in_flight() const { return in_flight_.load(std::memory_order_relaxed); }
  std::uint64_t limit() const { return limit_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::uint64_t kNoLimit = ~std::uint64_t{0} >> 1, kNobody = ~std::uint64_t{0};
  static constexpr unsigned kClasses = 24;  ///< of sizes, by their logarithm

  /// Commands that others have staged, and when that was seen to change.
  struct Arrivals {
    std::atomic<std::uint32_t> count{0};
    std::atomic<std::uint64_t> at{0};
    /// Whether some have come since the last look. Of `all` commands, `others` are not meant: read after `all`, and
    /// counted before they are staged, so that what is on its way makes it less for a moment and never more.
    bool look(std::uint32_t all, const std::atomic<std::uint32_t>& others, std::uint64_t now);
    bool within(std::uint64_t now, std::uint64_t time) const {
      const std::uint64_t last = at.load(std::memory_order_relaxed);
      return last != 0 && now - last < time;
    }
  };

  /// Requests that have nothing in flight and were refused: who has waited longest is the next, and nobody has a second
  /// command before. They ask again and again; one that has gone away is passed over after a while.
  class Turns {
   public:
    bool nobody_waits() const { return longest_.load(std::memory_order_relaxed) == kNobody; }
    /// Whether it is the turn of one that waits since then.
    bool is_turn_of(std::uint64_t since);
    void wait(std::uint64_t since);
    /// One has been let in. The others will say again since when they wait.
    void let_in();

   private:
    std::atomic<std::uint64_t> longest_{kNobody};
    std::atomic<std::uint32_t> passed_{0};
  };

  std::uint64_t span(std::uint64_t ns) const;
  std::uint32_t staged_by_all() const;
  std::uint64_t moved_by_all() const;
  bool take_background(std::uint64_t all, std::uint32_t bytes, bool first, std::uint64_t& waits_since);
  bool is_full(std::uint64_t all, std::uint32_t bytes) const;
  bool admit(std::uint64_t all, bool full, bool first, std::uint64_t& waits_since);
  static unsigned class_of(std::uint64_t bytes) {
    return std::min<unsigned>(static_cast<unsigned>(std::bit_width(bytes >> 9)), kClasses - 1);
  }
  void sample(std::uint32_t bytes, bool is_write, std::uint64_t latency);
  void adjust();
  void follow(std::uint64_t now, std::uint64_t ratio);
  void begin_epoch(std::uint64_t now);
  void look(std::uint64_t now, std::uint64_t commands);
  void end_look(std::uint64_t now);
  bool is_coarse(std::uint64_t now) const;

  const std::atomic<std::uint64_t>* const virtual_clock_;
  std::vector<const QueuePair*> pairs_;
  std::atomic<std::uint32_t> latency_low_{0}, latency_high_{0};
  std::atomic<std::uint64_t> memory_{0};  ///< by now()'s unit
  std::atomic<std::uint64_t> largest_piece_{128u << 10}, piece_{128u << 10};

  alignas(64) std::atomic<std::uint64_t> in_flight_{0};
  std::atomic<std::uint64_t> background_{0};  ///< of those in flight
  std::atomic<std::uint64_t> limit_{kNoLimit};
  std::atomic<std::uint32_t> staged_{0}, background_staged_{0};  ///< commands ever counted
  std::atomic<bool> protects_{false};
  std::atomic<bool> refused_{false};  ///< since the last adjustment
  Turns large_turns_, background_turns_;
  std::atomic<std::uint64_t> peak_{0};

  alignas(64) std::atomic<std::uint64_t> ratios_{0};  ///< of latencies to the idle device's, summed, in 256ths
  std::atomic<std::uint32_t> samples_{0};
  std::atomic<std::uint64_t> first_at_{0}, bytes_{0};  ///< when the first was taken, and bytes of the others
  std::atomic<std::uint64_t> since_{0};                ///< commands staged before it say nothing of the present limit
  struct Idle {
    std::atomic<std::uint64_t> now{~std::uint64_t{0}},
        before{~std::uint64_t{0}};  ///< lowest of this epoch and the last
  };
  std::array<std::array<Idle, kClasses>, 2> idle_{};

  Arrivals small_, foreground_;
  BackgroundShare share_;
  std::atomic<bool> yields_{false};

  std::atomic_flag adjusting_;
  // By who adjusts.
  std::uint64_t epoch_at_ = 0;
  std::uint64_t looks_with_ = 0;  ///< commands in flight while the device is looked at nearly idle; 0: it is not
  std::uint64_t resumed_ = 0;     ///< the limit to go back to after the device was looked at nearly idle
};

}  // namespace ugds::queue
