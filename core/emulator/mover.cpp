// SPDX-License-Identifier: Apache-2.0
#include "emulator/mover.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace ugds::emulator {

namespace {

std::uint64_t address_of(const std::byte* memory) { return reinterpret_cast<std::uintptr_t>(memory); }

/// Parts for each thread: who is slower, or comes later, then does fewer.
constexpr std::uint64_t kPartsEach = 4;

}  // namespace

void Mover::make_buffers() {
  if (buffers_.data() == nullptr) buffers_ = Reservation((team_.threads() + 1) * kBounce, true);
}

Moved Mover::bounce(Media& media, Direction direction, std::uint64_t at, std::byte* memory, std::uint64_t bytes,
                    Copier& copier, std::byte* buffer) {
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

bool Mover::add(std::byte* memory, std::uint64_t bytes, Copier* copier) {
  if (count_ == stretches_.size()) return false;
  stretches_[count_++] = {bytes_, bytes, memory, copier};
  bytes_ += bytes;
  return true;
}

Moved Mover::move_together(Media& media, Direction direction, std::uint64_t at, std::uint64_t unit) noexcept {
  media_ = &media;
  direction_ = direction;
  at_ = at;
  media_error_.store(0, std::memory_order_relaxed);
  memory_error_.store(0, std::memory_order_relaxed);
  // A part through a buffer is one copy, and no block is cut in two: others would see it half written.
  const std::uint64_t fair = bytes_ / (kPartsEach * (team_.threads() + 1));
  const std::uint64_t units = std::max<std::uint64_t>(1, std::clamp(fair, kLeastPart, kBounce) / unit);
  part_ = units * unit;
  const std::uint64_t parts = (bytes_ + part_ - 1) / part_;
  team_.run(
      static_cast<std::uint32_t>(parts),
      [](void* mover, std::uint32_t part, std::uint32_t worker) noexcept {
        static_cast<Mover*>(mover)->do_part(part, worker);
      },
      this);
  count_ = 0;
  bytes_ = 0;
  return {media_error_.load(std::memory_order_relaxed), memory_error_.load(std::memory_order_relaxed)};
}

void Mover::do_part(std::uint32_t part, std::uint32_t worker) noexcept {
  if (media_error_.load(std::memory_order_relaxed) != 0 || memory_error_.load(std::memory_order_relaxed) != 0) return;
  const std::uint64_t from = part * part_, to = std::min(from + part_, bytes_);
  Moved moved;
  try {
    moved = move_part(from, to, buffers_.data() + worker * kBounce);
  } catch (...) {
    moved.media = EIO;
  }
  if (moved.media != 0) media_error_.store(moved.media, std::memory_order_relaxed);
  if (moved.memory != 0) memory_error_.store(moved.memory, std::memory_order_relaxed);
}

Moved Mover::move_part(std::uint64_t from, std::uint64_t to, std::byte* buffer) const {
  const Stretch* stretch =
      std::upper_bound(stretches_.data(), stretches_.data() + count_, from,
                       [](std::uint64_t byte, const Stretch& other) { return byte < other.start; }) -
      1;
  Moved moved;
  while (from < to && moved) {
    const std::uint64_t within = from - stretch->start;
    const std::uint64_t bytes = std::min(stretch->bytes - within, to - from);
    std::byte* const memory = stretch->memory + within;
    moved = stretch->copier == nullptr
                ? direct(*media_, direction_, at_ + from, memory, bytes)
                : bounce(*media_, direction_, at_ + from, memory, bytes, *stretch->copier, buffer);
    from += bytes;
    ++stretch;
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
