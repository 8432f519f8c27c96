// SPDX-License-Identifier: Apache-2.0
//
// The driver's functions for initialisation, devices and contexts.
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "calls.hpp"
#include "capture.hpp"
#include "context.hpp"

using namespace fake_cuda;

namespace {

struct ErrorWords {
  int code;
  const char* name;
  const char* text;
};

constexpr ErrorWords errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not initiated in this stream"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing stream"},
    {907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a capture sequence from another thread"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorWords* words_of(int code) {
  for (const ErrorWords& words : errors) {
    if (words.code == code) return &words;
  }
  return nullptr;
}

bool is_gpu(CUdevice device) { return device >= 0 && device < settings().gpus; }

int attribute_of(int attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return 0x10 + device;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: return 0;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED: return 1;
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR: return settings().stream_words;
    case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED: return settings().dmabuf;
    default: return 0;
  }
}

}  // namespace

FAKE_EXPORT CUresult cuInit(unsigned int flags) {
  if (const CUresult refused = admit(entry<"cuInit">, false); refused != CUDA_SUCCESS) return refused;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (settings().gpus == 0) return CUDA_ERROR_NO_DEVICE;
  int nobody = 0;
  const int me = ::getpid();
  if (!initialized_by.compare_exchange_strong(nobody, me) && nobody != me) return CUDA_ERROR_NOT_INITIALIZED;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDriverGetVersion(int* version) {
  if (const CUresult refused = admit(entry<"cuDriverGetVersion">, false); refused != CUDA_SUCCESS) return refused;
  if (version == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *version = settings().driver_version;
  return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuGetErrorName(CUresult error, const char** text) {
  if (const CUresult refused = admit(entry<"cuGetErrorName">, false); refused != CUDA_SUCCESS) return refused;
  const ErrorWords* words = words_of(error);
  *text = words == nullptr ? nullptr : words->name;
  return words == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  if (const CUresult refused = admit(entry<"cuGetErrorString">, false); refused != CUDA_SUCCESS) return refused;
  const ErrorWords* words = words_of(error);
  *text = words == nullptr ? nullptr : words->text;
  return words == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDeviceGetCount(int* count) {
  return plain<"cuDeviceGetCount">([&]() -> CUresult {
    if (count == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *count = settings().gpus;
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return plain<"cuDeviceGet">([&]() -> CUresult {
    if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_gpu(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  return plain<"cuDeviceGetName">([&]() -> CUresult {
    if (!is_gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (name == nullptr || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    std::snprintf(name, static_cast<std::size_t>(length), "Fake GPU %d", device);
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  return plain<"cuDeviceGetUuid_v2">([&]() -> CUresult {
    if (uuid == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (!is_gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::memcpy(uuid->bytes, "fake GPU number", 15);
    uuid->bytes[15] = static_cast<char>(device);
    return CUDA_SUCCESS;
  });
}

/// Of a bus that no machine has.
FAKE_EXPORT CUresult cuDeviceGetPCIBusId(char* bus, int length, CUdevice device) {
  return plain<"cuDeviceGetPCIBusId">([&]() -> CUresult {
    if (!is_gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (bus == nullptr || length < 13) return CUDA_ERROR_INVALID_VALUE;
    std::snprintf(bus, static_cast<std::size_t>(length), "FFFF:FA:%02X.0", static_cast<unsigned>(device & 31));
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  return plain<"cuDeviceGetAttribute">([&]() -> CUresult {
    if (value == nullptr || attribute <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (!is_gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute_of(attribute, device);
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return plain<"cuDevicePrimaryCtxRetain">([&]() -> CUresult {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return is_gpu(device) ? retain(device, *context) : CUDA_ERROR_INVALID_DEVICE;
  });
}

FAKE_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return plain<"cuDevicePrimaryCtxRelease_v2">(
      [&]() -> CUresult { return is_gpu(device) ? release(device) : CUDA_ERROR_INVALID_DEVICE; });
}

FAKE_EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  return plain<"cuCtxGetCurrent">([&]() -> CUresult {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *context = context_stack().empty() ? nullptr : context_stack().back()->handle;
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuCtxSetCurrent(CUcontext handle) {
  return plain<"cuCtxSetCurrent">([&]() -> CUresult {
    auto& stack = context_stack();
    Context* context = find_context(handle);
    if (handle != nullptr && (context == nullptr || context->retained == 0)) {
      return misuse(CUDA_ERROR_INVALID_CONTEXT, "a context was made current that does not exist");
    }
    if (!stack.empty()) stack.pop_back();
    if (context != nullptr) stack.push_back(context);
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuCtxPushCurrent_v2(CUcontext handle) {
  return plain<"cuCtxPushCurrent_v2">([&]() -> CUresult {
    Context* context = find_context(handle);
    if (context == nullptr || context->retained == 0) {
      return misuse(CUDA_ERROR_INVALID_CONTEXT, "a context was pushed that does not exist");
    }
    context_stack().push_back(context);
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* handle) {
  return plain<"cuCtxPopCurrent_v2">([&]() -> CUresult {
    auto& stack = context_stack();
    if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (handle != nullptr) *handle = stack.back()->handle;
    stack.pop_back();
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  return in_context<"cuCtxGetDevice">([&](Context& current) -> CUresult {
    if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *device = current.gpu;
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuCtxSynchronize() {
  return in_context<"cuCtxSynchronize">([&](Context& current) -> CUresult {
    const auto points = current.tails();
    for (const Point& point : points) {
      if (const CUresult code = refuse_captured(*point.stream); code != CUDA_SUCCESS) return code;
    }
    for (const Point& point : points) point.wait();
    return current.error;
  });
}

FAKE_EXPORT CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return in_context<"cuCtxGetStreamPriorityRange">([&](Context&) -> CUresult {
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return CUDA_SUCCESS;
  });
}
