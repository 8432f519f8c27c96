// SPDX-License-Identifier: Apache-2.0
//
// What a flush may promise after a reset. A volatile write cache loses what was not flushed when power is lost (NVMe
// Base 2.0, 5.27.1.4); of a controller level reset (3.7.2) no specification says whether the cache outlives it, and a
// controller that lost its power for a moment looks to its host like one that was reset. So a reset after completed
// writes that no flush has followed leaves those in doubt, and a flush says so, once: it fails. So does every other
// flush that began before that was told. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>

namespace ugds::engine {

class Durability {
 public:
  /// What a flush keeps while it is under way.
  struct Mark {
    std::uint64_t written = 0;
    std::uint32_t told = 0;
  };

  /// Before the flush is given to the device. `written`: bytes of completed writes that are not durable by themselves,
  /// ever.
  Mark begin(std::uint64_t written) const { return {written, told_.load(std::memory_order_acquire)}; }
  /// When its caller is told of a success, or of a reset that ended it. True: what was written before is in doubt.
  bool end(const Mark& mark, bool succeeded) {
    if (succeeded) raise_to(flushed_, mark.written);
    const std::uint32_t doubts = doubts_.load(std::memory_order_acquire);
    if (doubts == mark.told) return false;
    raise_to(told_, doubts);
    return true;
  }
  /// The controller has stopped, or was found stopped, and nobody submits. Whether anything is in doubt by it.
  bool reset(std::uint64_t written) {
    if (written <= flushed_.load(std::memory_order_relaxed)) return false;
    flushed_.store(written, std::memory_order_relaxed);  // those are told of by now
    doubts_.fetch_add(1, std::memory_order_release);
    return true;
  }

 private:
  template <class Number>
  static void raise_to(std::atomic<Number>& number, Number to) {
    Number now = number.load(std::memory_order_relaxed);
    while (now < to && !number.compare_exchange_weak(now, to, std::memory_order_release)) {
    }
  }

  std::atomic<std::uint64_t> flushed_{0};  ///< of `written`, what is durable or was put in doubt
  std::atomic<std::uint32_t> doubts_{0}, told_{0};
};

}  // namespace ugds::engine
