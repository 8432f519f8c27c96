/* SPDX-License-Identifier: Apache-2.0 */
/* What a C test calls of the fake CUDA driver that it is linked with. */
#ifndef UGDS_TESTS_CUDA_CALLS_H
#define UGDS_TESTS_CUDA_CALLS_H

#include <dlfcn.h> /* dladdr, of _GNU_SOURCE */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

typedef unsigned long long pointer;
extern int cuInit(unsigned flags);
extern int cuDevicePrimaryCtxRetain(void** context, int device);
extern int cuCtxPushCurrent_v2(void* context);
extern int cuMemAlloc_v2(pointer* memory, size_t size);
extern int cuMemFree_v2(pointer memory);
extern int cuMemcpyHtoD_v2(pointer to, const void* from, size_t size);
extern int cuMemcpyDtoH_v2(void* to, pointer from, size_t size);
extern int cuStreamCreate(void** stream, unsigned flags);
extern int cuStreamSynchronize(void* stream);

/* The library finds the driver by its path: the one that the test is linked with. */
static void use_linked_driver(void) {
  Dl_info driver;
  int (*const init)(unsigned) = &cuInit;
  const void* address;
  memcpy(&address, &init, sizeof address);
  CHECK(dladdr(address, &driver) != 0);
  setenv("UGDS_CUDA_LIBRARY", driver.dli_fname, 1);
}

#endif
