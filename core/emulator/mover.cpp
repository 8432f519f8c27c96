// SPDX-License-Identifier: Apache-2.0
#include "emulator/mover.hpp"

#include <algorithm>
#include <cstring>

namespace ugds::emulator {

namespace {

std::uint64_t address_of(const std::byte* memory) { return reinterpret_cast<std::uintptr_t>(memory); }

}  // namespace

void Mover::make_buffers() {
  if (buffers_.data() == nullptr) buffers_ = Reservation(kBounce, true);
}

Moved Mover::bounce(Media& media, Direction direction, std::uint64_t at, std::byte* memory, std::uint64_t bytes,
                    Copier& copier) noexcept {
  std::byte* const buffer = buffers_.data();
  Moved moved;
  while (bytes != 0 && moved) {
    const std::uint64_t part = std::min(bytes, kBounce);
    if (direction == Direction::to_host) {
      moved.media = media.read(at, buffer, part);
      if (moved) moved.memory = copier.copy_in(address_of(memory), buffer, part);
    } else {
      moved.memory = copier.copy_out(buffer, address_of(memory), part);
      if (moved) moved.media = media.write(at, buffer, part);
    }
    at += part;
    memory += part;
    bytes -= part;
  }
  return moved;
}

int Mover::fill(std::byte* memory, int value, std::uint64_t bytes, Copier* copier) noexcept {
  if (copier == nullptr) {
    std::memset(memory, value, bytes);
    return 0;
  }
  std::memset(buffers_.data(), value, std::min(bytes, kBounce));
  int error = 0;
  while (bytes != 0 && error == 0) {
    const std::uint64_t part = std::min(bytes, kBounce);
    error = copier->copy_in(address_of(memory), buffers_.data(), part);
    memory += part;
    bytes -= part;
  }
  return error;
}

}  // namespace ugds::emulator
