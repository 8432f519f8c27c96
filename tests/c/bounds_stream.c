/* SPDX-License-Identifier: Apache-2.0 */
/*
 * As bounds.c, in the order of a stream and with values that it reads when it gets there: GPU memory on the fake CUDA
 * driver, a registration in the middle of an allocation.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "cuda_calls.h"
#include "random.h"
#include "ugds.h"

enum { BLOCK = 4096, DEVICE = 1 << 20, GUARD = 65536, HELD = 262144, LENGTH = GUARD + HELD + GUARD, ROUNDS = 400 };
static unsigned char expected[LENGTH], there[LENGTH], stored[DEVICE];

/* Numbers near the ends of what there is. */
static uint64_t edge(void) {
  static const uint64_t ends[] = {0, UINT64_C(1) << 32, UINT64_C(1) << 63, DEVICE, HELD};
  return below(8) == 0 ? next() : ends[below(5)] + (below(9) - 4) * (below(3) == 0 ? 1 : BLOCK);
}

int main(void) {
  use_linked_driver();
  void *context = NULL, *stream = NULL;
  pointer memory = 0;
  CHECK(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxPushCurrent_v2(context) == 0);
  CHECK(cuMemAlloc_v2(&memory, LENGTH) == 0 && cuStreamCreate(&stream, 1) == 0);
  unsigned char* const base = (unsigned char*)(uintptr_t)memory + GUARD;

  uGDSHandle_t fh;
  CHECK(uGDSDriverOpen().err == UGDS_SUCCESS);
  uGDSDescr_t descr = {.type = UGDS_HANDLE_TYPE_USERSPACE_FS, .handle.handle = "emulated:1MiB"};
  CHECK(uGDSHandleRegister(&fh, &descr).err == UGDS_SUCCESS);
  CHECK(uGDSBufRegister(base, HELD, 0).err == UGDS_SUCCESS);

  unsigned succeeded = 0;
  for (int round = 0; round < ROUNDS; ++round) {
    for (int i = 0; i < LENGTH; i += 8) {
      const uint64_t bytes = next();
      memcpy(expected + i, &bytes, 8);
    }
    CHECK(cuMemcpyHtoD_v2(memory, expected, LENGTH) == 0);
    /* What is said at the call is more than what is read later, or not; the place is random at both. */
    size_t size = below(4) == 0 ? edge() : (1 + below(8)) * BLOCK;
    off_t offset = (off_t)(below(4) == 0 ? edge() : below(DEVICE / BLOCK) * BLOCK);
    off_t in_buffer = (off_t)(below(3) == 0 ? edge() : below(HELD / BLOCK) * BLOCK);
    unsigned char* buffer = below(3) != 0 ? base : base + (int64_t)(below(9) - 4) * BLOCK;
    ssize_t done = -1;
    const int writes = (int)below(2);
    const uGDSError_t error = writes ? uGDSWriteAsync(fh, buffer, &size, &offset, &in_buffer, &done, stream)
                                     : uGDSReadAsync(fh, buffer, &size, &offset, &in_buffer, &done, stream);
    CHECK(cuStreamSynchronize(stream) == 0);
    if (error.err == UGDS_SUCCESS && done > 0) {
      const uint64_t at = (uint64_t)(buffer - base) + (uint64_t)in_buffer;
      CHECK((size_t)done == size && at <= HELD && size <= HELD - at);
      CHECK((uint64_t)offset <= DEVICE && size <= DEVICE - (uint64_t)offset);
      ++succeeded;
      if (writes)
        memcpy(stored + offset, expected + GUARD + at, size);
      else
        memcpy(expected + GUARD + at, stored + offset, size);
    } else {
      CHECK(error.err != UGDS_SUCCESS || done < 0);
      uGDSStreamDeregister(stream); /* takes the error */
    }
    CHECK(cuMemcpyDtoH_v2(there, memory, LENGTH) == 0 && memcmp(there, expected, LENGTH) == 0);
  }
  CHECK(succeeded > ROUNDS / 10);

  uGDSStreamDeregister(stream);
  CHECK(uGDSBufDeregister(base).err == UGDS_SUCCESS);
  CHECK(uGDSHandleDeregisterEx(fh, 1).err == UGDS_SUCCESS);
  CHECK(uGDSDriverClose().err == UGDS_SUCCESS);
  CHECK(cuMemFree_v2(memory) == 0);
  return checks_summary();
}
