// SPDX-License-Identifier: Apache-2.0
#include "serve/client_memory.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>

#include "base/error.hpp"
#include "base/units.hpp"

namespace ugds::serve {

namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kLargestFile = std::uint64_t{1} << 62;

/// What a mapping of the file must begin and end at.
std::uint64_t page_of(int file) {
  struct statfs system;
  if (fstatfs(file, &system) != 0 || system.f_type != HUGETLBFS_MAGIC) return kPage;
  return static_cast<std::uint64_t>(system.f_bsize);
}

}  // namespace

ClientRange::ClientRange(const Descriptor& file, const vfio_user::DmaMap& request, int wake) : size_(request.size) {
  if (!is_aligned(request.offset | request.iova | request.size, kPage) || request.size == 0)
    fail(EINVAL, "map", "offset, IOVA and size must be multiples of 4096, and the size not 0");
  // A file that cannot shrink is the better defence: then there is nothing to guard against. Some files cannot be
  // sealed, and some are already.
  fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK);
  struct stat status;
  if (fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode))
    fail(EINVAL, "map", "the descriptor is not of memory", "send one of a memfd, or of a file on tmpfs or hugetlbfs");
  if (request.offset > kLargestFile || request.size > kLargestFile ||
      request.offset + request.size > static_cast<std::uint64_t>(status.st_size))
    fail(EINVAL, "map", "the file is smaller than the range");
  const std::uint64_t page = page_of(file.get());
  const std::uint64_t from = align_down(request.offset, page), to = align_up(request.offset + request.size, page);
  const int protection = PROT_READ | ((request.flags & vfio_user::kDmaWritable) != 0 ? PROT_WRITE : 0);
  void* at = mmap(nullptr, to - from, protection, MAP_SHARED | MAP_NORESERVE, file.get(), static_cast<off_t>(from));
  if (at == MAP_FAILED) fail(errno, "map", "the client's memory cannot be mapped");
  mapped_ = static_cast<std::byte*>(at);
  mapped_bytes_ = to - from;
  data_ = mapped_ + (request.offset - from);
  madvise(at, mapped_bytes_, MADV_DONTFORK);
  try {
    guard_ = std::make_unique<FaultGuard>(at, mapped_bytes_, wake);
  } catch (...) {
    munmap(mapped_, mapped_bytes_);
    throw;
  }
}

ClientRange::~ClientRange() {
  guard_.reset();
  munmap(mapped_, mapped_bytes_);
}

void ClientMemory::map(const vfio_user::DmaMap& request, const Descriptor& file) {
  if (ranges_.size() >= kMostRanges) fail(ENOSPC, "map", "the client has mapped as many ranges as it may");
  if (ranges_.contains(request.iova)) fail(EEXIST, "map", "something is mapped at these IOVAs");
  const auto [made, fresh] = ranges_.try_emplace(request.iova, file, request, wake_);
  try {
    controller_.map_at(request.iova, made->second.data(), request.size, (request.flags & vfio_user::kDmaWritable) != 0);
  } catch (...) {
    ranges_.erase(made);
    throw;
  }
}

void ClientMemory::unmap(std::uint64_t iova, std::uint64_t size) {
  const auto found = ranges_.find(iova);
  if (found == ranges_.end() || found->second.size() != size)
    fail(ENOENT, "unmap", "this is not exactly what was mapped");
  controller_.unmap(iova);
  ranges_.erase(found);
}

void ClientMemory::clear() noexcept {
  for (const auto& [iova, range] : ranges_) controller_.unmap(iova);
  ranges_.clear();
}

bool ClientMemory::lost() const {
  return std::any_of(ranges_.begin(), ranges_.end(), [](const auto& entry) { return entry.second.lost(); });
}

}  // namespace ugds::serve
