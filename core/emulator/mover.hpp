// SPDX-License-Identifier: Apache-2.0
//
// Moves a command's data between the medium and memory. To and from memory that this process does not reach by its
// address, it goes through a buffer of the controller's, piece by piece.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/copier.hpp"
#include "emulator/command.hpp"
#include "emulator/media.hpp"
#include "emulator/reservation.hpp"

namespace ugds::emulator {

/// What ended a movement early: an errno of the medium's, or of a copier's.
struct Moved {
  int media = 0, memory = 0;
  explicit operator bool() const { return media == 0 && memory == 0; }
};

class Mover {
 public:
  /// Bytes that pass through a buffer at once.
  static constexpr std::uint64_t kBounce = std::uint64_t{1} << 20;

  /// Makes the buffers that foreign memory needs, unless they are there: no command allocates. Throws Failure(ENOMEM).
  void make_buffers();

  /// Between the medium at `at` and `memory`, which `copier` reaches where there is one.
  Moved move(Media& media, Direction direction, std::uint64_t at, std::byte* memory, std::uint64_t bytes,
             Copier* copier) noexcept {
    if (copier != nullptr) [[unlikely]]
      return bounce(media, direction, at, memory, bytes, *copier);
    return {direction == Direction::to_host ? media.read(at, memory, bytes) : media.write(at, memory, bytes), 0};
  }
  /// Fills memory with one byte value, as far as its copier does so.
  int fill(std::byte* memory, int value, std::uint64_t bytes, Copier* copier) noexcept;

 private:
  Moved bounce(Media& media, Direction direction, std::uint64_t at, std::byte* memory, std::uint64_t bytes,
               Copier& copier) noexcept;

  Reservation buffers_;
};

}  // namespace ugds::emulator
