// SPDX-License-Identifier: Apache-2.0
#include "file/request.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/units.hpp"

namespace ugds::file {

namespace {

using Way = Part::Way;

/// What pages of the page cache have: a direct write keeps to whole ones.
constexpr std::uint64_t kPage = 4096;
/// Answers that say "not now": the kernel is asked again so often.
constexpr std::uint8_t kMostTries = 200;

Part& add(Request& r, Way way, std::byte* memory, std::uint64_t offset, std::uint64_t bytes) {
  Part& part = r.parts[r.part_count++];
  part = {.request = &r, .way = way, .memory = memory, .offset = offset, .bytes = bytes};
  part.wanted = memory;
  part.wanted_offset = offset;
  part.wanted_bytes = bytes;
  return part;
}

/// Whole blocks around [offset, offset + bytes) of the request, into memory of ours.
void add_around(Request& r, std::byte* bounce, std::uint64_t unit, std::uint64_t offset, std::uint64_t bytes) {
  const std::uint64_t begin = align_down(offset, unit), end = align_up(offset + bytes, unit);
  Part& part = add(r, Way::bounced, bounce, begin, end - begin);
  part.wanted = r.memory + (offset - r.offset);
  part.wanted_offset = offset;
  part.wanted_bytes = bytes;
}

void add_buffered(Request& r, std::uint64_t begin, std::uint64_t end) {
  if (begin < end) add(r, Way::buffered, r.memory + (begin - r.offset), begin, end - begin);
}

void plan_read(Request& r, Bounces& bounces, std::uint64_t begin, std::uint64_t end, std::uint64_t unit, bool fits) {
  const std::uint64_t first = r.offset, last = r.offset + r.bytes;
  if (fits && begin == first && end == last) {
    add(r, Way::direct, r.memory, first, r.bytes);
    return;
  }
  if (2 * unit <= Bounces::kEdges) r.bounce = bounces.take();
  if (!fits) {
    if (r.bounce == nullptr) return add_buffered(r, first, last);
    return add_around(r, r.bounce, unit, first, r.bytes);
  }
  if (r.bounce == nullptr) {
    add_buffered(r, first, begin);
  } else if (first < begin) {
    add_around(r, r.bounce, unit, first, begin - first);
  }
  add(r, Way::direct, r.memory + (begin - first), begin, end - begin);
  if (r.bounce == nullptr) {
    add_buffered(r, end, last);
  } else if (end < last) {
    add_around(r, r.bounce + unit, unit, end, last - end);
  }
}

void plan_write(Request& r, Bounces& bounces, std::uint64_t begin, std::uint64_t end, bool fits) {
  const std::uint64_t first = r.offset, last = r.offset + r.bytes;
  if (begin >= end) return add_buffered(r, first, last);
  std::byte* const middle = r.memory + (begin - first);
  if (!fits && (r.bounce = bounces.take()) == nullptr) return add_buffered(r, first, last);
  add_buffered(r, first, begin);
  if (fits) {
    add(r, Way::direct, middle, begin, end - begin);
  } else {
    std::memcpy(r.bounce, middle, end - begin);
    add(r, Way::bounced, r.bounce, begin, end - begin).wanted = middle;
  }
  add_buffered(r, end, last);
}

}  // namespace

Bounces::~Bounces() {
  for (std::size_t i = 0; i < free_count_; ++i) ::munmap(free_[i], kSize);
}

std::byte* Bounces::take() noexcept {
  if (free_count_ != 0) return free_[--free_count_];
  if (made_ == kMost) return nullptr;
  void* const memory = ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  // The kernel may be writing to it when the process forks.
  ::madvise(memory, kSize, MADV_DONTFORK);
  ++made_;
  return static_cast<std::byte*>(memory);
}

void plan(Request& r, Bounces& bounces) noexcept {
  const File& file = *r.file;
  r.part_count = 0;
  r.bounce = nullptr;
  r.cancelled = false;
  r.done = 0;
  r.error = 0;
  if (r.kind == Kind::flush || r.kind == Kind::discard) {
    add(r, Way::buffered, nullptr, r.offset, r.bytes);
  } else if (file.direct() < 0) {
    add_buffered(r, r.offset, r.offset + r.bytes);
  } else {
    const std::uint64_t block = file.offset_alignment();
    // Where nothing goes through the page cache, no page is shared with it.
    const std::uint64_t unit = r.kind == Kind::read || file.buffered() < 0 ? block : std::max(block, kPage);
    std::uint64_t last = r.offset + r.bytes;
    // A direct read writes whole blocks to memory, also the one in which the file ends: that one is bounced.
    if (r.kind == Kind::read && !file.is_block_device()) last = std::min(last, std::max(r.offset, file.size()));
    const std::uint64_t begin = align_up(r.offset, unit), end = align_down(last, unit);
    const auto middle = reinterpret_cast<std::uintptr_t>(r.memory) + (begin - r.offset);
    const bool fits = begin < end && middle % file.memory_alignment() == 0;
    r.kind == Kind::read ? plan_read(r, bounces, begin, end, unit, fits) : plan_write(r, bounces, begin, end, fits);
  }
  r.parts_left = r.part_count;
}

bool settle(Part& p) noexcept {
  Request& r = *p.request;
  const int result = p.result;
  if (result == -EINTR || result == -EAGAIN || (result == -ECANCELED && !r.cancelled)) {
    // A thread that ends takes with it what it has asked the kernel for: another one asks again.
    if (++p.tries < kMostTries) return false;
    p.error = result == -ECANCELED ? EIO : -result;
    return true;
  }
  if ((result == -EINVAL || result == -EOPNOTSUPP) && p.way != Way::buffered && p.done == 0 &&
      r.file->buffered() >= 0) {
    // Of the file nothing is known yet. What a process may write can end inside of a block (RLIMIT_FSIZE): that is
    // refused as well, and the page cache will say why.
    p.refused = true;
    p.way = Way::buffered;
    p.memory = p.wanted;
    p.offset = p.wanted_offset;
    p.bytes = p.wanted_bytes;
    return false;
  }
  if (result < 0) {
    p.error = -result;
    return true;
  }
  if (r.kind == Kind::flush || r.kind == Kind::discard) {
    p.done = p.bytes;
    return true;
  }
  if (result == 0 && r.kind == Kind::write) {
    p.error = EIO;
    return true;
  }
  p.tries = 0;
  p.done += static_cast<std::uint64_t>(result);
  // A read of nothing has met the end of the file, and so has a direct one that ends inside a block.
  const bool is_over = result == 0 || p.done >= p.bytes ||
                       (r.kind == Kind::read && p.way != Way::buffered && p.done % r.file->offset_alignment() != 0);
  if (is_over && p.refused) r.file->refuse_direct();
  return is_over;
}

void conclude(Request& r) noexcept {
  for (unsigned i = 0; i < r.part_count; ++i) {
    const Part& p = r.parts[i];
    const std::uint64_t skip = p.wanted_offset - p.offset;
    const std::uint64_t got = std::min(p.done > skip ? p.done - skip : 0, p.wanted_bytes);
    if (p.way == Way::bounced && r.kind == Kind::read && got != 0) std::memcpy(p.wanted, p.memory + skip, got);
    auto& count = p.way == Way::buffered ? r.file->buffered_bytes : r.file->direct_bytes;
    if (r.kind == Kind::read || r.kind == Kind::write) {
      count.fetch_add(got, std::memory_order_relaxed);
      if (p.way == Way::bounced) r.file->bounced_bytes.fetch_add(got, std::memory_order_relaxed);
    }
    r.done += got;
    r.error = p.error;
    if (p.error != 0 || got < p.wanted_bytes) return;
  }
}

}  // namespace ugds::file
