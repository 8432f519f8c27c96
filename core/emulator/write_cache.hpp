// SPDX-License-Identifier: Apache-2.0
//
// The volatile write cache, turned inside out: the medium holds what reads see, and the cache keeps, for each block
// that was written and not flushed, the image that a power cut would bring back. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "emulator/geometry.hpp"
#include "emulator/media.hpp"
#include "emulator/reservation.hpp"

namespace ugds::emulator {

class WriteCache {
 public:
  WriteCache(Media& media, const Geometry& geometry);

  /// Makes a change of blocks. `change()` does it, in the medium, and returns 0 or an errno. A durable change survives
  /// a power cut once this has returned 0.
  template <class Change>
  int write(std::uint32_t nsid, std::uint64_t block, std::uint64_t blocks, bool durable, Change&& change) {
    std::lock_guard guard(lock_);
    if (!durable)
      if (const int error = keep_images(nsid, block, blocks); error != 0) return error;
    if (const int error = change(); error != 0) return error;
    if (!durable) return 0;
    forget_images(nsid, block, blocks);
    return media_.sync();
  }

  /// Everything written before is durable: of one namespace, or of all where `nsid` is 0.
  int flush(std::uint32_t nsid);
  /// Brings the images back, except of the blocks that survive: each with probability `survive`.
  void power_cut(double survive, std::uint64_t seed);

 private:
  /// What is kept of a run of blocks. A block that read as zeros has no bytes in `images`.
  struct Group {
    Reservation images;
    std::vector<std::uint64_t> dirty, zero;
  };

  /// A cache is of a certain size: beyond it, blocks reach the medium by themselves.
  static constexpr std::uint64_t kMostBytes = std::uint64_t{256} << 20;

  static bool bit(const std::vector<std::uint64_t>& bits, std::uint64_t i) { return (bits[i / 64] >> i % 64 & 1) != 0; }
  static std::uint64_t key(std::uint32_t nsid, std::uint64_t group) { return std::uint64_t{nsid} << 56 | group; }
  /// Flushed groups' memory, kept for the next: touching fresh memory costs more than the copy into it.
  static constexpr std::size_t kMostSpare = 32;
  using Groups = std::map<std::uint64_t, Group>;
  void erase(Groups::iterator from, Groups::iterator to);
  Group& group_at(std::uint32_t nsid, std::uint64_t group);
  int keep_images(std::uint32_t nsid, std::uint64_t block, std::uint64_t blocks);
  int keep_run(Group& group, std::uint32_t nsid, std::uint64_t first, std::uint64_t count, std::uint64_t within);
  void forget_images(std::uint32_t nsid, std::uint64_t block, std::uint64_t blocks);
  void restore(const Group& group, std::uint32_t nsid, std::uint64_t block, std::uint64_t within);

  Media& media_;
  const Geometry geometry_;
  const std::uint64_t per_group_;
  std::mutex lock_;
  Groups groups_;
  std::vector<Reservation> spare_;
  std::uint64_t dirty_blocks_ = 0;
};

}  // namespace ugds::emulator
