// SPDX-License-Identifier: Apache-2.0
//
// Whether a waiter polls for its request or sleeps until the controller interrupts, by the size of the request; and
// what either took, for a mode that chooses by what it observes.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

namespace ugds::engine {

/// Sizes of requests: up to 16 KiB, 64 KiB, 256 KiB, 1 MiB, and above.
inline constexpr unsigned kSizeClasses = 5;
constexpr unsigned size_class(std::uint64_t bytes) {
  if (bytes <= (16u << 10)) return 0;
  const auto class_of = static_cast<unsigned>(std::bit_width((bytes - 1) >> 14) + 1) / 2;
  return class_of < kSizeClasses ? class_of : kSizeClasses - 1;
}
static_assert(size_class(16 << 10) == 0 && size_class((16 << 10) + 1) == 1 && size_class(64 << 10) == 1);
static_assert(size_class(256 << 10) == 2 && size_class(1 << 20) == 3 && size_class((1 << 20) + 1) == 4);

class Waiting {
 public:
  /// How requests of one size wait.
  struct Way {
    bool sleeps = false;
    std::uint32_t explore = 0;  ///< one in so many goes the other way, to see what that takes; 0: none
  };
  /// What was observed of one size. Times are typical ones, in ticks; 0: not known.
  struct Seen {
    std::uint64_t requests = 0, polled = 0, slept = 0;
    std::uint64_t last_polled = 0, last_slept = 0;  ///< of the last request that did
    std::uint32_t polled_samples = 0, slept_samples = 0;
  };

  void set(unsigned size, Way way) {
    classes_[size].sleeps.store(way.sleeps, std::memory_order_relaxed);
    classes_[size].explore.store(way.explore, std::memory_order_relaxed);
    if (way.explore != 0) learns_.store(true, std::memory_order_relaxed);
  }
  /// Whether what was observed is of interest.
  bool learns() const { return learns_.load(std::memory_order_relaxed); }
  /// How the next request of this size is to wait.
  bool sleeps(std::uint64_t bytes) {
    Class& c = classes_[size_class(bytes)];
    const bool way = c.sleeps.load(std::memory_order_relaxed);
    const std::uint32_t explore = c.explore.load(std::memory_order_relaxed);
    if (explore == 0) return way;
    return way != (c.requests.fetch_add(1, std::memory_order_relaxed) % explore == explore - 1);
  }
  /// Whether requests of this size are mostly waited for by polling.
  bool polls(std::uint64_t bytes) const { return !classes_[size_class(bytes)].sleeps.load(std::memory_order_relaxed); }
  void learn(std::uint64_t bytes, bool slept, std::uint64_t ticks) {
    Class& c = classes_[size_class(bytes)];
    Estimate& estimate = slept ? c.slept : c.polled;
    estimate.add(ticks);
  }
  Seen seen(unsigned size) const {
    const Class& c = classes_[size];
    return {c.requests.load(std::memory_order_relaxed),     c.polled.value.load(std::memory_order_relaxed),
            c.slept.value.load(std::memory_order_relaxed),  c.polled.last.load(std::memory_order_relaxed),
            c.slept.last.load(std::memory_order_relaxed),   c.polled.samples.load(std::memory_order_relaxed),
            c.slept.samples.load(std::memory_order_relaxed)};
  }

 private:
  /// Follows the median, by steps that an outlier does not lengthen.
  struct Estimate {
    std::atomic<std::uint64_t> value{0}, last{0};
    std::atomic<std::uint32_t> samples{0};
    void add(std::uint64_t ticks) {
      const std::uint64_t now = value.load(std::memory_order_relaxed), step = now / 16 + 1;
      const std::uint64_t next = now == 0             ? ticks
                                 : ticks > now + step ? now + step
                                 : ticks + step < now ? now - step
                                                      : ticks;
      value.store(next, std::memory_order_relaxed);
      last.store(ticks, std::memory_order_relaxed);
      samples.store(samples.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    }
  };
  struct alignas(64) Class {
    std::atomic<bool> sleeps{false};
    std::atomic<std::uint32_t> explore{0};
    std::atomic<std::uint64_t> requests{0};
    Estimate polled, slept;
  };
  std::array<Class, kSizeClasses> classes_{};
  std::atomic<bool> learns_{false};
};

}  // namespace ugds::engine
