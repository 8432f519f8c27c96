/* SPDX-License-Identifier: Apache-2.0
 *
 * The cuFile-compatible library on GPU memory and streams, on the fake CUDA driver: the allocations are its own. */
#define _GNU_SOURCE
#include <errno.h>

#include "cuda_calls.h"
#include "cufile.h"

extern int cuMemAllocManaged(pointer* memory, size_t size, unsigned flags);

enum { SIZE = 1 << 20, FILE_SIZE = 4 << 20 };
static unsigned char back[SIZE];
static pointer memory, managed;
static void* stream;
static CUfileHandle_t fh;
static int fd;

static void* at(pointer address) { return (void*)(uintptr_t)address; }

static int gpu_has(pointer address, size_t offset, size_t size) {
  CHECK(cuMemcpyDtoH_v2(back, address, size) == 0);
  return are_of_file(back, offset, size);
}

static void forget(void) {
  memset(back, 0, SIZE);
  CHECK(cuMemcpyHtoD_v2(memory, back, SIZE) == 0);
}

static void moves_gpu_memory(void) {
  for (int registered = 0; registered < 2; ++registered) {
    forget();
    if (registered) CHECK(cuFileBufRegister(at(memory), SIZE, 0).err == CU_FILE_SUCCESS);
    CHECK(cuFileRead(fh, at(memory), SIZE, 0, 0) == SIZE && gpu_has(memory, 0, SIZE));
    CHECK(cuFileRead(fh, at(memory), 12345, 777, 4321) == 12345 && gpu_has(memory + 4321, 777, 12345));
    CHECK(cuFileRead(fh, at(memory + 9), 100, 5000, 1) == 100 && gpu_has(memory + 10, 5000, 100));
    CHECK(cuFileWrite(fh, at(memory), 100, 5000, 10) == 100);
    CHECK(cuFileRead(fh, at(memory), SIZE, 0, SIZE) == -CU_FILE_CUDA_POINTER_RANGE_ERROR);
    CHECK(cuFileRead(fh, at(memory), SIZE, 0, 1) == -CU_FILE_CUDA_POINTER_RANGE_ERROR);
    if (registered) {
      CHECK(cuFileBufRegister(at(memory), SIZE, 0).err == CU_FILE_MEMORY_ALREADY_REGISTERED);
      CHECK(cuFileBufDeregister(at(memory)).err == CU_FILE_SUCCESS);
    }
  }
  CHECK(cuFileRead(fh, at(memory), 4096, 0, SIZE - 100) == -CU_FILE_CUDA_POINTER_RANGE_ERROR);
  CHECK(cuFileBufRegister(at(memory), SIZE + 4096, 0).err == CU_FILE_CUDA_POINTER_RANGE_ERROR);
}

static void moves_managed_memory(void) {
  for (int registered = 0; registered < 2; ++registered) {
    memset(at(managed), 0, SIZE);
    if (registered) CHECK(cuFileBufRegister(at(managed), SIZE, 0).err == CU_FILE_SUCCESS);
    if (registered) CHECK(cuFileBufRegister(at(managed), SIZE, 0).err == CU_FILE_MEMORY_ALREADY_REGISTERED);
    CHECK(cuFileRead(fh, at(managed), 77777, 4096, 3) == 77777);
    CHECK(are_of_file((unsigned char*)at(managed) + 3, 4096, 77777));
    if (registered) CHECK(cuFileBufDeregister(at(managed)).err == CU_FILE_SUCCESS);
  }
}

struct call {
  size_t size;
  off_t file_offset, buffer_offset;
  ssize_t done;
};

static int read_async(void* base, struct call* c) {
  return cuFileReadAsync(fh, base, &c->size, &c->file_offset, &c->buffer_offset, &c->done, stream).err;
}
static int write_async(void* base, struct call* c) {
  return cuFileWriteAsync(fh, base, &c->size, &c->file_offset, &c->buffer_offset, &c->done, stream).err;
}

