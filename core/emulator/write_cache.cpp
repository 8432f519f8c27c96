// SPDX-License-Identifier: Apache-2.0
#include "emulator/write_cache.hpp"

#include <algorithm>
#include <cerrno>
#include <random>

#include "base/error.hpp"
#include "base/units.hpp"

namespace ugds::emulator {

WriteCache::WriteCache(Media& media, const Geometry& geometry)
    : media_(media),
      geometry_(geometry),
      per_group_(std::max<std::uint64_t>(1, 2_MiB / (std::uint64_t{geometry.lba} + geometry.metadata))) {
  spare_.reserve(kMostSpare);
}

WriteCache::Group& WriteCache::group_at(std::uint32_t nsid, std::uint64_t group) {
  const auto found = groups_.find(key(nsid, group));
  if (found != groups_.end()) return found->second;
  const std::uint64_t words = (per_group_ + 63) / 64;
  Group fresh{{}, std::vector<std::uint64_t>(words), std::vector<std::uint64_t>(words)};
  if (spare_.empty()) {
    fresh.images = Reservation(per_group_ * (std::uint64_t{geometry_.lba} + geometry_.metadata), true);
  } else {
    fresh.images = std::move(spare_.back());
    spare_.pop_back();
  }
  return groups_.emplace(key(nsid, group), std::move(fresh)).first->second;
}

void WriteCache::erase(Groups::iterator from, Groups::iterator to) {
  for (auto at = from; at != to; ++at)
    if (spare_.size() < kMostSpare) spare_.push_back(std::move(at->second.images));
  groups_.erase(from, to);
}

int WriteCache::keep_images(std::uint32_t nsid, std::uint64_t block, std::uint64_t blocks) {
  if ((dirty_blocks_ + blocks) * geometry_.unit() > kMostBytes) {
    erase(groups_.begin(), groups_.end());
    dirty_blocks_ = 0;
  }
  const std::uint64_t end = block + blocks;
  try {
    while (block < end) {
      const std::uint64_t within = block % per_group_;
      const std::uint64_t part = std::min(per_group_ - within, end - block);
      Group& group = group_at(nsid, block / per_group_);
      for (std::uint64_t i = 0; i < part;) {
        if (bit(group.dirty, within + i)) {
          ++i;
          continue;
        }
        std::uint64_t run = 1;
        while (i + run < part && !bit(group.dirty, within + i + run)) ++run;
        if (const int error = keep_run(group, nsid, block + i, run, within + i); error != 0) return error;
        i += run;
      }
      block += part;
    }
  } catch (const Failure&) {
    return ENOSPC;
  } catch (const std::bad_alloc&) {
    return ENOSPC;
  }
  return 0;
}

int WriteCache::keep_run(Group& group, std::uint32_t nsid, std::uint64_t first, std::uint64_t count,
                         std::uint64_t within) {
  const std::uint64_t unit = geometry_.unit(), separate = geometry_.separate();
  const std::uint64_t data = geometry_.data_at(nsid, first), meta = geometry_.metadata_at(nsid, first);
  const bool zero = media_.next_data(data, data + count * unit) == data + count * unit &&
                    media_.next_data(meta, meta + count * separate) == meta + count * separate;
  if (!zero) {
    std::byte* images = group.images.data();
    if (const int error = media_.read(data, images + within * unit, count * unit); error != 0) return error;
    if (const int error = media_.read(meta, images + per_group_ * unit + within * separate, count * separate);
        error != 0)
      return error;
  }
  for (std::uint64_t i = within; i < within + count; ++i) {
    group.dirty[i / 64] |= std::uint64_t{1} << i % 64;
    if (zero) group.zero[i / 64] |= std::uint64_t{1} << i % 64;
  }
  dirty_blocks_ += count;
  return 0;
}

void WriteCache::forget_images(std::uint32_t nsid, std::uint64_t block, std::uint64_t blocks) {
  const std::uint64_t end = block + blocks;
  for (auto at = groups_.lower_bound(key(nsid, block / per_group_)); at != groups_.end(); ++at) {
    const std::uint64_t start = (at->first - key(nsid, 0)) * per_group_;
    if (at->first >= key(nsid + 1, 0) || start >= end) break;
    for (std::uint64_t i = std::max(start, block); i < std::min(start + per_group_, end); ++i) {
      const std::uint64_t within = i - start, mask = std::uint64_t{1} << within % 64;
      if (bit(at->second.dirty, within)) --dirty_blocks_;
      at->second.dirty[within / 64] &= ~mask;
      at->second.zero[within / 64] &= ~mask;
    }
  }
}

int WriteCache::flush(std::uint32_t nsid) {
  std::lock_guard guard(lock_);
  if (nsid == 0) {
    erase(groups_.begin(), groups_.end());
    dirty_blocks_ = 0;
  } else {
    const auto from = groups_.lower_bound(key(nsid, 0)), to = groups_.lower_bound(key(nsid + 1, 0));
    for (auto at = from; at != to; ++at)
      for (std::uint64_t i = 0; i < per_group_; ++i)
        if (bit(at->second.dirty, i)) --dirty_blocks_;
    erase(from, to);
  }
  return media_.sync();
}

void WriteCache::power_cut(double survive, std::uint64_t seed) {
  std::lock_guard guard(lock_);
  std::mt19937_64 random(seed);
  for (const auto& [where, group] : groups_) {
    const auto nsid = static_cast<std::uint32_t>(where >> 56);
    const std::uint64_t start = (where - key(nsid, 0)) * per_group_;
    for (std::uint64_t i = 0; i < per_group_; ++i) {
      if (!bit(group.dirty, i)) continue;
      const double coin = static_cast<double>(random() >> 11) * 0x1p-53;
      if (coin >= survive) restore(group, nsid, start + i, i);
    }
  }
  erase(groups_.begin(), groups_.end());
  dirty_blocks_ = 0;
}

void WriteCache::restore(const Group& group, std::uint32_t nsid, std::uint64_t block, std::uint64_t within) {
  const std::uint64_t unit = geometry_.unit(), separate = geometry_.separate();
  const std::uint64_t data = geometry_.data_at(nsid, block), meta = geometry_.metadata_at(nsid, block);
  // A disk that is full by now can keep a file from taking the image back; there is nobody to tell.
  if (bit(group.zero, within)) {
    static_cast<void>(media_.discard(data, unit));
    static_cast<void>(media_.discard(meta, separate));
  } else {
    static_cast<void>(media_.write(data, group.images.data() + within * unit, unit));
    static_cast<void>(media_.write(meta, group.images.data() + per_group_ * unit + within * separate, separate));
  }
}

}  // namespace ugds::emulator
