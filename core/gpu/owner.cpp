// SPDX-License-Identifier: Apache-2.0
#include "gpu/owner.hpp"

#include "base/library.hpp"
#include "gpu/runtime.hpp"

namespace ugds::gpu {

namespace {

Runtime* find_in(Runtime* runtime, const void* address, Allocation& allocation) {
  if (runtime == nullptr) return nullptr;
  const std::optional<Allocation> found = runtime->find(reinterpret_cast<std::uintptr_t>(address));
  if (!found) return nullptr;
  allocation = *found;
  return runtime;
}

}  // namespace

Runtime* owner_of(const void* address, Allocation& allocation) {
  if (is_cuda_memory(address)) return find_in(cuda(), address, allocation);
  static const bool has_hip = static_cast<bool>(
      SharedLibrary::loaded("UGDS_HIP_LIBRARY", {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"}));
  return has_hip ? find_in(hip(), address, allocation) : nullptr;
}

}  // namespace ugds::gpu
