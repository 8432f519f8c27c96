// SPDX-License-Identifier: Apache-2.0
//
// Moves a command's data between the medium and memory. To and from memory that this process does not reach by its
// address, it goes through a buffer of the controller's, piece by piece. With `copiers=` threads share what is large:
// the command is done when all of it is.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/copier.hpp"
#include "emulator/command.hpp"
#include "emulator/media.hpp"
#include "emulator/reservation.hpp"
#include "emulator/team.hpp"

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
  /// What is cut into parts, for threads to share, is cut into parts of this at least.
  static constexpr std::uint64_t kLeastPart = 64 * 1024;

  /// Throws Failure where the system gives no more threads.
  explicit Mover(std::uint32_t copiers) : team_(copiers) {}

  /// Makes the buffers that foreign memory needs, one a thread, unless they are there: no command allocates. Throws
  /// Failure(ENOMEM).
  void make_buffers();

  /// Whether threads share what is of this size, by `add` and `move_together`.
  bool shares(std::uint64_t bytes) const { return team_.threads() != 0 && bytes >= 2 * kLeastPart; }

  /// Between the medium at `at` and `memory`, which `copier` reaches where there is one. In the caller's thread.
  Moved move(Media& media, Direction direction, std::uint64_t at, std::byte* memory, std::uint64_t bytes,
             Copier* copier) {
    if (copier != nullptr) [[unlikely]]
      return bounce(media, direction, at, memory, bytes, *copier, buffers_.data());
    return direct(media, direction, at, memory, bytes);
  }

  /// Adds what follows on the medium to what `move_together` moves next. False where it has to be called first.
  bool add(std::byte* memory, std::uint64_t bytes, Copier* copier);
  /// Moves what was added since the last call, to or from the medium from `at` on, cut at multiples of `unit` bytes.
  Moved move_together(Media& media, Direction direction, std::uint64_t at, std::uint64_t unit) noexcept;
  std::uint64_t added() const { return bytes_; }

  /// Fills memory with one byte value, as far as its copier does so.
  int fill(std::byte* memory, int value, std::uint64_t bytes, Copier* copier) noexcept;

 private:
  struct Stretch {
    std::uint64_t start;  ///< bytes before it
    std::uint64_t bytes;
    std::byte* memory;
    Copier* copier;
  };

  static Moved direct(Media& media, Direction direction, std::uint64_t at, std::byte* memory, std::uint64_t bytes) {
    return {direction == Direction::to_host ? media.read(at, memory, bytes) : media.write(at, memory, bytes), 0};
  }
  static Moved bounce(Media& media, Direction direction, std::uint64_t at, std::byte* memory, std::uint64_t bytes,
                      Copier& copier, std::byte* buffer);
  Moved move_part(std::uint64_t from, std::uint64_t to, std::byte* buffer) const;
  void do_part(std::uint32_t part, std::uint32_t worker) noexcept;

  Reservation buffers_;

  // What is moved together, written while the team rests.
  std::array<Stretch, 512> stretches_;
  std::size_t count_ = 0;
  std::uint64_t bytes_ = 0, part_ = 0, at_ = 0;
  Direction direction_ = Direction::none;
  Media* media_ = nullptr;
  std::atomic<int> media_error_{0}, memory_error_{0};

  Team team_;  // last: everything above exists while its threads run
};

}  // namespace ugds::emulator
