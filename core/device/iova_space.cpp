// SPDX-License-Identifier: Apache-2.0
#include "device/iova_space.hpp"

#include <algorithm>
#include <cerrno>

#include "base/error.hpp"
#include "base/units.hpp"

namespace ugds::device {

namespace {
/// Below this nothing is handed out: a zeroed address in a command must not be a good one.
constexpr std::uint64_t kFirst = 16_MiB;
/// No IOMMU translates as much, and sums of addresses and lengths stay numbers.
constexpr std::uint64_t kLast = (std::uint64_t{1} << 62) - 1;
}  // namespace

IovaSpace::IovaSpace(std::vector<Range> allowed) : allowed_(std::move(allowed)), next_(kFirst) {
  for (Range& range : allowed_) range = {std::max(range.first, kFirst), std::min(range.last, kLast)};
  std::erase_if(allowed_, [](const Range& range) { return range.first > range.last; });
}

/// The lowest place at or above `from` in [from, last], past what is in use.
bool IovaSpace::fit(std::uint64_t from, std::uint64_t last, std::uint64_t address, std::uint64_t length,
                    std::uint64_t alignment, std::uint64_t& iova) const {
  const std::uint64_t residue = address & (alignment - 1);
  std::uint64_t at = from;
  auto used = used_.upper_bound(at);
  if (used != used_.begin()) {
    const auto before = std::prev(used);
    at = std::max(at, before->first + before->second);
  }
  for (;; ++used) {
    std::uint64_t candidate = align_down(at, alignment) + residue;
    if (candidate < at) candidate += alignment;
    if (candidate > last || length - 1 > last - candidate) return false;
    if (used == used_.end() || candidate + length <= used->first) {
      iova = candidate;
      return true;
    }
    at = used->first + used->second;
  }
}

std::uint64_t IovaSpace::take(std::uint64_t address, std::uint64_t length) {
  for (std::uint64_t alignment : {1_GiB, 2_MiB, 64_KiB}) {
    if (alignment > 64_KiB && length < alignment) continue;
    for (const std::uint64_t start : {next_, std::uint64_t{0}}) {
      for (const Range& range : allowed_) {
        std::uint64_t iova = 0;
        if (range.last < start || !fit(std::max(range.first, start), range.last, address, length, alignment, iova)) {
          continue;
        }
        used_.emplace(iova, length);
        next_ = iova + length;
        return iova;
      }
    }
  }
  fail(ENOSPC, "map", "the IOMMU's address range has no room for " + std::to_string(length) + " more bytes",
       "close registrations that are not needed");
}

std::uint64_t IovaSpace::length(std::uint64_t iova) const {
  const auto found = used_.find(iova);
  return found == used_.end() ? 0 : found->second;
}

}  // namespace ugds::device
