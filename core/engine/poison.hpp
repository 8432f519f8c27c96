// SPDX-License-Identifier: Apache-2.0
//
// Marks GPU memory that a failed direct read was to fill. What a stream waits for must never need the driver, and
// nothing is enqueued for requests that succeed: so a thread of its own asks the driver when one has failed, and where
// the driver does not answer soon, because somebody frees memory or loads a kernel, the stream goes on without.
//
// A mark that came late would destroy what is right by then. The copy kernel reads what it has to do from pinned
// memory, and what was given up is taken out there. Three words tell whether it still can be:
//
//   gate   opened when everything is enqueued: before that the kernel cannot run
//   begun  written by the stream in front of the kernel: while it is not there, what is taken out is not done
//   ended  written behind it
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "gpu/runtime.hpp"
#include "memory/host.hpp"

namespace ugds::engine {

/// What a read that failed leaves in place of what it did not read.
inline constexpr std::byte kPoison{0xdb};

class Poison {
 public:
  /// One for each runtime, for ever.
  static Poison& of(gpu::Runtime& runtime);

  /// Makes what `Fill` needs, which asks the driver. Throws Failure. Thread-safe.
  void prepare();

  /// One use, by one thread; others wait for it.
  class Fill {
   public:
    Fill(Poison& poison, const gpu::Place& place) : poison_(poison), guard_(poison.lock_), place_(place) {}
    void add(gpu::Address address, std::uint64_t bytes) noexcept;
    /// False: not all of it was filled, and nothing will be any more. Waits for 200 ms where the driver does not
    /// answer.
    bool end() noexcept;

   private:
    Poison& poison_;
    std::lock_guard<std::mutex> guard_;
    gpu::Place place_;
    std::uint32_t count_ = 0;
    bool good_ = true;
  };

  explicit Poison(gpu::Runtime& runtime) : runtime_(runtime) {}

 private:
  static constexpr std::uint64_t kSource = 1024 * 1024;
  /// As many as a group has requests, and some.
  static constexpr std::uint32_t kOrders = 8192;
  enum class Job : std::uint8_t { none, asked, given_up, enqueued, failed };

  gpu::CopyOrder* orders() const { return reinterpret_cast<gpu::CopyOrder*>(memory_->data() + kSource); }
  bool run(const gpu::Place& place, std::uint32_t count) noexcept;
  bool start(const gpu::Place& place, std::uint32_t count) noexcept;
  bool is_over();
  void take_out(std::uint32_t count) noexcept;
  void work();
  int enqueue(const gpu::Place& place, std::uint32_t count, std::uint64_t number);
  gpu::StreamHandle stream_at(const gpu::Place& place);

  gpu::Runtime& runtime_;
  std::mutex preparing_;  ///< while the driver pins: that may wait for streams
  std::atomic<bool> is_prepared_{false};
  std::mutex lock_;  ///< of those who fill
  std::unique_ptr<memory::HostMemory> memory_;
  gpu::Address device_ = 0;
  gpu::Word gate_{}, begun_{}, ended_{};
  bool has_thread_ = false;
  std::uint64_t number_ = 0;  ///< of the job
  // Between the two threads.
  std::mutex job_lock_;
  std::condition_variable asked_;
  gpu::Place place_{};
  std::uint32_t count_ = 0;
  std::atomic<Job> job_{Job::none};
  // Of the thread.
  struct At {
    gpu::Place place;
    gpu::StreamHandle stream;
  };
  std::vector<At> streams_;
};

}  // namespace ugds::engine
