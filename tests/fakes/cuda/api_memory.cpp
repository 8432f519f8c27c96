// SPDX-License-Identifier: Apache-2.0
//
// The driver's functions for memory: allocating, pinning, asking what an address is, and exporting.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "calls.hpp"
#include "capture.hpp"
#include "context.hpp"
#include "memory.hpp"

using namespace fake_cuda;

namespace {

constexpr std::uint64_t page = 4096;

/// What frees memory waits first for all work of the GPU that was enqueued: nothing may still use it. So it never
/// returns while a stream waits for a word, or for a host function to end.
void drain(int gpu) {
  if (primary(gpu).retained == 0) return;
  for (const Point& point : primary(gpu).tails()) point.wait();
}

void drain_all() {
  for (int gpu = 0; gpu < most_gpus; gpu++) drain(gpu);
}

struct Answer {
  const Block* block;
  std::uint64_t pointer;

  /// Writes the attribute to `to`; the driver's defaults where there is no block.
  CUresult write(int attribute, void* to) const {
    const auto put = [&](auto value) {
      std::memcpy(to, &value, sizeof value);
      return CUDA_SUCCESS;
    };
    const bool device = block != nullptr && !block->is_host();
    switch (attribute) {
      case CU_POINTER_ATTRIBUTE_CONTEXT: return put(block == nullptr ? nullptr : block->context);
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        return put(block == nullptr ? 0U : static_cast<unsigned>(device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST));
      case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: return put(block == nullptr ? std::uint64_t{0} : pointer);
      case CU_POINTER_ATTRIBUTE_HOST_POINTER: {
        const bool none = block == nullptr || block->kind == Kind::device;
        put(none ? std::uint64_t{0} : pointer);
        return none && block != nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
      }
      case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: return put(0);
      case CU_POINTER_ATTRIBUTE_BUFFER_ID: return put(block == nullptr ? std::uint64_t{0} : block->id);
      case CU_POINTER_ATTRIBUTE_IS_MANAGED: return put(block == nullptr ? 0 : int{block->kind == Kind::managed});
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: return put(block == nullptr ? int{CU_DEVICE_INVALID} : block->gpu);
      case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: return put(block == nullptr ? std::uint64_t{0} : block->base);
      case CU_POINTER_ATTRIBUTE_RANGE_SIZE: return put(block == nullptr ? std::uint64_t{0} : block->size);
      default: return CUDA_ERROR_INVALID_VALUE;
    }
  }
};

}  // namespace

FAKE_EXPORT CUresult cuPointerGetAttribute(void* data, int attribute, CUdeviceptr pointer) {
  return plain<"cuPointerGetAttribute">([&]() -> CUresult {
    const auto block = memory().find(pointer);
    if (data == nullptr || !block) return CUDA_ERROR_INVALID_VALUE;
    return Answer{&*block, pointer}.write(attribute, data);
  });
}

