// SPDX-License-Identifier: Apache-2.0
//
// Host memory of ours that any transport can reach: it has a descriptor behind it (vfio-user maps that), it is in huge
// pages where the system has some, and it is not inherited by `fork`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/descriptor.hpp"

namespace ugds::memory {

class HostMemory {
 public:
  /// Zeroed, aligned to 4 KiB (to 2 MiB in huge pages). Throws Failure: EINVAL (no bytes), ENOMEM.
  explicit HostMemory(std::uint64_t size);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  std::byte* data() const { return data_; }
  std::uint64_t size() const { return size_; }
  bool huge_pages() const { return huge_; }

 private:
  bool map(std::uint64_t size, unsigned flags);

  std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
  std::uint64_t mapped_ = 0;
  Descriptor descriptor_;
  unsigned born_;  ///< fork_generation()
  bool huge_ = false;
};

}  // namespace ugds::memory
