// SPDX-License-Identifier: Apache-2.0
//
// What is used of CUDA's driver API, with the types and numbers that its binary interface has. No header of CUDA's is
// needed to build.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/library.hpp"

namespace ugds::gpu {

using CuResult = int;
using CuDevice = int;
using CuContext = void*;
using CuStream = void*;
using CuModule = void*;
using CuFunction = void*;
using CuPointer = unsigned long long;

inline constexpr CuResult kCuNotInitialized = 3, kCuInvalidValue = 1, kCuDeinitialized = 4, kCuAlreadyRegistered = 712,
                          kCuNotReady = 600;

enum CuPointerAttribute : int {
  kCuPointerContext = 1,
  kCuPointerMemoryType = 2,
  kCuPointerBufferId = 7,
  kCuPointerIsManaged = 8,
  kCuPointerDevice = 9,
};
inline constexpr unsigned kCuMemoryTypeDevice = 2;

enum CuDeviceAttribute : int {
  kCuCanFlushRemoteWrites = 98,
  kCuCan64BitWords = 122,
};

/// CUstreamBatchMemOpParams: a union of 48 bytes.
struct CuWordOp {
  int operation;
  int padding;
  CuPointer address;
  std::uint64_t value;
  unsigned flags;
  unsigned more_padding;
  CuPointer alias;
  std::uint64_t rest;
};
static_assert(sizeof(CuWordOp) == 48);
inline constexpr int kCuWait64 = 4, kCuWrite64 = 5;
inline constexpr unsigned kCuWaitAtLeast = 0, kCuWaitFlush = 1u << 30;

inline constexpr unsigned kCuStreamNonBlocking = 1;
/// Keys of a launch's list of extras: all arguments as one buffer.
inline void* const kCuLaunchEnd = nullptr;
inline void* const kCuLaunchBuffer = reinterpret_cast<void*>(1);
inline void* const kCuLaunchBufferSize = reinterpret_cast<void*>(2);
inline constexpr unsigned kCuRegisterPortable = 1, kCuRegisterDeviceMap = 2;
inline constexpr int kCuHandleDmabuf = 1;
inline constexpr unsigned long long kCuDmabufPcie = 1;

/// The functions. All are there, or the driver is too old.
struct CudaDriver {
  CuResult (*init)(unsigned flags);
  CuResult (*driver_version)(int* version);
  CuResult (*device_count)(int* count);
  CuResult (*device_get)(CuDevice* device, int ordinal);
  CuResult (*device_name)(char* name, int size, CuDevice device);
  CuResult (*device_attribute)(int* value, CuDeviceAttribute attribute, CuDevice device);
  CuResult (*primary_retain)(CuContext* context, CuDevice device);
  CuResult (*context_current)(CuContext* context);
  CuResult (*context_push)(CuContext context);
  CuResult (*context_pop)(CuContext* context);
  CuResult (*pointer_attribute)(void* value, CuPointerAttribute attribute, CuPointer pointer);
  CuResult (*address_range)(CuPointer* base, std::size_t* size, CuPointer pointer);
  CuResult (*host_register)(void* address, std::size_t size, unsigned flags);
  CuResult (*host_unregister)(void* address);
  CuResult (*host_device_pointer)(CuPointer* pointer, void* address, unsigned flags);
  CuResult (*to_device)(CuPointer to, const void* from, std::size_t bytes, CuStream stream);
  CuResult (*from_device)(void* to, CuPointer from, std::size_t bytes, CuStream stream);
  CuResult (*stream_create)(CuStream* stream, unsigned flags);
  CuResult (*stream_destroy)(CuStream stream);
  CuResult (*stream_synchronize)(CuStream stream);
  CuResult (*stream_flags)(CuStream stream, unsigned* flags);
  CuResult (*stream_query)(CuStream stream);
  CuResult (*stream_context)(CuStream stream, CuContext* context);
  CuResult (*context_device)(CuDevice* device);
  CuResult (*stream_capturing)(CuStream stream, int* status);
  CuResult (*batch_words)(CuStream stream, unsigned count, CuWordOp* ops, unsigned flags);
  CuResult (*host_function)(CuStream stream, void (*function)(void*), void* context);
  CuResult (*launch)(CuFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                     unsigned block_y, unsigned block_z, unsigned shared, CuStream stream, void** arguments,
                     void** extra);
  CuResult (*module_load)(CuModule* module, const void* image);
  CuResult (*module_function)(CuFunction* function, CuModule module, const char* name);
  CuResult (*handle_for_range)(void* handle, CuPointer pointer, std::size_t size, int type, unsigned long long flags);
  CuResult (*error_name)(CuResult error, const char** text);
  CuResult (*error_string)(CuResult error, const char** text);

  /// False where one is missing.
  bool load(SharedLibrary& library);
};

/// The kernels `ugds_copy` and `ugds_pieces` as PTX, which the driver compiles for the GPU that it finds.
extern const char kKernels[];

}  // namespace ugds::gpu
