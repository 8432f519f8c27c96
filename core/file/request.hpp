// SPDX-License-Identifier: Apache-2.0
//
// A request on a file, and the parts in which the kernel gets it. A read or write whose range and memory are aligned is
// one part, past the page cache. Of any other the edges are cut off:
//
//   read    edges, or all of it where the memory does not fit the range, come past the page cache into memory of ours
//           and are copied from there
//   write   edges go through the page cache, by the kernel's own read-modify-write: it never touches a neighbouring
//           byte, whoever else is writing there. What is whole pages goes past it, from memory of ours where the
//           caller's does not fit
//
// Direct and buffered writes of one file never share a page, so that neither can be undone by the other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "file/file.hpp"

namespace ugds::file {

enum class Kind : std::uint8_t {
  read,
  write,
  flush,    ///< what was written before is on the medium: fdatasync
  discard,  ///< the range reads as zeros, and need not be kept
};

struct Request;

/// What the kernel is asked for at once.
struct Part {
  enum class Way : std::uint8_t { direct, bounced, buffered };
  Request* request = nullptr;
  Way way = Way::buffered;
  std::uint8_t tries = 0;
  bool refused = false;  ///< by direct I/O; the page cache is asked in its place
  int result = 0;        ///< of the last time: bytes, or -errno
  // The range that is asked for, and how much of it has been done.
  std::byte* memory = nullptr;
  std::uint64_t offset = 0, bytes = 0, done = 0;
  // Where the request's own bytes are in it: fewer, where whole blocks are read around them.
  std::byte* wanted = nullptr;
  std::uint64_t wanted_offset = 0, wanted_bytes = 0;
  int error = 0;         ///< errno
  Part* next = nullptr;  ///< of a list that it is on
};

/// Lives with its caller, unchanged, until it is told of.
struct Request {
  Kind kind = Kind::read;
  bool durable = false;  ///< of a write: it is on the medium when it is told of
  File* file = nullptr;
  std::byte* memory = nullptr;
  std::uint64_t offset = 0, bytes = 0;
  void* owner = nullptr;  ///< the caller's own

  // When it is told of:
  std::uint64_t done = 0;  ///< bytes from its beginning that are right; fewer than asked for at the end of the file
  int error = 0;           ///< errno of the first that failed, or 0

  // The queue's:
  std::array<Part, 3> parts{};
  std::uint8_t part_count = 0, parts_left = 0;
  bool cancelled = false;
  std::byte* bounce = nullptr;
};

inline constexpr std::uint64_t kMostBytes = 1 << 20;

/// Memory of ours for bounced parts, in pieces for one request each, made as they are needed. Its owner's threads take
/// turns.
class Bounces {
 public:
  /// As much as the largest request, and the blocks around it.
  static constexpr std::uint64_t kEdges = 128 << 10, kSize = kMostBytes + kEdges;
  static constexpr std::size_t kMost = 16;

  Bounces() = default;
  ~Bounces();
  Bounces(const Bounces&) = delete;
  Bounces& operator=(const Bounces&) = delete;
  /// kSize bytes from a page's beginning on, or nullptr where all are in use or there is no memory.
  std::byte* take() noexcept;
  void give_back(std::byte* memory) noexcept { free_[free_count_++] = memory; }

 private:
  std::array<std::byte*, kMost> free_{};
  std::size_t free_count_ = 0, made_ = 0;
};

/// Cuts a request into its parts. Reads and writes have at most kMostBytes. What would need memory of ours is buffered
/// where there is none now.
void plan(Request& request, Bounces& bounces) noexcept;
/// Takes the kernel's answer to a part, `result`. False: it has to be asked once more.
bool settle(Part& part) noexcept;
/// Sums up a request of which no part is left. Its bounce memory is the caller's to give back.
void conclude(Request& request) noexcept;

}  // namespace ugds::file
