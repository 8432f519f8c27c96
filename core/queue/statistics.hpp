// SPDX-License-Identifier: Apache-2.0
//
// Counters of one queue pair. Its owner writes them without a lock; anybody may read them at any time.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

namespace ugds::queue {

class Counter {
 public:
  void add(std::uint64_t n) { value_.store(value_.load(std::memory_order_relaxed) + n, std::memory_order_relaxed); }
  std::uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

/// Latencies in logarithmic buckets of two ticks, four to each doubling: bucket 4k + s begins at 2^(k+1) (1 + s/4)
/// ticks.
inline constexpr unsigned kLatencyBuckets = 256;

/// The exponent and the two upper bits of the fraction, as the processor's own conversion to floating point finds them.
constexpr unsigned latency_bucket(std::uint64_t ticks) {
  const auto halves = static_cast<std::int64_t>(ticks >> 1 | 1);  // neither negative nor zero, whatever the clock did
  return (std::bit_cast<std::uint32_t>(static_cast<float>(halves)) >> 21) - (127u << 2);
}
static_assert(latency_bucket(0) == 0 && latency_bucket(~std::uint64_t{0}) < kLatencyBuckets);
static_assert(latency_bucket(16) == 12 && latency_bucket(20) == 13 && latency_bucket(30) == 15);
/// The smallest latency, in ticks, of a bucket.
constexpr double latency_bucket_floor(unsigned bucket) {
  double power = 2;
  for (unsigned k = 0; k < bucket / 4; ++k) power *= 2;
  return power * (1 + (bucket % 4) / 4.0);
}

struct Statistics {
  Counter continued;        ///< commands retired that are not the first of their request
  Counter bytes[2];         ///< read and written, by commands that succeeded
  Counter durable;          ///< of those written, what was durable by itself (FUA)
  Counter errors;           ///< commands that failed
  Counter coalesced;        ///< commands told of by a doorbell store that told of others too, less one for each store
  Counter protocol_errors;  ///< completions that no command was waiting for
  Counter retries;          ///< requests that were submitted again, each time
  std::array<Counter, kLatencyBuckets> latency;  ///< of every command retired, from staging to retirement

  std::uint64_t commands() const {
    std::uint64_t total = 0;
    for (const Counter& bucket : latency) total += bucket.get();
    return total;
  }
  /// Requests that have finished; while some are in flight, those whose first command has.
  std::uint64_t requests() const {
    const std::uint64_t all = commands(), further = continued.get();
    return all > further ? all - further : 0;
  }
};

}  // namespace ugds::queue
