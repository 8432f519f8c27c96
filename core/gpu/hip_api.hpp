// SPDX-License-Identifier: Apache-2.0
//
// HIP's and HSA's binary interface, as far as it is used: values and signatures of ROCm 6 and later, written down here
// so that building needs no ROCm. What may be missing in a release is nullptr.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ugds::gpu::hip_api {

// hipError_t
inline constexpr int kSuccess = 0;
inline constexpr int kInvalidValue = 1;
inline constexpr int kOutOfMemory = 2;
inline constexpr int kNoDevice = 100;
inline constexpr int kInvalidDevice = 101;
inline constexpr int kAlreadyRegistered = 712;
inline constexpr int kNotSupported = 801;
inline constexpr int kCaptureImplicit = 906;

/// HIP_VERSION of 6.0: before it hipMemoryType had other values, and hipPointerAttribute_t another shape.
inline constexpr int kOldestVersion = 60000000;

// hipMemoryType
inline constexpr int kTypeDevice = 2;
inline constexpr int kTypeManaged = 3;

inline constexpr int kAttributeCanWaitValue = 10013;  // hipDeviceAttributeCanUseStreamWaitValue
inline constexpr int kPointerBufferId = 7;            // HIP_POINTER_ATTRIBUTE_BUFFER_ID
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kSignalMemory = 2;            // hipMallocSignalMemory: 8 bytes at a time, reached by both
inline constexpr unsigned kRegisterPortableMapped = 3;  // hipHostRegisterPortable | hipHostRegisterMapped
inline constexpr unsigned kWaitAtLeast = 0;             // hipStreamWaitValueGte
inline constexpr int kCaptureModeRelaxed = 2;
inline constexpr int kCaptureNone = 0;
inline constexpr int kRangeDmaBuf = 1;               // hipMemRangeHandleTypeDmaBufFd
inline constexpr unsigned long long kRangePcie = 1;  // hipMemRangeFlagDmaBufMappingTypePcie
inline constexpr std::uint64_t kHsaPcie = 1;         // HSA_AMD_DMABUF_MAPPING_TYPE_PCIE

/// hipPointerAttribute_t
struct PointerAttributes {
  int type;
  int device;
  void* device_pointer;
  void* host_pointer;
  int is_managed;
  unsigned flags;
};
static_assert(sizeof(PointerAttributes) == 32);

/// hsa_amd_pointer_info_t, up to what every release has. The caller sets `size`.
struct PointerInfo {
  std::uint32_t size;
  int type;  ///< 0: not HSA's
  void* agent_base;
  void* host_base;
  std::size_t bytes;
  void* user;
  std::uint64_t owner;  ///< hsa_agent_t
  std::uint32_t flags;
};
static_assert(sizeof(PointerInfo) == 56);

struct Api {
  int (*init)(unsigned);
  int (*runtime_version)(int*);
  int (*device_count)(int*);
  int (*device_name)(char*, int, int);
  int (*device_attribute)(int*, int, int);
  int (*get_device)(int*);
  int (*set_device)(int);
  int (*peek_error)();
  int (*take_error)();
  const char* (*error_name)(int);
  const char* (*error_string)(int);
  int (*pointer_attributes)(PointerAttributes*, const void*);
  int (*pointer_attribute)(void*, int, void*);
  int (*address_range)(void**, std::size_t*, void*);
  int (*host_register)(void*, std::size_t, unsigned);
  int (*host_unregister)(void*);
  int (*host_device_pointer)(void**, void*, unsigned);
  int (*free)(void*);
  int (*stream_create)(void**, unsigned);
  int (*stream_destroy)(void*);
  int (*stream_synchronize)(void*);
  int (*stream_is_capturing)(void*, int*);
  int (*copy_to_device)(void*, void*, std::size_t, void*);
  int (*copy_from_device)(void*, void*, std::size_t, void*);
  int (*launch_host)(void*, void (*)(void*), void*);

  // What may be missing.
  int (*exchange_capture_mode)(int*);
  int (*malloc_with_flags)(void**, std::size_t, unsigned);
  int (*write_value)(void*, void*, std::uint64_t, unsigned);
  int (*wait_value)(void*, void*, std::uint64_t, unsigned, std::uint64_t);
  int (*range_handle)(void*, void*, std::size_t, int, unsigned long long);
  int (*hsa_init)();
  int (*hsa_status_string)(int, const char**);
  int (*hsa_pointer_info)(const void*, PointerInfo*, void* (*)(std::size_t), std::uint32_t*, void**);
  int (*hsa_export)(const void*, std::size_t, int*, std::uint64_t*);
  int (*hsa_export_v2)(const void*, std::size_t, int*, std::uint64_t*, std::uint64_t);

  /// Opens the libraries and finds the functions. False where HIP's library, or one of its functions that must be
  /// there, is missing, and then `why` says which.
  bool load(std::string& why);
};

}  // namespace ugds::gpu::hip_api
