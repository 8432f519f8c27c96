// SPDX-License-Identifier: Apache-2.0
#include "memory/host.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include "base/backing.hpp"
#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/steps.hpp"
#include "base/text.hpp"
#include "base/units.hpp"
#include "nvme/prp.hpp"

namespace ugds::memory {

namespace {
constexpr std::uint64_t kHugePage = 2_MiB;

struct Available {
  std::uint64_t bytes = std::numeric_limits<std::uint64_t>::max();
  std::string where = "this machine";
};

/// The number after `name` in a file of lines "name number"; 0 where there is none.
std::uint64_t number_after(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  for (std::uint64_t number = 0; file >> word;) {
    if (word == name) return file >> number ? number : 0;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return 0;
}

/// What can be allocated before the kernel starts to kill processes, as far as it says so.
Available available_memory() {
  Available least;
  if (const std::uint64_t kib = number_after("/proc/meminfo", "MemAvailable:"); kib != 0) least.bytes = kib * 1024;
  // The limits of the control group (version 2) and of those around it.
  std::ifstream groups("/proc/self/cgroup");
  std::string group;
  while (std::getline(groups, group) && !group.starts_with("0::/")) {
  }
  if (!group.starts_with("0::/")) return least;
  for (group.erase(0, 3);; group.erase(group.rfind('/'))) {
    const std::string folder = "/sys/fs/cgroup" + group;
    std::uint64_t limit = 0, used = 0;
    // "max", which is no number, is no limit.
    if (std::ifstream(folder + "/memory.max") >> limit && std::ifstream(folder + "/memory.current") >> used) {
      // The page cache counts as used, and is given up before anybody is killed.
      const std::uint64_t cache =
          number_after(folder + "/memory.stat", "inactive_file") + number_after(folder + "/memory.stat", "active_file");
      used -= std::min(used, cache);
      const std::uint64_t left = limit - std::min(limit, used);
      if (left < least.bytes) least = {left, "the control group " + (group.empty() ? "/" : group)};
    }
    if (group.empty()) return least;
  }
}

void refuse_too_much(std::uint64_t size) {
  const Available available = available_memory();
  if (size <= available.bytes / 16 * 15) return;
  fail(ENOMEM, "empty",
       "no memory for " + format_size(size) + ": " + format_size(available.bytes) + " are available in " +
           available.where,
       "free memory, or ask for less");
}

/// Where large pages begin; MAP_FAILED.
void* map_aligned(const Descriptor& descriptor, std::uint64_t size) {
  void* const room = mmap(nullptr, size + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return room;
  auto* const begin = static_cast<std::byte*>(room);
  auto* const aligned =
      begin + (align_up(reinterpret_cast<std::uintptr_t>(begin), kHugePage) - reinterpret_cast<std::uintptr_t>(begin));
  void* const memory = mmap(aligned, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor.get(), 0);
  if (memory == MAP_FAILED) {
    munmap(room, size + kHugePage);
    return memory;
  }
  if (aligned != begin) munmap(begin, static_cast<std::size_t>(aligned - begin));
  // The mapping ends where a page does, as the room does.
  auto* const end = aligned + align_up(size, nvme::kPageSize);
  if (begin + size + kHugePage != end) munmap(end, static_cast<std::size_t>(begin + size + kHugePage - end));
  return memory;
}

/// Makes 2 MiB at a time one large page, where the kernel has one to spare: a disk, and the kernel on the way to it,
/// then have one piece of memory to look at in place of 512, which halves what a large request takes. Of files in
/// memory the kernel does so for who asks by MADV_COLLAPSE (Linux 6.1), whatever its setting for who does not.
void make_contiguous(const Descriptor& descriptor, void* memory, std::uint64_t size) {
  constexpr int kCollapse = 25;  // MADV_COLLAPSE
  for (std::uint64_t at = 0; at + kHugePage <= size; at += kHugePage) {
    // The rest of a page of which a part is there is filled with zeros.
    if (posix_fallocate(descriptor.get(), static_cast<off_t>(at), nvme::kPageSize) != 0) return;
    if (madvise(static_cast<std::byte*>(memory) + at, kHugePage, kCollapse) != 0) return;
  }
}

}  // namespace

HostMemory::HostMemory(std::uint64_t size) : size_(size), born_(fork_generation()) {
  if (size == 0) fail(EINVAL, "empty", "a buffer of no bytes", "ask for at least one");
  if (size > std::uint64_t{1} << 47) fail(ENOMEM, "empty", "no memory for " + format_size(size), "ask for less");
  setup_step("host memory: allocate");
  // Huge pages are taken for whole ones: a small buffer would waste most of its page.
  huge_ = size >= kHugePage && map(align_up(size, kHugePage), MFD_HUGETLB);
  // Memory that there is not would not be an error: populating it ends whatever process the kernel picks. Of huge pages
  // there is a pool of their own.
  if (!huge_) refuse_too_much(size);
  errno = 0;
  if (!huge_ && !map(align_up(size, nvme::kPageSize), 0)) {
    if (errno == EMFILE || errno == ENFILE) {
      fail(errno, "empty", "no file descriptor is left, of which every buffer needs one",
           "close files, or raise the limit (ulimit -n)");
    }
    if (errno == EFBIG) {
      fail(EFBIG, "empty", format_size(size) + " are more than a file of this process may have, and count as one",
           "raise the limit (ulimit -f), or ask for less");
    }
    fail(ENOMEM, "empty", "no memory for " + format_size(size), "free memory, or ask for less");
  }
  madvise(data_, mapped_, MADV_DONTFORK);
}

bool HostMemory::map(std::uint64_t size, unsigned flags) {
  Descriptor descriptor = make_shared_memory(size, flags);
  if (!descriptor) return false;
  void* const memory = flags == 0 && size >= kHugePage
                           ? map_aligned(descriptor, size)
                           : mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  if (memory == MAP_FAILED) return false;
  if (flags == 0) make_contiguous(descriptor, memory, size);
  if (allocate_pages(descriptor, size) != 0) {
    munmap(memory, size);
    return false;
  }
  data_ = static_cast<std::byte*>(memory);
  mapped_ = size;
  descriptor_ = std::move(descriptor);
  remember_backing(data_, mapped_, descriptor_.get());
  return true;
}

HostMemory::~HostMemory() {
  // A child of a fork did not inherit it: what it has there is its own.
  if (fork_generation() != born_) return;
  forget_backing(data_);
  munmap(data_, mapped_);
}

}  // namespace ugds::memory
