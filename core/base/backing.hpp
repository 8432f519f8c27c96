// SPDX-License-Identifier: Apache-2.0
//
// Memory of ours that has a descriptor behind it, so that another process can map the same pages; and which descriptor
// belongs to an address.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/descriptor.hpp"

namespace ugds {

/// The place of memory in a descriptor.
struct Backing {
  int descriptor = -1;
  std::uint64_t offset = 0;
  explicit operator bool() const { return descriptor >= 0; }
};

/// Makes [address, address + length), a shared mapping of `descriptor` from its start, known until it is forgotten.
/// Thread-safe.
void remember_backing(const void* address, std::uint64_t length, int descriptor);
void forget_backing(const void* address) noexcept;
/// What lies behind the whole of a range; nothing if any of it has none. Thread-safe.
Backing find_backing(const void* address, std::uint64_t length);

/// A descriptor of `size` zeroed bytes that can no longer shrink, so that whoever maps it cannot be hit by that. Empty
/// where there is none; errno says why.
Descriptor make_shared_memory(std::uint64_t size, unsigned flags = 0);
/// Allocates all of its pages now, zeroed, so that missing memory is an error here and not a fault (SIGBUS) where it is
/// first touched. Returns 0 or the error; signals do not end it.
int allocate_pages(const Descriptor& memory, std::uint64_t size);

}  // namespace ugds
