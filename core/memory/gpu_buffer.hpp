// SPDX-License-Identifier: Apache-2.0
//
// GPU memory as the registry and the engine use it: whose it is, whether it is still there, how bytes get into it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/copier.hpp"
#include "device/device.hpp"
#include "gpu/exporters.hpp"
#include "gpu/runtime.hpp"

namespace ugds::memory {

/// Which route a registration may take. A demand that cannot be met fails.
enum class Demand : std::uint8_t { none, direct, staged };

class GpuBuffer final : public Copier {
 public:
  GpuBuffer(gpu::Runtime& runtime, const gpu::Allocation& allocation, std::uint64_t address)
      : runtime_(runtime), allocation_(allocation), address_(address) {}

  gpu::Runtime& runtime() const { return runtime_; }
  const gpu::Place& place() const { return allocation_.place; }
  const gpu::Allocation& allocation() const { return allocation_; }

  /// Whether the memory is what was registered: false once it was freed. Asks the driver.
  bool is_alive() const noexcept { return runtime_.is_alive(allocation_, address_); }

  /// By the driver, in the calling thread. 0, ESTALE (freed while it was registered) or EIO.
  int copy_in(std::uint64_t to, const void* from, std::uint64_t bytes) noexcept override;
  int copy_out(void* to, std::uint64_t from, std::uint64_t bytes) noexcept override;

  /// Maps [address, address + length) to a device by one way or the other. Throws Failure where there is none; `why`
  /// tells then what every way said.
  device::Mapping map(device::Device& device, std::uint64_t address, Bytes length, device::Access access,
                      std::uint64_t* pages, std::string& why);
  /// The same by the NVIDIA driver's interface for peers, whose pages are larger.
  device::Mapping map_nvidia(device::Device& device, std::uint64_t address, Bytes length, device::Access access,
                             std::uint64_t* pages) const;
  /// A DMA-BUF of [address, address + size). Throws Failure(EOPNOTSUPP) with what every exporter said.
  gpu::Exported export_range(std::uint64_t address, std::uint64_t size) const;

 private:
  gpu::Runtime& runtime_;
  const gpu::Allocation allocation_;
  const std::uint64_t address_;
};

}  // namespace ugds::memory
