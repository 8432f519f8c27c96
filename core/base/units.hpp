// SPDX-License-Identifier: Apache-2.0
//
// Strong types for module borders: an IOVA, a block address and a byte count cannot be mixed up.
// Loops inside a module use the plain integer in `.value`.
#pragma once

#include <compare>
#include <cstdint>

namespace ugds {

template <class Tag>
struct Quantity {
  std::uint64_t value = 0;

  constexpr Quantity() = default;
  constexpr explicit Quantity(std::uint64_t v) : value(v) {}

  constexpr auto operator<=>(const Quantity&) const = default;
  constexpr Quantity operator+(Quantity other) const { return Quantity(value + other.value); }
  constexpr Quantity operator-(Quantity other) const { return Quantity(value - other.value); }
};

/// An address as the controller sees it on its bus. Never a pointer of this process.
struct IovaTag;
using Iova = Quantity<IovaTag>;

/// A logical block address of one namespace.
struct LbaTag;
using Lba = Quantity<LbaTag>;

/// A count of bytes.
struct BytesTag;
using Bytes = Quantity<BytesTag>;

constexpr std::uint64_t operator""_KiB(unsigned long long n) { return n << 10; }
constexpr std::uint64_t operator""_MiB(unsigned long long n) { return n << 20; }
constexpr std::uint64_t operator""_GiB(unsigned long long n) { return n << 30; }

constexpr std::uint64_t align_down(std::uint64_t x, std::uint64_t power_of_two) { return x & ~(power_of_two - 1); }
constexpr std::uint64_t align_up(std::uint64_t x, std::uint64_t power_of_two) {
  return align_down(x + power_of_two - 1, power_of_two);
}
constexpr bool is_aligned(std::uint64_t x, std::uint64_t power_of_two) { return (x & (power_of_two - 1)) == 0; }

}  // namespace ugds
