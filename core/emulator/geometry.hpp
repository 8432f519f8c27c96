// SPDX-License-Identifier: Apache-2.0
//
// How blocks lie in a subsystem's flat store: one namespace after another; in each the blocks, and after them, where
// metadata is kept apart, the metadata of all of them.
#pragma once

#include <cstdint>

namespace ugds::emulator {

struct Geometry {
  std::uint32_t lba = 4096;
  std::uint32_t metadata = 0;
  bool interleaved = false;
  std::uint32_t namespaces = 1;
  std::uint64_t blocks = 0;  ///< of each namespace

  /// Bytes that a block takes in a data buffer, and in the store's part for data.
  std::uint64_t unit() const { return lba + (interleaved ? metadata : 0u); }
  /// Bytes a block of metadata that have a buffer of their own.
  std::uint64_t separate() const { return interleaved ? 0 : metadata; }
  std::uint64_t namespace_bytes() const { return blocks * (std::uint64_t{lba} + metadata); }
  std::uint64_t total_bytes() const { return namespace_bytes() * namespaces; }
  /// Namespaces count from 1.
  std::uint64_t data_at(std::uint32_t nsid, std::uint64_t block) const {
    return (nsid - 1) * namespace_bytes() + block * unit();
  }
  std::uint64_t metadata_at(std::uint32_t nsid, std::uint64_t block) const {
    return (nsid - 1) * namespace_bytes() + blocks * unit() + block * separate();
  }
};

}  // namespace ugds::emulator
