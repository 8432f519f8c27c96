// SPDX-License-Identifier: Apache-2.0
//
// What stands between the ways in and the queue pairs of a device: how much of which kind may be in flight (pacer.hpp),
// how waiters wait (waiting.hpp), and the mode that chooses both. Which queue pair takes a request is Handle::choose;
// who is next on it is queue::Line.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.hpp"
#include "engine/mode.hpp"
#include "engine/waiting.hpp"
#include "queue/pacer.hpp"

namespace ugds::engine {

/// Above this a request is a large one.
inline constexpr std::uint64_t kSmall = 64u << 10;
/// Bytes of a large request's command while small requests come, at most.
inline constexpr std::uint32_t kPiece = 128u << 10;

class Scheduler {
 public:
  /// `mode` by name; empty is "latency". Throws Failure(EINVAL).
  explicit Scheduler(const std::string& mode);

  /// Lets the mode fill in what the caller left open. A caller who asks for interrupts himself has waiters sleep, by
  /// whatever mode that does not choose by what it observes.
  void plan(Policy& policy) {
    asked_to_sleep_ = policy.interrupts == Interrupts::yes;
    mode_->plan(policy);
  }
  /// Before the queue pairs are made; `virtual_clock` as device::Device::virtual_clock. `observe` adds what only the
  /// handle knows.
  void begin(const std::atomic<std::uint64_t>* virtual_clock, std::uint32_t chunk,
             std::function<void(Observed&)> observe);

  const std::string& mode() const { return name_; }
  queue::Pacer& pacer() { return *pacer_; }
  Waiting& waiting() { return waiting_; }
  std::uint32_t window() const { return window_.load(std::memory_order_relaxed); }
  std::uint32_t refill() const { return refill_.load(std::memory_order_relaxed); }
  bool background_writes() const { return background_writes_.load(std::memory_order_relaxed); }
  /// Bytes of the next command of a large or background request, of which the device takes at most `chunk`.
  std::uint32_t piece(std::uint32_t chunk, bool background) const {
    const bool finely = pacer_->protects() || (background && pacer_->yields());
    return finely ? std::min(chunk, pacer_->piece()) : chunk;
  }

  /// Called by waiters now and then: asks the mode, if that is due.
  void attend(std::uint64_t now) {
    if (now - asked_.load(std::memory_order_relaxed) > interval_) [[unlikely]]
      ask(now);
  }
  /// A request has ended that waited in one way or the other.
  void learn(std::uint64_t bytes, bool slept, std::uint64_t begun) {
    const std::uint64_t now = ticks();
    waiting_.learn(bytes, slept, now - begun);
    attend(now);
  }

 private:
  void ask(std::uint64_t now);
  void apply();

  std::string name_;
  std::unique_ptr<Mode> mode_;
  std::unique_ptr<queue::Pacer> pacer_;
  Waiting waiting_;
  std::atomic<std::uint32_t> window_{kWindow}, refill_{1};
  std::atomic<bool> background_writes_{false};
  std::atomic<std::uint64_t> asked_{0};
  std::uint64_t interval_ = ~std::uint64_t{0};
  std::atomic_flag asking_;
  bool asked_to_sleep_ = false;
  Settings settings_;  ///< by who asks
  std::uint32_t chunk_ = kPiece;
  std::function<void(Observed&)> observe_;
};

}  // namespace ugds::engine
