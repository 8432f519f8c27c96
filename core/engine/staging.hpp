// SPDX-License-Identifier: Apache-2.0
//
// Pinned memory of ours through which requests go whose memory a device does not reach. It is made as it is needed, up
// to a bound, and kept. UGDS_STAGING (such as "64MiB") sets the bound.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "gpu/runtime.hpp"
#include "memory/host.hpp"
#include "memory/registry.hpp"

namespace ugds::engine {

/// A part of a slab: memory that devices and GPUs reach.
struct StagingArea {
  std::byte* data = nullptr;
  std::uint64_t size = 0;
  std::uint64_t offset = 0;  ///< in the registration
  memory::Reference slab{};
  gpu::Address device = 0;  ///< what kernels use
  std::uint32_t slab_number = 0, first_unit = 0;

  explicit operator bool() const { return data != nullptr; }
};

class Staging {
 public:
  static constexpr std::uint64_t kUnit = 128 * 1024, kSlab = 8 * 1024 * 1024;
  static constexpr std::uint64_t kDefaultLimit = 256 * 1024 * 1024;

  /// One for each runtime, for ever.
  static Staging& of(gpu::Runtime& runtime);

  /// An area of at least `size` bytes (at most kSlab), or an empty one where the bound is reached. Makes a slab where
  /// none has room, which asks the driver. Throws Failure (ENOMEM, and what pinning says). Thread-safe.
  StagingArea take(std::uint64_t size);
  /// Nothing reads or writes it any more.
  void give_back(const StagingArea& area) noexcept;
  /// Something may still read or write it: a device, as long as commands on its slab are in flight, and what a stream
  /// has before it, until the stream's word `reached` is at `value`. It is given back after that. Thread-safe.
  void give_up(const StagingArea& area, const std::atomic<std::uint64_t>* reached = nullptr,
               std::uint64_t value = 0) noexcept;

  /// Whether kernels hold streams and copy what is staged. UGDS_GPU_KERNELS=0 is for programs whose own kernels leave
  /// no room on the GPU for others.
  static bool may_use_kernels();

  std::uint64_t limit() const { return limit_; }
  /// Bytes that are pinned.
  std::uint64_t pinned();

  explicit Staging(gpu::Runtime& runtime);

 private:
  struct Slab {
    std::unique_ptr<memory::HostMemory> memory;
    memory::Reference reference{};
    gpu::Address device = 0;
    std::uint64_t used = 0;  ///< a bit for each unit
  };
  struct GivenUp {
    StagingArea area;
    const std::atomic<std::uint64_t>* reached = nullptr;
    std::uint64_t value = 0;
  };
  StagingArea take_from(std::uint32_t number, std::uint32_t units);
  void free_units(const StagingArea& area) noexcept;
  void reclaim();
  Slab make_slab();

  gpu::Runtime& runtime_;
  const std::uint64_t limit_;
  std::mutex making_;  ///< before lock_, and while the driver pins: that may wait for streams
  std::mutex lock_;
  std::vector<Slab> slabs_;
  std::vector<GivenUp> given_up_;
};

}  // namespace ugds::engine
