// SPDX-License-Identifier: Apache-2.0
//
// How the bytes of a staged request go through its area: in pieces, each of which is copied while the device is at work
// on the next. There are two ways. Where each piece costs its caller calls of the driver there are few: what does not
// fit the area goes through its two halves in turn, and the last group is cut finer, since nothing overlaps with the
// copy of the very last piece. Where one kernel copies them all, they are small and even, and go round in the area.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ugds::engine {

struct StreamPlan {
  struct Piece {
    std::uint64_t begin = 0, bytes = 0;  ///< in the request
    std::uint64_t at = 0;                ///< in the area
    std::uint32_t needs = 0;             ///< how many pieces must be through before its place is free
  };

  StreamPlan() = default;
  /// `area`: bytes, a multiple of 256 KiB where `bytes` does not fit.
  StreamPlan(std::uint64_t bytes, std::uint64_t area) : total(bytes) {
    group = bytes <= area ? std::max<std::uint64_t>(bytes, 1) : area / 2;
    groups = static_cast<std::uint32_t>((bytes + group - 1) / group);
    const std::uint64_t last = bytes - (groups - 1) * group;
    // What is left over is copied while the device reads the tail; each cut costs its caller two calls of the driver.
    tail = last > kMuch ? kLongTail : last > kSome ? kTail : 0;
    count = groups + (tail != 0 ? 1 : 0);
  }

  /// Even pieces. `area`: bytes, a multiple of 256 KiB where `bytes` does not fit.
  static StreamPlan even(std::uint64_t bytes, std::uint64_t area) {
    StreamPlan plan;
    plan.total = bytes;
    plan.size = bytes <= kEven ? bytes : bytes <= kManyEven ? kEven : std::min(kLargeEven, area / 2);
    plan.count = static_cast<std::uint32_t>((bytes + plan.size - 1) / plan.size);
    plan.places = static_cast<std::uint32_t>(std::min<std::uint64_t>(plan.count, area / plan.size));
    plan.most_open = kMostOpen;
    return plan;
  }

  Piece piece(std::uint32_t number) const {
    if (size != 0) {
      const std::uint64_t begin = number * size;
      return {begin, std::min(size, total - begin), number % places * size, number < places ? 0 : number - places + 1};
    }
    const std::uint32_t in = std::min(number, groups - 1);
    Piece piece{in * group, group, in % 2 * group, in < 2 ? 0 : in - 1};
    if (number < groups - 1) return piece;
    const bool is_tail = number == groups;
    const std::uint64_t from = is_tail ? total - tail : piece.begin;
    piece.at += from - piece.begin;
    piece.begin = from;
    piece.bytes = (is_tail ? total : total - tail) - from;
    return piece;
  }

  static constexpr std::uint64_t kTail = 128 * 1024, kLongTail = 512 * 1024;
  static constexpr std::uint64_t kSome = 256 * 1024, kMuch = 2048 * 1024;
  static constexpr std::uint64_t kEven = 128 * 1024, kManyEven = 1024 * 1024, kLargeEven = 256 * 1024;
  /// Pieces that may be at the device at once.
  static constexpr std::uint32_t kMostOpen = 8;

  std::uint64_t total = 0, group = 0;
  std::uint32_t groups = 0, count = 0;
  std::uint64_t tail = 0;       ///< of the last group, in bytes
  std::uint32_t most_open = 4;  ///< those of two groups
  std::uint64_t size = 0;       ///< of every piece but the last, where they are even; 0 elsewhere
  std::uint32_t places = 0;     ///< of such pieces in the area
};

}  // namespace ugds::engine
