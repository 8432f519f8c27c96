// SPDX-License-Identifier: Apache-2.0
#include "base/backing.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "base/fork.hpp"

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
  Descriptor memory(memfd_create("ugds", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  if (!memory || ftruncate(memory.get(), static_cast<off_t>(size)) != 0) return {};
  fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  return memory;
}

}  // namespace ugds
