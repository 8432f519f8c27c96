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

/// Latencies in logarithmic buckets of ticks, four to each doubling: bucket 4k + s holds [2^k (1 + s/4), 2^k (1 + (s+1)/4)).
inline constexpr unsigned kLatencyBuckets = 256;

constexpr unsigned latency_bucket(std::uint64_t t) {
  if (t < 4) return static_cast<unsigned>(t) * 4;
  const unsigned k = static_cast<unsigned>(std::bit_width(t)) - 1;
  return k * 4 + static_cast<unsigned>(t >> (k - 2) & 3);
}
static_assert(latency_bucket(~std::uint64_t{0}) == kLatencyBuckets - 1);
static_assert(latency_bucket(4) == 8 && latency_bucket(7) == 11 && latency_bucket(8) == 12);
/// The smallest latency, in ticks, of a bucket.
constexpr double latency_bucket_floor(unsigned bucket) {
  double power = 1;
  for (unsigned k = 0; k < bucket / 4; ++k) power *= 2;
  return power * (1 + (bucket % 4) / 4.0);
}

struct Statistics {
  Counter requests;        ///< finished, whole
  Counter commands;        ///< retired
  Counter read_bytes, write_bytes;
  Counter errors;          ///< commands that failed
  Counter doorbells;       ///< submission doorbell stores
  Counter protocol_errors; ///< completions that no command was waiting for
  std::array<Counter, kLatencyBuckets> latency;  ///< of commands, from staging to retirement
};

}  // namespace ugds::queue