FAKE_EXPORT CUresult cuPointerGetAttributes(unsigned int count, int* attributes, void** data, CUdeviceptr pointer) {
  return plain<"cuPointerGetAttributes">([&]() -> CUresult {
    if (count == 0 || attributes == nullptr || data == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto block = memory().find(pointer);
    for (unsigned i = 0; i < count; i++) {
      if (data[i] == nullptr) return CUDA_ERROR_INVALID_VALUE;
      // Unlike the function for one attribute, this one gives defaults where there is none.
      const CUresult code = Answer{block ? &*block : nullptr, pointer}.write(attributes[i], data[i]);
      if (code != CUDA_SUCCESS && attributes[i] != CU_POINTER_ATTRIBUTE_HOST_POINTER) return code;
    }
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr pointer) {
  return in_context<"cuMemGetAddressRange_v2">([&](Context&) -> CUresult {
    const auto block = memory().find(pointer);
    if (!block || block->is_host()) return CUDA_ERROR_NOT_FOUND;
    if (base != nullptr) *base = block->base;
    if (size != nullptr) *size = block->size;
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t size) {
  return in_context<"cuMemAlloc_v2">([&](Context& current) -> CUresult {
    if (pointer == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult code = unsafe_call(); code != CUDA_SUCCESS) return code;
    gate(current.gpu).quiet();
    std::uint64_t address = 0;
    const CUresult code = memory().allocate(current.gpu, current.handle, size, address);
    if (code == CUDA_SUCCESS) *pointer = address;
    return code;
  });
}

FAKE_EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer) {
  return in_context<"cuMemFree_v2">([&](Context&) -> CUresult {
    if (const CUresult code = unsafe_call(); code != CUDA_SUCCESS) return code;
    if (pointer == 0) return CUDA_SUCCESS;
    if (const auto block = memory().find(pointer)) drain(block->gpu);
    return memory().release(pointer, Kind::device);
  });
}

FAKE_EXPORT CUresult cuMemAllocManaged(CUdeviceptr* pointer, size_t size, unsigned int flags) {
  return in_context<"cuMemAllocManaged">([&](Context& current) -> CUresult {
    if (pointer == nullptr || (flags != CU_MEM_ATTACH_GLOBAL && flags != 2)) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult code = unsafe_call(); code != CUDA_SUCCESS) return code;
    quiet_everywhere();
    std::uint64_t address = 0;
    const CUresult code = memory().allocate_mapped(Kind::managed, current.gpu, current.handle, size, address);
    if (code == CUDA_SUCCESS) *pointer = address;
    return code;
  });
}

FAKE_EXPORT CUresult cuMemHostAlloc(void** pointer, size_t size, unsigned int flags) {
  return in_context<"cuMemHostAlloc">([&](Context& current) -> CUresult {
    if (pointer == nullptr || flags > 7) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult code = unsafe_call(); code != CUDA_SUCCESS) return code;
    quiet_everywhere();
    std::uint64_t address = 0;
    const CUresult code = memory().allocate_mapped(Kind::host, current.gpu, current.handle, size, address);
    if (code == CUDA_SUCCESS) *pointer = reinterpret_cast<void*>(address);
    return code;
  });
}

FAKE_EXPORT CUresult cuMemFreeHost(void* pointer) {
  return in_context<"cuMemFreeHost">([&](Context&) -> CUresult {
    if (const CUresult code = unsafe_call(); code != CUDA_SUCCESS) return code;
    drain_all();
    return memory().release(reinterpret_cast<std::uint64_t>(pointer), Kind::host);
  });
}

FAKE_EXPORT CUresult cuMemHostRegister_v2(void* pointer, size_t size, unsigned int flags) {
  return in_context<"cuMemHostRegister_v2">([&](Context& current) -> CUresult {
    if (flags > 15) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult code = unsafe_call(); code != CUDA_SUCCESS) return code;
    quiet_everywhere();
    return memory().register_host(current.gpu, current.handle, reinterpret_cast<std::uint64_t>(pointer), size);
  });
}

FAKE_EXPORT CUresult cuMemHostUnregister(void* pointer) {
  return in_context<"cuMemHostUnregister">([&](Context&) -> CUresult {
    if (const CUresult code = unsafe_call(); code != CUDA_SUCCESS) return code;
    drain_all();
    return memory().release(reinterpret_cast<std::uint64_t>(pointer), Kind::registered);
  });
}

FAKE_EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* pointer, unsigned int flags) {
  return in_context<"cuMemHostGetDevicePointer_v2">([&](Context&) -> CUresult {
    if (device == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const auto block = memory().find(reinterpret_cast<std::uint64_t>(pointer));
    if (!block || !block->is_host()) return misuse(CUDA_ERROR_INVALID_VALUE, "a device pointer of memory not pinned");
    *device = reinterpret_cast<std::uint64_t>(pointer);
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuMemGetHandleForAddressRange(void* handle, CUdeviceptr pointer, size_t size, int type,
                                                   unsigned long long flags) {
  return in_context<"cuMemGetHandleForAddressRange">([&](Context&) -> CUresult {
    if (handle == nullptr || type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags > 1) return CUDA_ERROR_INVALID_VALUE;
    if (!settings().dmabuf) return CUDA_ERROR_NOT_SUPPORTED;
    if (flags == CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE && !settings().dmabuf_pcie)
      return CUDA_ERROR_NOT_SUPPORTED;
    if (pointer % page != 0 || size % page != 0 || size == 0) {
      return misuse(CUDA_ERROR_INVALID_VALUE, "the range to be exported does not begin and end at pages");
    }
    const auto block = memory().find(pointer);
    // Its last page may be the allocation's in part.
    const bool fits = block && block->kind == Kind::device && size <= (block->end() + page - 1) / page * page - pointer;
    if (!fits) return misuse(CUDA_ERROR_INVALID_VALUE, "the range to be exported is not in one allocation");
    // A stand-in of the right size: the memory is not in it, and as with the real one nobody should map it.
    const std::string name = "fake_dmabuf:" + std::to_string(pointer) + ":" + std::to_string(size);
    const int given = settings().dmabuf_descriptor;
    const int file = given >= 0 ? ::fcntl(given, F_DUPFD_CLOEXEC, 0) : ::memfd_create(name.c_str(), MFD_CLOEXEC);
    if (file < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    if (given < 0 && ::ftruncate(file, static_cast<off_t>(size)) != 0) {
      ::close(file);
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    std::memcpy(handle, &file, sizeof file);
    exports++;
    return CUDA_SUCCESS;
  });
}
