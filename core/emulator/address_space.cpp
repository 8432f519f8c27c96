// SPDX-License-Identifier: Apache-2.0
#include "emulator/address_space.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>

#include "base/error.hpp"
#include "base/units.hpp"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace ugds::emulator {

namespace {

/// Offsets inside it survive translation, as they do with a GPU's pages and a host's large pages.
constexpr std::uint64_t kCongruence = 64 * 1024;
/// An access that runs over the end of a range must not land in the next one.
constexpr std::uint64_t kGuard = 64 * 1024;
constexpr std::uint64_t kCommitStep = 2 * 1024 * 1024 / sizeof(std::uint64_t);
constexpr std::uint64_t kEntriesPerPage = 4096 / sizeof(std::uint64_t);

/// Whether this process's mappings cover the range with the permissions that are needed, as the kernel lists them.
bool is_permitted(std::uint64_t start, std::uint64_t length, bool writable) {
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return false;
  std::uint64_t at = start;
  const std::uint64_t end = start + length;
  char line[512];
  while (at < end && std::fgets(line, sizeof line, maps) != nullptr) {
    unsigned long long from = 0, to = 0;
    char permissions[5] = "";
    if (std::sscanf(line, "%llx-%llx %4s", &from, &to, permissions) != 3 || to <= at) continue;
    if (from > at || permissions[0] != 'r' || (writable && permissions[1] != 'w')) break;
    at = to;
  }
  std::fclose(maps);
  return at >= end;
}

}  // namespace

AddressSpace::AddressSpace() : table_(kSpan / kPage * sizeof(std::uint64_t), false) {}

void AddressSpace::require_memory(void* address, std::uint64_t length, bool writable) {
  while (madvise(address, length, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) != 0) {
    if (errno == EAGAIN || errno == EINTR) continue;
    if (errno == ENOMEM || errno == EFAULT || errno == EACCES || errno == EPERM)
      fail(EFAULT, "map",
           writable ? "the memory is not there, or not writable" : "the memory is not there, or not readable",
           "map memory that is allocated, and read-only memory only for writing to the device");
    // EINVAL: a kernel before 5.14, device memory, which has no pages to populate, or a lack of permission.
    if (!is_permitted(reinterpret_cast<std::uintptr_t>(address), length, writable))
      fail(EFAULT, "map", "the memory is not there, or not accessible as asked",
           "map memory that is allocated, and read-only memory only for writing to the device");
    return;
  }
}

std::uint64_t AddressSpace::add(void* address, std::uint64_t length, bool writable, Copier* copier) {
  const std::uint64_t start = reinterpret_cast<std::uintptr_t>(address);
  const std::uint64_t iova = align_up(next_, kCongruence) + (start & (kCongruence - 1));
  if (length > kSpan || iova + length + kGuard > kFirst + kSpan)
    fail(ENOSPC, "map", "every IOVA of the emulated controller has been handed out once",
         "open the controller again, or map larger ranges less often");
  const std::uint64_t first = (iova - kFirst) / kPage, end = first + length / kPage;
  if (end > committed_) {
    const std::uint64_t to = align_up(end, kCommitStep);
    table_.commit(committed_ * sizeof(std::uint64_t), to * sizeof(std::uint64_t));
    committed_ = to;
  }
  ranges_.emplace(iova, Range{length, writable, static_cast<std::byte*>(address), copier});
  const std::uint64_t flags = kPresent | (writable ? kWritable : 0) | (copier != nullptr ? kForeign : 0);
  for (std::uint64_t page = first; page < end; ++page) table()[page] = (start + (page - first) * kPage) | flags;
  next_ = iova + length + kGuard;
  mapped_bytes_ += length;
  return iova;
}

bool AddressSpace::add_at(std::uint64_t iova, void* address, std::uint64_t length, bool writable) {
  const auto next = ranges_.lower_bound(iova);
  if (next != ranges_.end() && next->first < iova + length) return false;
  if (next != ranges_.begin() && std::prev(next)->first + std::prev(next)->second.length > iova) return false;
  ranges_.emplace_hint(next, iova, Range{length, writable, static_cast<std::byte*>(address)});
  mapped_bytes_ += length;
  return true;
}

bool AddressSpace::find_chosen(std::uint64_t iova) const {
  if (iova >= kFirst) return false;
  auto found = ranges_.upper_bound(iova);
  if (found == ranges_.begin()) return false;
  --found;
  if (iova - found->first >= found->second.length) return false;
  last_iova_ = found->first;
  last_ = found->second;
  return true;
}

Copier* AddressSpace::copier_of(std::uint64_t iova) const {
  return std::prev(ranges_.upper_bound(iova))->second.copier;
}

const AddressSpace::Range* AddressSpace::find(std::uint64_t iova) const {
  const auto found = ranges_.find(iova);
  return found == ranges_.end() ? nullptr : &found->second;
}

void AddressSpace::remove(std::uint64_t iova) noexcept {
  const auto found = ranges_.find(iova);
  if (found == ranges_.end()) return;
  if (iova < kFirst) {
    last_ = {0, false, nullptr};
    mapped_bytes_ -= found->second.length;
    ranges_.erase(found);
    return;
  }
  const std::uint64_t first = (iova - kFirst) / kPage, end = first + found->second.length / kPage;
  std::memset(table() + first, 0, (end - first) * sizeof(std::uint64_t));
  // IOVAs do not come back, so whatever page of the table has become empty is given back for good.
  auto empty = [&](std::uint64_t page) {
    const std::uint64_t* entries = table() + page * kEntriesPerPage;
    return std::all_of(entries, entries + kEntriesPerPage, [](std::uint64_t entry) { return entry == 0; });
  };
  std::uint64_t from = first / kEntriesPerPage, to = (end + kEntriesPerPage - 1) / kEntriesPerPage;
  if (from < to && !empty(from)) ++from;
  if (from < to && !empty(to - 1)) --to;
  table_.release(from * 4096, to * 4096);
  mapped_bytes_ -= found->second.length;
  ranges_.erase(found);
}

Access AddressSpace::read(std::uint64_t iova, void* out, std::uint64_t length) const {
  auto* to = static_cast<std::byte*>(out);
  return runs(iova, length, false, [&](const std::byte* from, std::uint64_t bytes) {
    std::memcpy(to, from, bytes);
    to += bytes;
    return true;
  });
}

Access AddressSpace::write(std::uint64_t iova, const void* data, std::uint64_t length) const {
  auto* from = static_cast<const std::byte*>(data);
  return runs(iova, length, true, [&](std::byte* to, std::uint64_t bytes) {
    std::memcpy(to, from, bytes);
    from += bytes;
    return true;
  });
}

std::byte* AddressSpace::contiguous(std::uint64_t iova, std::uint64_t length, bool write) const {
  std::byte* start = nullptr;
  std::uint64_t run = 0;
  const Access access = runs(iova, length, write, [&](std::byte* at, std::uint64_t bytes) {
    start = at;
    run = bytes;
    return false;
  });
  return access && run == length ? start : nullptr;
}

}  // namespace ugds::emulator
