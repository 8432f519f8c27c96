// SPDX-License-Identifier: Apache-2.0
//
// When commands are due: a pipe that serves them one after another, and a latency behind it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "base/clock.hpp"
#include "emulator/options.hpp"

namespace ugds::emulator {

/// Real time, or a number that only the controller and tests move.
class Clock {
 public:
  explicit Clock(bool is_virtual) : virtual_(is_virtual) {}
  bool is_virtual() const { return virtual_; }
  /// The number itself, in nanoseconds; nullptr with real time.
  const std::atomic<std::uint64_t>* word() const { return virtual_ ? &now_ : nullptr; }
  std::uint64_t now() const { return virtual_ ? now_.load(std::memory_order_acquire) : monotonic_ns() - origin_; }
  void advance(std::uint64_t ns) { now_.fetch_add(ns, std::memory_order_acq_rel); }
  void advance_to(std::uint64_t ns) {
    if (ns > now_.load(std::memory_order_relaxed)) now_.store(ns, std::memory_order_release);
  }

 private:
  const bool virtual_;
  const std::uint64_t origin_ = monotonic_ns();
  std::atomic<std::uint64_t> now_{0};
};

class Timing {
 public:
  explicit Timing(const Options& options)
      : latency_(options.latency_ns),
        per_byte_(options.bandwidth == 0 ? 0.0 : 1e9 / static_cast<double>(options.bandwidth)),
        per_command_(options.iops == 0 ? 0.0 : 1e9 / static_cast<double>(options.iops)) {}

  /// False: everything is due at once, and no clock need be read.
  bool modelled() const { return latency_ != 0 || per_byte_ != 0.0 || per_command_ != 0.0; }
  void reset() { free_at_ = 0.0; }

  std::uint64_t due(std::uint64_t now, std::uint64_t bytes) {
    // Fractions of a nanosecond add up at millions of commands a second. A double holds them for 100 days.
    const double start = std::max(static_cast<double>(now), free_at_);
    free_at_ = start + std::max(static_cast<double>(bytes) * per_byte_, per_command_);
    return static_cast<std::uint64_t>(free_at_) + latency_;
  }

 private:
  std::uint64_t latency_;
  double per_byte_, per_command_;
  double free_at_ = 0.0;
};

}  // namespace ugds::emulator
