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
  library.find(handle_for_range, "cuMemGetHandleForAddressRange");
  return all;
}

// Reads the gpu::CopyOrder that the block's row names, past any cache, and copies in the widest units in which both
// sides are aligned. What is left over at the end goes byte by byte.
const char kCopyKernel[] = R"(
.version 6.0
.target sm_50
.address_size 64

.visible .entry ugds_copy(.param .u64 orders)
{
  .reg .pred %p;
  .reg .u32 %a, %b, %c, %v<4>;
  .reg .u64 %order, %from, %to, %bytes, %first, %step, %units, %at, %x, %y;

  ld.param.u64 %order, [orders];
  mov.u32 %a, %ctaid.y;
  mul.wide.u32 %x, %a, 24;
  add.u64 %order, %order, %x;
  cvta.to.global.u64 %order, %order;
  ld.volatile.global.u64 %from, [%order];
  ld.volatile.global.u64 %to, [%order+8];
  ld.volatile.global.u64 %bytes, [%order+16];
  cvta.to.global.u64 %from, %from;
  cvta.to.global.u64 %to, %to;

  mov.u32 %a, %ctaid.x;
  mov.u32 %b, %ntid.x;
  mov.u32 %c, %tid.x;
  mul.wide.u32 %first, %a, %b;
  cvt.u64.u32 %x, %c;
  add.u64 %first, %first, %x;
  mov.u32 %a, %nctaid.x;
  mul.wide.u32 %step, %a, %b;

  or.b64 %y, %from, %to;
  mov.u64 %units, 0;
  and.b64 %x, %y, 15;
  setp.eq.u64 %p, %x, 0;
  @%p bra VECTORS;
  and.b64 %x, %y, 3;
  setp.eq.u64 %p, %x, 0;
  @%p bra WORDS;
  bra BYTES;

VECTORS:
  shr.u64 %units, %bytes, 4;
  mov.u64 %at, %first;
NEXT_VECTOR:
  setp.ge.u64 %p, %at, %units;
  @%p bra VECTORS_DONE;
  shl.b64 %x, %at, 4;
  add.u64 %y, %from, %x;
  ld.global.v4.u32 {%v0, %v1, %v2, %v3}, [%y];
  add.u64 %y, %to, %x;
  st.global.v4.u32 [%y], {%v0, %v1, %v2, %v3};
  add.u64 %at, %at, %step;
  bra NEXT_VECTOR;
VECTORS_DONE:
  shl.b64 %units, %units, 4;
  bra BYTES;

WORDS:
  shr.u64 %units, %bytes, 2;
  mov.u64 %at, %first;
NEXT_WORD:
  setp.ge.u64 %p, %at, %units;
  @%p bra WORDS_DONE;
  shl.b64 %x, %at, 2;
  add.u64 %y, %from, %x;
  ld.global.u32 %v0, [%y];
  add.u64 %y, %to, %x;
  st.global.u32 [%y], %v0;
  add.u64 %at, %at, %step;
  bra NEXT_WORD;
WORDS_DONE:
  shl.b64 %units, %units, 2;

BYTES:
  add.u64 %at, %first, %units;
NEXT_BYTE:
  setp.ge.u64 %p, %at, %bytes;
  @%p bra DONE;
  add.u64 %y, %from, %at;
  ld.global.u8 %v0, [%y];
  add.u64 %y, %to, %at;
  st.global.u8 [%y], %v0;
  add.u64 %at, %at, %step;
  bra NEXT_BYTE;

DONE:
  ret;
}
)";

}  // namespace ugds::gpu
