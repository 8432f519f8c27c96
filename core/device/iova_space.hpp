// SPDX-License-Identifier: Apache-2.0
//
// Which IOVAs of a device are in use. Handed out in turn, so that a freed one rests as long as possible before it is
// used again: a stale address then meets nothing, and the IOMMU refuses it.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace ugds::device {

class IovaSpace {
 public:
  struct Range {
    std::uint64_t first, last;
  };

  /// `allowed` are the ranges that the IOMMU translates; they are sorted and do not overlap.
  explicit IovaSpace(std::vector<Range> allowed);

  /// `length` bytes, congruent to `address` modulo 64 KiB, and modulo 2 MiB or 1 GiB where they are that long: the
  /// IOMMU can use large pages then. Throws Failure(ENOSPC).
  std::uint64_t take(std::uint64_t address, std::uint64_t length);
  void give(std::uint64_t iova) noexcept { used_.erase(iova); }
  /// Bytes of a range that `take` returned; 0 for anything else.
  std::uint64_t length(std::uint64_t iova) const;

 private:
  bool fit(std::uint64_t from, std::uint64_t last, std::uint64_t address, std::uint64_t length, std::uint64_t alignment,
           std::uint64_t& iova) const;

  std::vector<Range> allowed_;
  std::map<std::uint64_t, std::uint64_t> used_;  ///< first, length
  std::uint64_t next_ = 0;
};

}  // namespace ugds::device
