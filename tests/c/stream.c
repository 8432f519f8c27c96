/* SPDX-License-Identifier: Apache-2.0
 *
 * GPU memory and streams by the C API, on the fake CUDA driver: the allocations are its own. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "cuda_calls.h"
#include "ugds.h"

static int error_says(const char* words) {
  char text[512];
  uGDSGetLastError(text, sizeof text);
  return strstr(text, words) != NULL;
}

enum { SIZE = 1 << 20 };
static unsigned char there[SIZE], back[SIZE];
static uGDSHandle_t fh;
static pointer memory;
static void* buffer;

static void fill(unsigned seed) {
  for (unsigned i = 0; i < SIZE; ++i) there[i] = (unsigned char)((i + seed) * 2654435761u >> 13);
  CHECK(cuMemcpyHtoD_v2(memory, there, SIZE) == 0);
}

static int is_there(void) {
  CHECK(cuMemcpyDtoH_v2(back, memory, SIZE) == 0);
  return memcmp(there, back, SIZE) == 0;
}

static void forget(void) {
  memset(back, 0, SIZE);
  CHECK(cuMemcpyHtoD_v2(memory, back, SIZE) == 0);
}

static void moves_registered_memory(void) {
  fill(1);
  CHECK(uGDSBufRegister(buffer, SIZE, 0).err == UGDS_SUCCESS);
  CHECK(uGDSBufRegister(buffer, SIZE, 0).err == UGDS_MEMORY_ALREADY_REGISTERED);
  CHECK(uGDSWrite(fh, buffer, SIZE, 0, 0) == SIZE);
  forget();
  CHECK(uGDSRead(fh, buffer, SIZE / 2, 0, 0) == SIZE / 2);
  CHECK(uGDSRead(fh, (char*)buffer + SIZE / 2, SIZE / 2, SIZE / 2, 0) == SIZE / 2);
  CHECK(is_there());
  uGDSDmabufExport_t exported = {-1, 0, 0};
  CHECK(uGDSExportDmabuf(buffer, &exported).err == UGDS_SUCCESS);
  CHECK(exported.fd >= 0 && exported.length == SIZE);
  int pd = 0;
  uGDSRDMARegion_t region;
  CHECK(uGDSRDMARegister(buffer, &pd, 1, &region).err == UGDS_IO_NOT_SUPPORTED);
  CHECK(uGDSBufDeregister(buffer).err == UGDS_SUCCESS);
  CHECK(uGDSExportDmabuf(buffer, &exported).err == UGDS_MEMORY_NOT_REGISTERED);
}

static void moves_unregistered_memory_of_whole_pages(void) {
  fill(2);
  CHECK(uGDSWrite(fh, buffer, SIZE, 0, 0) == SIZE);
  forget();
  CHECK(uGDSRead(fh, buffer, SIZE - 65536, 65536, 65536) == SIZE - 65536);
  CHECK(uGDSRead(fh, buffer, 65536, 0, 0) == 65536);
  CHECK(is_there());
  CHECK(uGDSRead(fh, (char*)buffer + 4096, 4096, 0, 0) == -EINVAL && error_says("not registered"));
  CHECK(uGDSBufDeregister(buffer).err == UGDS_MEMORY_NOT_REGISTERED);
}

static void reads_late_values_in_stream_order(void) {
  void* stream = NULL;
  CHECK(cuStreamCreate(&stream, 1) == 0);
  CHECK(uGDSStreamDeregister(stream).err == UGDS_INVALID_VALUE);
  CHECK(uGDSStreamRegister(stream).err == UGDS_SUCCESS);
  fill(3);
  static size_t size = SIZE;
  static off_t at = 0, in = 0;
  static ssize_t done = -1;
  CHECK(uGDSReadAsync(fh, buffer, &size, &at, &in, &done, stream).err == UGDS_MEMORY_NOT_REGISTERED);
  CHECK(uGDSBufRegister(buffer, SIZE, 0).err == UGDS_SUCCESS);
  CHECK(uGDSWriteAsync(fh, buffer, &size, &at, &in, &done, stream).err == UGDS_SUCCESS);
  CHECK(cuStreamSynchronize(stream) == 0 && done == SIZE);
  forget();
  static size_t half = SIZE / 2;
  static ssize_t first = -1, second = -1, wrong = -1;
  static off_t bad = -4096;
  CHECK(uGDSReadAsync(fh, buffer, &half, &at, &in, &first, stream).err == UGDS_SUCCESS);
  static off_t middle = SIZE / 2;
  CHECK(uGDSReadAsync(fh, (char*)buffer + SIZE / 2, &half, &middle, &in, &second, stream).err == UGDS_SUCCESS);
  CHECK(uGDSReadAsync(fh, buffer, &half, &bad, &in, &wrong, stream).err == UGDS_SUCCESS);
  static ssize_t before = 0;
  CHECK(uGDSReadAsync(fh, (char*)buffer + SIZE / 2, &half, &at, &bad, &before, stream).err == UGDS_SUCCESS);
  /* The first of two errors, once, and that there was another. */
  CHECK(uGDSStreamDeregister(stream).err == UGDS_INVALID_VALUE);
  CHECK(error_says("read on emulated:64MiB") && error_says("beyond the device") && error_says("that failed: 1"));
  CHECK(uGDSStreamDeregister(stream).err == UGDS_SUCCESS);
  CHECK(before == -EINVAL);
  CHECK(first == SIZE / 2 && second == SIZE / 2 && wrong < 0);
  CHECK(is_there());
  CHECK(uGDSReadAsync(fh, buffer, NULL, &at, &in, &done, stream).err == UGDS_INVALID_VALUE);
  CHECK(uGDSBufDeregister(buffer).err == UGDS_SUCCESS);
}

int main(void) {
  use_linked_driver();
  setenv("UGDS_IBVERBS_LIBRARY", "/nowhere", 1); /* a real one would believe the protection domain */
  void* context = NULL;
  CHECK(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxPushCurrent_v2(context) == 0);
  CHECK(cuMemAlloc_v2(&memory, SIZE) == 0);
  buffer = (void*)(uintptr_t)memory;

  CHECK(uGDSDriverOpen().err == UGDS_SUCCESS);
  uGDSDescr_t descr = {.type = UGDS_HANDLE_TYPE_USERSPACE_FS, .handle.handle = "emulated:64MiB"};
  CHECK(uGDSHandleRegister(&fh, &descr).err == UGDS_SUCCESS);
  moves_registered_memory();
  moves_unregistered_memory_of_whole_pages();
  reads_late_values_in_stream_order();
  CHECK(uGDSHandleDeregisterEx(fh, 1).err == UGDS_SUCCESS);
  CHECK(uGDSDriverClose().err == UGDS_SUCCESS);
  CHECK(cuMemFree_v2(memory) == 0);
  return checks_summary();
}
