// SPDX-License-Identifier: Apache-2.0
//
// The GPUs' memory and the host memory that the driver knows. A GPU's memory is one file without a name, mapped twice:
// where the program sees it nothing may touch it, so that a processor that follows a device pointer crashes as on real
// hardware; the fake's own copies go through the other mapping.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "calls.hpp"

namespace fake_cuda {

constexpr int most_gpus = 8;

enum class Kind : std::uint8_t { device, managed, host, registered };

struct Block {
  std::uint64_t base = 0;
  std::uint64_t size = 0;
  Kind kind = Kind::device;
  int gpu = 0;
  CUcontext context = nullptr;
  std::uint64_t id = 0;  ///< never used again

  std::uint64_t end() const { return base + size; }
  bool holds(std::uint64_t address, std::uint64_t bytes) const {
    return address >= base && address <= end() && bytes <= end() - address;
  }
  bool is_host() const { return kind == Kind::host || kind == Kind::registered; }
};

class Memory {
 public:
  CUresult allocate(int gpu, CUcontext context, std::uint64_t size, std::uint64_t& address);
  CUresult allocate_mapped(Kind kind, int gpu, CUcontext context, std::uint64_t size, std::uint64_t& address);
  CUresult register_host(int gpu, CUcontext context, std::uint64_t address, std::uint64_t size);
  /// Removes the block that begins there, if it is `kind` (device: managed too).
  CUresult release(std::uint64_t address, Kind kind);
  void release_all(CUcontext context);

  std::optional<Block> find(std::uint64_t address) const;
  /// The block that holds all of the range.
  std::optional<Block> find(std::uint64_t address, std::uint64_t bytes) const;
  /// Where this process reaches the range; nullptr where no block holds it.
  std::byte* reach(std::uint64_t address, std::uint64_t bytes) const;
  std::uint64_t count(Kind kind) const;

 private:
  struct Window {
    std::uint64_t seen = 0;    ///< the addresses that the program gets
    std::byte* own = nullptr;  ///< the same memory for the fake
    int file = -1;
  };
  CUresult open(int gpu);
  std::optional<std::uint64_t> room(const Window& window, std::uint64_t size) const;
  void give_back(const Block& block);
  void add(Block block);

  mutable std::mutex lock_;
  std::map<std::uint64_t, Block> blocks_;
  std::array<Window, most_gpus> windows_;
  std::uint64_t last_id_ = 0;
};

Memory& memory();

/// How many DMA-BUFs were made since the last reset.
inline std::atomic<std::uint64_t> exports{0};

}  // namespace fake_cuda
