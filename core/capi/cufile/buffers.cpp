// SPDX-License-Identifier: Apache-2.0
#include "capi/cufile/buffers.hpp"

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/immortal.hpp"
#include "capi/cufile/driver.hpp"
#include "capi/cufile/errors.hpp"
#include "capi/cufile/fork.hpp"
#include "capi/cufile/run_page.hpp"
#include "capi/cufile/statistics.hpp"
#include "capi/gpu.hpp"
#include "gpu/runtime.hpp"

namespace ugds::cufile {

namespace {

using memory::Reference;
using memory::Registry;

constexpr std::uint64_t kPatience = 60'000'000'000;

struct Buffer {
  std::uintptr_t base = 0;
  std::size_t size = 0;
  Reference reference{};  ///< none for managed memory, which nothing has to be done for
  int gpu = -1;
};
struct Buffers {
  std::mutex lock;
  std::vector<Buffer> all;
};
constinit Immortal<Buffers> the_buffers;
Buffers& buffers() { return the_buffers.value; }

void prepare_for_fork() {
  static const bool hooked = [] {
    at_fork({[] { buffers().lock.lock(); }, [] { buffers().lock.unlock(); },
             [] {
               buffers().all.clear();  // the parent's
               buffers().lock.unlock();
             }});
    return true;
  }();
  static_cast<void>(hooked);
}

/// Whose memory an address is. Managed memory is nobody's here: the processor reaches it as it does any other.
gpu::Runtime* find_owner(const void* address, gpu::Allocation& allocation, bool* managed = nullptr) {
  try {
    return gpu::owner_of(address, allocation);
  } catch (const Failure& failure) {
    if (failure.error().code != EOPNOTSUPP) throw;
    if (managed != nullptr) *managed = true;
    return nullptr;
  }
}

CUfileError_t register_buffer(const void* base, std::size_t size) {
  prepare_for_fork();
  Driver::instance().need();
  Buffer buffer{.base = reinterpret_cast<std::uintptr_t>(base), .size = size};
  bool managed = false;
  gpu::Allocation allocation;
  if (gpu::Runtime* const runtime = find_owner(base, allocation, &managed); runtime != nullptr) {
    buffer.gpu = allocation.place.device;
    if (buffer.base + size > allocation.base + allocation.size) {
      return refuse("register", CU_FILE_CUDA_POINTER_RANGE_ERROR, "the range goes beyond the GPU's allocation",
                    "register no more than was allocated");
    }
  }
  const std::lock_guard guard(buffers().lock);
  if (std::ranges::any_of(buffers().all, [&](const Buffer& b) { return b.base == buffer.base; })) {
    return refuse("register", CU_FILE_MEMORY_ALREADY_REGISTERED, "a buffer is registered at this address",
                  "deregister it first by cuFileBufDeregister()");
  }
  buffers().all.reserve(buffers().all.size() + 1);
  if (!managed) buffer.reference = capi::register_memory(base, size, capi::WantedBackend::any, false);
  buffers().all.push_back(buffer);
  statistics().count_buffer(buffer.gpu, true, true, size);
  return answer(CU_FILE_SUCCESS);
}

/// 0, EBUSY or ESTALE (somebody else closed it). Waits for requests.
int close_buffer(const Buffer& buffer) {
  if (!buffer.reference) return 0;
  const std::uint64_t start = monotonic_ns();
  for (;;) {
    const int closed = capi::close_buffer(buffer.reference);
    if (closed == UGDS_SUCCESS) return 0;
    if (closed == UGDS_MEMORY_NOT_REGISTERED) return ESTALE;
    if (closed == UGDS_RDMA_REGION_ACTIVE || monotonic_ns() - start > kPatience) return EBUSY;
    const timespec nap{0, 50'000};
    nanosleep(&nap, nullptr);
  }
}

CUfileError_t deregister_buffer(const void* base) {
  Buffer buffer;
  {
    const std::lock_guard guard(buffers().lock);
    auto& all = buffers().all;
    const auto found =
        std::ranges::find_if(all, [&](const Buffer& b) { return b.base == reinterpret_cast<std::uintptr_t>(base); });
    if (found == all.end()) {
      return refuse("deregister", CU_FILE_INVALID_VALUE, "no buffer is registered at this address",
                    "give the address that it was registered with");
    }
    buffer = *found;
    all.erase(found);
  }
  if (close_buffer(buffer) == EBUSY) {
    const std::lock_guard guard(buffers().lock);
    buffers().all.push_back(buffer);
    return refuse("deregister", CU_FILE_INTERNAL_ERROR, "requests on the buffer have not ended for a minute",
                  "wait for them");
  }
  statistics().count_buffer(buffer.gpu, false, true, buffer.size);
  return answer(CU_FILE_SUCCESS);
}

}  // namespace

RequestMemory::RequestMemory(std::uintptr_t base, std::uint64_t offset, std::size_t size, bool write,
                             std::uint32_t device)
    : at_(base + offset) {
  Registry& registry = Registry::instance();
  // Whose it is, the base tells: what is behind the offset may be nobody's.
  const auto* const address = reinterpret_cast<const void*>(base);
  const Reference found = registry.find(address);
  if (found && size <= found.size && at_ - found.address <= found.size - size && (write || !found.readonly)) {
    reference_ = found;
    return;
  }
  gpu::Allocation allocation;
  gpu::Runtime* const runtime = find_owner(address, allocation);
  if (runtime == nullptr) {
    kind_ = Kind::plain;
    return;
  }
  if (size > allocation.size || at_ - allocation.base > allocation.size - size) {
    kind_ = Kind::beyond;
    return;
  }
  auto gpu = std::make_unique<memory::GpuBuffer>(*runtime, allocation, at_);
  reference_ = registry.add_gpu_unlisted(at_, size, false, std::move(gpu), device);
  is_ours_ = true;
}

RequestMemory::~RequestMemory() {
  // The device may still be at what its request left behind.
  if (is_ours_) Registry::instance().close_when_idle(reference_);
}

int gpu_of(const Reference& reference) {
  const Registry::GpuPlace place = Registry::instance().gpu_of(reference);
  return place.runtime == nullptr ? -1 : place.place.device;
}

bool close_all_buffers() {
  for (;;) {
    Buffer buffer;
    {
      const std::lock_guard guard(buffers().lock);
      if (buffers().all.empty()) return true;
      buffer = buffers().all.back();
      buffers().all.pop_back();
    }
    if (close_buffer(buffer) != EBUSY) continue;
    const std::lock_guard guard(buffers().lock);
    buffers().all.push_back(buffer);
    return false;
  }
}

}  // namespace ugds::cufile

using namespace ugds::cufile;  // NOLINT

extern "C" {

CUfileError_t cuFileBufRegister(const void* base, size_t size, int flags) {
  const CUfileError_t done = [&] {
    if (base == nullptr || size == 0) return refuse("register", CU_FILE_INVALID_VALUE, "a null address, or no bytes");
    if ((flags & ~(CU_FILE_RDMA_REGISTER | CU_FILE_RDMA_RELAXED_ORDERING)) != 0)
      return refuse("register", CU_FILE_INVALID_VALUE, "unknown flags", "use 0, or the flags of RDMA");
    return guarded("register", [&] { return register_buffer(base, size); });
  }();
  statistics().count(Operation::buffer_register, done.err == CU_FILE_SUCCESS);
  if (done.err == CU_FILE_SUCCESS) count(run_page().buffers);
  return done;
}

CUfileError_t cuFileBufDeregister(const void* base) {
  const CUfileError_t done = [&] {
    if (!Driver::instance().is_open())
      return refuse("deregister", CU_FILE_DRIVER_NOT_INITIALIZED, "the driver is not open");
    if (base == nullptr) return refuse("deregister", CU_FILE_INVALID_VALUE, "a null address");
    return guarded("deregister", [&] { return deregister_buffer(base); });
  }();
  statistics().count(Operation::buffer_deregister, done.err == CU_FILE_SUCCESS);
  return done;
}

}  // extern "C"
