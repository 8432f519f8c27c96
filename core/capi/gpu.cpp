// SPDX-License-Identifier: Apache-2.0
#include "capi/gpu.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/fork.hpp"
#include "base/immortal.hpp"
#include "base/units.hpp"
#include "engine/stream.hpp"
#include "gpu/rdma.hpp"

namespace ugds::capi {

namespace {

constexpr std::uint64_t kGpuPage = 64 * 1024;

struct Region {
  memory::Reference buffer;
  gpu::RdmaRegion region;
};
struct Regions {
  std::mutex lock;  ///< also while a buffer is closed: it has no region then, and gets none
  std::vector<Region> all;
};
constinit Immortal<Regions> the_regions;
Regions& regions() {
  static const bool hooked = [] {
    on_fork(ForkOrder::rdma_regions, {[] { the_regions.value.lock.lock(); }, [] { the_regions.value.lock.unlock(); },
                                      [] {
                                        the_regions.value.all.clear();  // the parent's
                                        the_regions.value.lock.unlock();
                                      }});
    return true;
  }();
  static_cast<void>(hooked);
  return the_regions.value;
}

/// What is registered at exactly this address, or nothing.
memory::Reference buffer_at(const void* base) {
  const memory::Reference buffer = memory::Registry::instance().find(base);
  return buffer && buffer.address == reinterpret_cast<std::uintptr_t>(base) ? buffer : memory::Reference{};
}

/// The GPU's side of a registered buffer, by a buffer of its own: the registration's may be closed meanwhile.
gpu::Exported export_buffer(const memory::Reference& buffer) {
  gpu::Allocation allocation;
  gpu::Runtime* const runtime = gpu::owner_of(reinterpret_cast<const void*>(buffer.address), allocation);
  if (runtime == nullptr) {
    fail(EOPNOTSUPP, "export", "the buffer is host memory, of which there is no DMA-BUF", "export GPU memory");
  }
  return memory::GpuBuffer(*runtime, allocation, buffer.address).export_range(buffer.address, buffer.size);
}

}  // namespace

memory::Reference register_memory(const void* base, std::size_t size, WantedBackend backend, bool exported) {
  auto& registry = memory::Registry::instance();
  gpu::Allocation allocation;
  gpu::Runtime* const runtime = base != nullptr ? gpu::owner_of(base, allocation) : nullptr;
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  if (runtime == nullptr) {
    if (backend != WantedBackend::any || exported) {
      fail(EOPNOTSUPP, "register", "the memory is the host's, and GPU memory was asked for",
           "register it without flags and without a backend");
    }
    return registry.add(const_cast<void*>(base), size, memory::Kind::host, false);
  }
  const auto is = runtime->backend() == gpu::Backend::cuda ? WantedBackend::cuda : WantedBackend::hip;
  if (backend != WantedBackend::any && backend != is)
    fail(EINVAL, "register", std::string("the memory is of ") + runtime->name(),
         "ask for its own backend, or for none");
  auto buffer = std::make_unique<memory::GpuBuffer>(*runtime, allocation, address);
  if (exported) static_cast<void>(buffer->export_range(address, size));
  return registry.add_gpu(address, size, false, std::move(buffer), memory::Demand::none);
}

int close_buffer(const memory::Reference& buffer) {
  Regions& known = regions();
  const std::lock_guard guard(known.lock);
  const auto is_of_it = [&](const Region& r) { return r.buffer.generation == buffer.generation; };
  if (std::ranges::any_of(known.all, is_of_it)) return UGDS_RDMA_REGION_ACTIVE;
  switch (engine::close_registration(buffer)) {
    case 0: return UGDS_SUCCESS;
    case EBUSY: return UGDS_BUSY;
    default: return UGDS_MEMORY_NOT_REGISTERED;
  }
}

std::string regions_of(const memory::Reference& buffer) {
  Regions& known = regions();
  const std::lock_guard guard(known.lock);
  std::string words;
  for (const Region& r : known.all) {
    if (r.buffer.generation != buffer.generation) continue;
    char text[64];
    std::snprintf(text, sizeof text, "%san RDMA region with lkey %#x", words.empty() ? "" : ", ", r.region.lkey);
    words += text;
  }
  return words + " is registered";
}

TemporaryBuffer::TemporaryBuffer(const void* address, std::size_t size, std::uint32_t device) {
  gpu::Allocation allocation;
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  if (address == nullptr || !is_aligned(at, kGpuPage)) return;
  gpu::Runtime* const runtime = gpu::owner_of(address, allocation);
  if (runtime == nullptr) return;
  auto buffer = std::make_unique<memory::GpuBuffer>(*runtime, allocation, at);
  reference_ = memory::Registry::instance().add_gpu_unlisted(at, size, false, std::move(buffer), device);
}

TemporaryBuffer::~TemporaryBuffer() {
  // The device may still be at what its request left behind.
  if (reference_) memory::Registry::instance().close_when_idle(reference_);
}

}  // namespace ugds::capi