static void runs_in_stream_order(void* base) {
  forget();
  struct call first = {65536, 8192, 0, -7}, second = {65536, 1 << 20, 0, -7}, third = {65536, 1 << 20, 65536, -7};
  CHECK(read_async(base, &first) == CU_FILE_SUCCESS);
  CHECK(write_async(base, &second) == CU_FILE_SUCCESS);
  CHECK(read_async(base, &third) == CU_FILE_SUCCESS);
  CHECK(cuStreamSynchronize(stream) == 0);
  CHECK(first.done == 65536 && second.done == 65536 && third.done == 65536);
  CHECK(gpu_has(memory, 8192, 65536) && gpu_has(memory + 65536, 8192, 65536));
}

static void requests_are_in_stream_order(void) {
  runs_in_stream_order(at(memory)); /* neither is registered */
  CHECK(cuFileStreamRegister(stream, 16).err == CU_FILE_INVALID_VALUE);
  for (unsigned flags = 0; flags < 16; flags = flags * 2 + 1) {
    CHECK(cuFileStreamRegister(stream, flags).err == CU_FILE_SUCCESS);
    runs_in_stream_order(at(memory));
    CHECK(cuFileBufRegister(at(memory), SIZE, 0).err == CU_FILE_SUCCESS);
    runs_in_stream_order(at(memory));
    CHECK(cuFileBufDeregister(at(memory)).err == CU_FILE_SUCCESS);
    CHECK(cuFileStreamDeregister(stream).err == CU_FILE_SUCCESS);
  }
  CHECK(cuFileStreamDeregister((void*)0x1234).err == CU_FILE_INVALID_VALUE);
}

static void host_and_managed_memory_are_in_stream_order(void) {
  static unsigned char host[65536] __attribute__((aligned(4096)));
  struct call c = {4096, 12288, 8192, 0};
  CHECK(read_async(host, &c) == CU_FILE_SUCCESS && cuStreamSynchronize(stream) == 0);
  CHECK(c.done == 4096 && are_of_file(host + 8192, 12288, 4096));
  struct call again = {4096, 4096, 0, 0};
  CHECK(read_async(host, &again) == CU_FILE_SUCCESS && cuStreamSynchronize(stream) == 0);
  CHECK(again.done == 4096 && are_of_file(host, 4096, 4096));
  struct call m = {10000, 512, 100, 0};
  CHECK(read_async(at(managed), &m) == CU_FILE_SUCCESS && cuStreamSynchronize(stream) == 0);
  CHECK(m.done == 10000 && are_of_file((unsigned char*)at(managed) + 100, 512, 10000));
}

/* Where the request is bound late, it is told late. */
static void what_is_beyond_the_largest_file_is_in_no_other_file(void) {
  const int other_fd = make_file(65536);
  const CUfileHandle_t other = register_file(other_fd); /* 16 TiB further on the library's device */
  CHECK(cuFileBufRegister(at(memory), SIZE, 0).err == CU_FILE_SUCCESS);
  for (int fixed = 0; fixed < 2; ++fixed) {
    CHECK(cuFileStreamRegister(stream, fixed ? CU_FILE_STREAM_FIXED_FILE_OFFSET : 0).err == CU_FILE_SUCCESS);
    for (off_t offset = ((off_t)1 << 44) - 4096; offset <= (off_t)1 << 44; offset += 4096) {
      struct call c = {8192, offset, 0, 0};
      const int code = write_async(at(memory), &c);
      CHECK(fixed ? code == CU_FILE_INVALID_VALUE : code == CU_FILE_SUCCESS);
      CHECK(cuStreamSynchronize(stream) == 0 && (fixed || c.done < 0));
    }
    CHECK(cuFileStreamDeregister(stream).err == CU_FILE_SUCCESS);
  }
  unsigned char bytes[65536];
  CHECK(pread(other_fd, bytes, sizeof bytes, 0) == (ssize_t)sizeof bytes && are_of_file(bytes, 0, sizeof bytes));
  CHECK(cuFileBufDeregister(at(memory)).err == CU_FILE_SUCCESS);
  cuFileHandleDeregister(other);
  close(other_fd);
}

