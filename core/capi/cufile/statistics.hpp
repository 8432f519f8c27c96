// SPDX-License-Identifier: Apache-2.0
//
// cuFile's statistics: operations, bytes and latencies at level 1, sizes at level 2, GPUs at level 3. They are counted
// between start and stop, and from the driver's opening on where cufile.json gives a level.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "capi/cufile/abi.h"

namespace ugds::cufile {

enum class Operation : unsigned {
  handle_register,
  handle_deregister,
  buffer_register,
  buffer_deregister,
  batch_set_up,
  batch_submit,
  batch_cancel,
  batch_destroy,
  batch_enqueue,
  batch_process,  ///< a request of a batch has ended
  batch_complete,
  kinds
};

/// Where the memory of a request is: a GPU by its number, or none.
inline constexpr int kHost = -1;

struct Request {
  bool write = false, batch = false, unaligned = false, staged = false;
  int gpu = kHost;
  std::int64_t moved = 0;  ///< as Moved
  std::uint64_t nanoseconds = 0;
};

class Statistics {
 public:
  constexpr Statistics() = default;

  int level() const { return level_.load(std::memory_order_relaxed); }
  void set_level(int level) { level_.store(level, std::memory_order_relaxed); }
  bool running() const { return running_.load(std::memory_order_relaxed); }
  void start();
  void stop();
  void reset();
  /// At the driver's opening, with the level of the configuration; and at its close.
  void begin(int level);
  void end();

  void count(Operation operation, bool ok, std::uint64_t by = 1);
  void count(const Request& request);
  void count_batch(bool submit, std::uint64_t nanoseconds);
  void count_buffer(int gpu, bool registered, bool ok, std::uint64_t bytes);
  void set_last_batch(std::uint64_t read, std::uint64_t written);

  void fill(CUfileStatsLevel1_t& stats) const;
  void fill(CUfileStatsLevel2_t& stats) const;
  void fill(CUfileStatsLevel3_t& stats) const;

 private:
  using Counter = std::atomic<std::uint64_t>;
  struct Pair {
    Counter ok{0}, err{0};
  };
  struct Direction {
    Pair operations;
    Counter bytes{0}, nanoseconds{0}, batch_bytes{0}, last_batch{0};
    std::array<Counter, 32> sizes{};
  };
  struct Gpu {
    struct Way {
      Counter bytes{0}, nanoseconds{0}, total{0}, direct{0}, staged{0}, unaligned{0}, errors{0};
    } ways[2];
    Counter registrations{0}, registered{0}, refused{0}, freed{0}, bytes{0};
  };

  std::uint64_t elapsed() const;

  std::atomic<int> level_{0};
  std::atomic<bool> running_{false};
  Counter began_{0}, stopped_after_{0};  ///< in nanoseconds; after how long, once it is stopped
  std::array<Pair, static_cast<std::size_t>(Operation::kinds)> operations_{};
  Direction directions_[2];  ///< reads and writes
  Counter submit_ns_{0}, complete_ns_{0};
  std::array<Gpu, CUFILE_STATS_GPUS> gpus_{};
};

Statistics& statistics();

/// Counts the requests on streams that have ended since somebody looked (stream.cpp).
void count_ended_requests();

}  // namespace ugds::cufile
