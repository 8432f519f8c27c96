// SPDX-License-Identifier: Apache-2.0
//
// Memory that has an address and that this process does not reach by it: a GPU's. Somebody else copies.
#pragma once

#include <cstdint>

#include "base/units.hpp"

namespace ugds {

class Copier {
 public:
  virtual ~Copier() = default;
  /// Bytes to memory that this process does not reach by its address. 0 or an errno. Thread-safe.
  virtual int copy_in(std::uint64_t to, const void* from, std::uint64_t bytes) noexcept = 0;
  /// Bytes from it. Returns when they are there. 0 or an errno. Thread-safe.
  virtual int copy_out(void* to, std::uint64_t from, std::uint64_t bytes) noexcept = 0;
};

/// A range of such memory. The copier outlives every mapping that names it.
struct ForeignRange {
  std::uint64_t address = 0;
  Bytes length{};
  Copier* copier = nullptr;
};

}  // namespace ugds