static void what_is_wrong_is_refused(void) {
  struct call c = {4096, 0, 0, 0};
  CHECK(cuFileReadAsync(NULL, at(memory), &c.size, &c.file_offset, &c.buffer_offset, &c.done, stream).err ==
        CU_FILE_INVALID_VALUE);
  CHECK(cuFileReadAsync(fh, NULL, &c.size, &c.file_offset, &c.buffer_offset, &c.done, stream).err ==
        CU_FILE_INVALID_VALUE);
  CHECK(cuFileReadAsync(fh, at(memory), NULL, &c.file_offset, &c.buffer_offset, &c.done, stream).err ==
        CU_FILE_INVALID_VALUE);
  CHECK(cuFileWriteAsync(fh, at(memory), &c.size, &c.file_offset, &c.buffer_offset, NULL, stream).err ==
        CU_FILE_INVALID_VALUE);
  CHECK(cuFileWriteAsync((void*)0x123456, at(memory), &c.size, &c.file_offset, &c.buffer_offset, &c.done, stream).err ==
        CU_FILE_HANDLE_NOT_REGISTERED);
}

static void statistics_know_the_gpu(void) {
  static CUfileStatsLevel3_t s;
  CHECK(cuFileSetStatsLevel(3).err == CU_FILE_SUCCESS && cuFileStatsStart().err == CU_FILE_SUCCESS);
  CHECK(cuFileBufRegister(at(memory), SIZE, 0).err == CU_FILE_SUCCESS);
  CHECK(cuFileRead(fh, at(memory), 8192, 0, 0) == 8192 && cuFileWrite(fh, at(memory), 512, 1, 0) == 512);
  struct call c = {4096, 0, 0, 0};
  CHECK(read_async(at(memory), &c) == CU_FILE_SUCCESS && cuStreamSynchronize(stream) == 0 && c.done == 4096);
  CHECK(cuFileBufDeregister(at(memory)).err == CU_FILE_SUCCESS);
  CHECK(cuFileGetStatsL3(&s).err == CU_FILE_SUCCESS && s.num_gpus == 2);
  const CUfilePerGpuStats_t* g = &s.per_gpu_stats[0];
  CHECK(g->n_total_reads == 2 && g->read_bytes == 8192 + 4096 && g->n_total_writes == 1 && g->writes_bytes == 512);
  CHECK(g->n_unaligned_writes == 1 && g->n_mmap == 1 && g->n_mmap_ok == 1 && g->n_mmap_free == 1);
  CHECK(g->reg_bytes == SIZE && memcmp(g->uuid, s.per_gpu_stats[1].uuid, sizeof g->uuid) != 0);
  CHECK(s.detailed.basic.read_ops.ok == 2 && s.detailed.basic.read_bytes == 8192 + 4096);
  CHECK(cuFileStatsStop().err == CU_FILE_SUCCESS);
}

int main(void) {
  use_linked_driver();
  unsetenv("CUFILE_ENV_PATH_JSON");
  void* context = NULL;
  CHECK(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxPushCurrent_v2(context) == 0);
  CHECK(cuMemAlloc_v2(&memory, SIZE) == 0 && cuMemAllocManaged(&managed, SIZE, 1) == 0);
  CHECK(cuStreamCreate(&stream, 0) == 0);
  fd = make_file(FILE_SIZE);
  fh = register_file(fd);
  moves_gpu_memory();
  moves_managed_memory();
  requests_are_in_stream_order();
  host_and_managed_memory_are_in_stream_order();
  what_is_beyond_the_largest_file_is_in_no_other_file();
  what_is_wrong_is_refused();
  statistics_know_the_gpu();
  cuFileHandleDeregister(fh);
  close(fd);
  CHECK(cuFileDriverClose().err == CU_FILE_SUCCESS);
  return checks_summary();
}