using namespace ugds;        // NOLINT
using namespace ugds::capi;  // NOLINT

extern "C" {

uGDSError_t uGDSExportDmabuf(const void* base, uGDSDmabufExport_t* out) {
  if (out == nullptr) return refuse("export", UGDS_INVALID_VALUE, EINVAL, "a null argument");
  return guarded("export", [&] {
    const memory::Reference buffer = buffer_at(base);
    if (!buffer) return refuse_unregistered("export");
    const gpu::Exported exported = export_buffer(buffer);
    const int theirs = fcntl(exported.descriptor.get(), F_DUPFD_CLOEXEC, 0);
    if (theirs < 0) return refuse("export", UGDS_GETNEWFD_FAILED, errno, "no file descriptor is left");
    *out = {theirs, exported.offset, exported.length};
    return answer(UGDS_SUCCESS);
  });
}

uGDSError_t uGDSRDMARegister(const void* base, void* pd, int access_flags, uGDSRDMARegion_t* out) {
  if (pd == nullptr || out == nullptr) return refuse("RDMA register", UGDS_INVALID_VALUE, EINVAL, "a null argument");
  return guarded("RDMA register", [&] {
    const memory::Reference buffer = buffer_at(base);
    const gpu::Exported exported = buffer ? export_buffer(buffer) : gpu::Exported{};
    Regions& known = regions();
    const std::lock_guard guard(known.lock);
    // It may have been closed meanwhile.
    if (!buffer || buffer_at(base).generation != buffer.generation) return refuse_unregistered("RDMA register");
    known.all.reserve(known.all.size() + 1);
    const gpu::RdmaRegion made = gpu::register_rdma(pd, exported.descriptor.get(), exported.offset, exported.length,
                                                    buffer.address, access_flags);
    known.all.push_back({buffer, made});
    *out = {made.mr, buffer.address, made.lkey, made.rkey, buffer.generation};
    return answer(UGDS_SUCCESS);
  });
}

uGDSError_t uGDSRDMAUnregister(const void* base, uGDSRDMARegion_t* region) {
  if (region == nullptr) return refuse("RDMA unregister", UGDS_INVALID_VALUE, EINVAL, "a null argument");
  return guarded("RDMA unregister", [&] {
    Regions& known = regions();
    const std::lock_guard guard(known.lock);
    const auto found = std::ranges::find_if(
        known.all, [&](const Region& r) { return r.region.mr == region->mr && r.buffer.generation == region->token; });
    if (found == known.all.end())
      return refuse("RDMA unregister", UGDS_INVALID_VALUE, EINVAL,
                    unless_forked("the region is not registered, or no longer",
                                  "the region is not registered in this process, a child of a fork, or no longer"));
    if (found->buffer.address != reinterpret_cast<std::uintptr_t>(base))
      return refuse("RDMA unregister", UGDS_INVALID_VALUE, EINVAL, "the region is of another buffer",
                    "give the address that it was registered with");
    gpu::deregister_rdma(found->region);
    known.all.erase(found);
    *region = {};
    return answer(UGDS_SUCCESS);
  });
}

}  // extern "C"
