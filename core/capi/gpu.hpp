// SPDX-License-Identifier: Apache-2.0
//
// GPU memory in the C API (gpu.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "capi/internal.hpp"
#include "gpu/runtime.hpp"

namespace ugds::capi {

/// Which memory a registration may be of: the C API's numbers.
enum class WantedBackend : int { any = 0, cuda = 1, hip = 2 };

/// Registers what `base` is: GPU memory where a runtime knows the address, else host memory. `exported`: as a DMA-BUF,
/// or not at all. Throws Failure.
memory::Reference register_memory(const void* base, std::size_t size, WantedBackend backend, bool exported);

/// Closes a registration: UGDS_SUCCESS, UGDS_BUSY (commands are in flight), UGDS_RDMA_REGION_ACTIVE, or
/// UGDS_MEMORY_NOT_REGISTERED (closed meanwhile). Thread-safe.
int close_buffer(const memory::Reference& buffer);

/// The RDMA regions of a registration, in words.
std::string regions_of(const memory::Reference& buffer);

/// GPU memory that is registered for one call of one device, from a multiple of 64 KiB on. Nobody else finds it, so
/// several may be of the same memory. It is closed with this, or when the device is through with it.
class TemporaryBuffer {
 public:
  /// Nothing where the address is no GPU's, or does not begin at a multiple of 64 KiB.
  TemporaryBuffer(const void* address, std::size_t size, std::uint32_t device);
  ~TemporaryBuffer();
  TemporaryBuffer(const TemporaryBuffer&) = delete;
  TemporaryBuffer& operator=(const TemporaryBuffer&) = delete;
  const memory::Reference& reference() const { return reference_; }

 private:
  memory::Reference reference_{};
};

}  // namespace ugds::capi
