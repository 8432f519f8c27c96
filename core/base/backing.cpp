// SPDX-License-Identifier: Apache-2.0
#include "base/backing.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>

#include "base/fork.hpp"
#include "base/units.hpp"

namespace ugds {

namespace {

struct Known {
  struct Range {
    std::uint64_t length;
    int descriptor;
  };
  std::mutex lock;
  std::map<std::uint64_t, Range> ranges;  // by first address
};

Known& known() {
  // NOLINTNEXTLINE: memory may be freed after static destruction
  static auto* const one = [] {
    auto* const made = new Known;
    // A child did not inherit the memory: at its addresses there is something of its own.
    on_fork(ForkOrder::backings, {[] { known().lock.lock(); }, [] { known().lock.unlock(); },
                                  [] {
                                    known().ranges.clear();
                                    known().lock.unlock();
                                  }});
    return made;
  }();
  return *one;
}

}  // namespace

void remember_backing(const void* address, std::uint64_t length, int descriptor) {
  Known& k = known();
  std::lock_guard guard(k.lock);
  k.ranges[reinterpret_cast<std::uintptr_t>(address)] = {length, descriptor};
}

void forget_backing(const void* address) noexcept {
  Known& k = known();
  std::lock_guard guard(k.lock);
  k.ranges.erase(reinterpret_cast<std::uintptr_t>(address));
}

Backing find_backing(const void* address, std::uint64_t length) {
  Known& k = known();
  std::lock_guard guard(k.lock);
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  auto found = k.ranges.upper_bound(at);
  if (found == k.ranges.begin()) return {};
  --found;
  const std::uint64_t offset = at - found->first;
  if (offset > found->second.length || length > found->second.length - offset) return {};
  return {found->second.descriptor, offset};
}

Descriptor make_shared_memory(std::uint64_t size, unsigned flags) {
  // It counts as a file. Making one that is larger than the process may have would end it (SIGXFSZ).
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && size > limit.rlim_cur) {
    errno = EFBIG;
    return {};
  }
  Descriptor memory(memfd_create("ugds", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  if (!memory || ftruncate(memory.get(), static_cast<off_t>(size)) != 0) return {};
  fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  return memory;
}

int allocate_pages(const Descriptor& memory, std::uint64_t size) {
  // A call that a signal ends may have done nothing. In parts, signals that come all the while let it get to its end.
  constexpr std::uint64_t kPart = 2_MiB;
  for (std::uint64_t at = 0; at < size;) {
    const int error =
        posix_fallocate(memory.get(), static_cast<off_t>(at), static_cast<off_t>(std::min(kPart, size - at)));
    if (error == EINTR) continue;
    if (error != 0) return error;
    at += kPart;
  }
  return 0;
}

}  // namespace ugds
