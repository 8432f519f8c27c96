// SPDX-License-Identifier: Apache-2.0
#include "memory/host.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/steps.hpp"
#include "base/text.hpp"
#include "base/units.hpp"
#include "nvme/prp.hpp"

namespace ugds::memory {

namespace {
constexpr std::uint64_t kHugePage = 2_MiB;
}

HostMemory::HostMemory(std::uint64_t size) : size_(size), born_(fork_generation()) {
  if (size == 0) fail(EINVAL, "empty", "a buffer of no bytes", "ask for at least one");
  if (size > std::uint64_t{1} << 47) fail(ENOMEM, "empty", "no memory for " + format_size(size), "ask for less");
  setup_step("host memory: allocate");
  // Huge pages are taken for whole ones: a small buffer would waste most of its page.
  huge_ = size >= kHugePage && map(align_up(size, kHugePage), MFD_HUGETLB);
  if (!huge_ && !map(align_up(size, nvme::kPageSize), 0)) {
    fail(ENOMEM, "empty", "no memory for " + format_size(size), "free memory, or ask for less");
  }
  madvise(data_, mapped_, MADV_DONTFORK);
  if (!huge_) madvise(data_, mapped_, MADV_HUGEPAGE);
}

bool HostMemory::map(std::uint64_t size, unsigned flags) {
  const int descriptor = memfd_create("ugds", MFD_CLOEXEC | flags);
  if (descriptor < 0) return false;
  // Populated here, so that missing memory is an error now and not a fault later.
  void* memory = MAP_FAILED;
  if (ftruncate(descriptor, static_cast<off_t>(size)) == 0) {
    memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  }
  if (memory != MAP_FAILED && posix_fallocate(descriptor, 0, static_cast<off_t>(size)) != 0) {
    munmap(memory, size);
    memory = MAP_FAILED;
  }
  if (memory == MAP_FAILED) {
    close(descriptor);
    return false;
  }
  data_ = static_cast<std::byte*>(memory);
  mapped_ = size;
  descriptor_ = descriptor;
  return true;
}

HostMemory::~HostMemory() {
  // A child of a fork did not inherit it: what it has there is its own.
  if (fork_generation() == born_) munmap(data_, mapped_);
  close(descriptor_);
}

}  // namespace ugds::memory
