// SPDX-License-Identifier: Apache-2.0
#include "gpu/hip_api.hpp"

#include <initializer_list>

#include "base/library.hpp"

namespace ugds::gpu::hip_api {

namespace {

/// The one that the process has already, if any: a program may bring its own, and memory is known to that one alone.
SharedLibrary open(const char* override, std::initializer_list<const char*> names) {
  SharedLibrary library = SharedLibrary::loaded(override, names);
  return library ? library : SharedLibrary(override, names);
}

bool find_required(SharedLibrary& library, Api& api) {
  return library.find(api.init, "hipInit") && library.find(api.runtime_version, "hipRuntimeGetVersion") &&
         library.find(api.device_count, "hipGetDeviceCount") && library.find(api.device_name, "hipDeviceGetName") &&
         library.find(api.device_attribute, "hipDeviceGetAttribute") && library.find(api.get_device, "hipGetDevice") &&
         library.find(api.set_device, "hipSetDevice") && library.find(api.peek_error, "hipPeekAtLastError") &&
         library.find(api.take_error, "hipGetLastError") && library.find(api.error_name, "hipGetErrorName") &&
         library.find(api.error_string, "hipGetErrorString") &&
         library.find(api.pointer_attributes, "hipPointerGetAttributes") &&
         library.find(api.pointer_attribute, "hipPointerGetAttribute") &&
         library.find(api.address_range, "hipMemGetAddressRange") &&
         library.find(api.host_register, "hipHostRegister") && library.find(api.host_unregister, "hipHostUnregister") &&
         library.find(api.host_device_pointer, "hipHostGetDevicePointer") && library.find(api.free, "hipFree") &&
         library.find(api.stream_create, "hipStreamCreateWithFlags") &&
         library.find(api.stream_destroy, "hipStreamDestroy") &&
         library.find(api.stream_synchronize, "hipStreamSynchronize") &&
         library.find(api.stream_is_capturing, "hipStreamIsCapturing") &&
         library.find(api.copy_to_device, "hipMemcpyHtoDAsync") &&
         library.find(api.copy_from_device, "hipMemcpyDtoHAsync") && library.find(api.launch_host, "hipLaunchHostFunc");
}

}  // namespace

bool Api::load(std::string& why) {
  *this = Api{};
  SharedLibrary hip = open("UGDS_HIP_LIBRARY", {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"});
  if (!hip || !find_required(hip, *this)) {
    why = "HIP's library cannot be used: " + hip.why();
    return false;
  }
  hip.find(exchange_capture_mode, "hipThreadExchangeStreamCaptureMode");
  hip.find(malloc_with_flags, "hipExtMallocWithFlags");
  hip.find(write_value, "hipStreamWriteValue64");
  hip.find(wait_value, "hipStreamWaitValue64");
  hip.find(range_handle, "hipMemGetHandleForAddressRange");
  SharedLibrary hsa = open("UGDS_HSA_LIBRARY", {"libhsa-runtime64.so.1", "libhsa-runtime64.so"});
  hsa.find(hsa_init, "hsa_init");
  hsa.find(hsa_status_string, "hsa_status_string");
  hsa.find(hsa_pointer_info, "hsa_amd_pointer_info");
  hsa.find(hsa_export, "hsa_amd_portable_export_dmabuf");
  hsa.find(hsa_export_v2, "hsa_amd_portable_export_dmabuf_v2");
  return true;
}

}  // namespace ugds::gpu::hip_api
