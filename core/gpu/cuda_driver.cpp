// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda_driver.hpp"

namespace ugds::gpu {

bool CudaDriver::load(SharedLibrary& library) {
  bool all = static_cast<bool>(library);
  const auto need = [&](auto& function, const char* name) { all = library.find(function, name) && all; };
  need(init, "cuInit");
  need(driver_version, "cuDriverGetVersion");
  need(device_count, "cuDeviceGetCount");
  need(device_get, "cuDeviceGet");
  need(device_name, "cuDeviceGetName");
  need(device_attribute, "cuDeviceGetAttribute");
  need(primary_retain, "cuDevicePrimaryCtxRetain");
  need(context_current, "cuCtxGetCurrent");
  need(context_push, "cuCtxPushCurrent_v2");
  need(context_pop, "cuCtxPopCurrent_v2");
  need(pointer_attribute, "cuPointerGetAttribute");
  need(address_range, "cuMemGetAddressRange_v2");
  need(host_register, "cuMemHostRegister_v2");
  need(host_unregister, "cuMemHostUnregister");
  need(host_device_pointer, "cuMemHostGetDevicePointer_v2");
  need(to_device, "cuMemcpyHtoDAsync_v2");
  need(from_device, "cuMemcpyDtoHAsync_v2");
  need(stream_create, "cuStreamCreate");
  need(stream_destroy, "cuStreamDestroy_v2");
  need(stream_synchronize, "cuStreamSynchronize");
  need(stream_context, "cuStreamGetCtx");
  need(context_device, "cuCtxGetDevice");
  need(stream_capturing, "cuStreamIsCapturing");
  need(host_function, "cuLaunchHostFunc");
  need(launch, "cuLaunchKernel");
  need(module_load, "cuModuleLoadData");
  need(module_function, "cuModuleGetFunction");
  need(error_name, "cuGetErrorName");
  need(error_string, "cuGetErrorString");
  // Of newer drivers; what lacks them does without.
  library.find(batch_words, "cuStreamBatchMemOp_v2");
  library.find(stream_flags, "cuStreamGetFlags");
  library.find(stream_query, "cuStreamQuery");
  library.find(handle_for_range, "cuMemGetHandleForAddressRange");
  return all;
}

}  // namespace ugds::gpu
