/* SPDX-License-Identifier: Apache-2.0
 *
 * The cuFile-compatible library, as a program in C sees it: layouts, and each call but those of streams, which
 * cufile_stream.c has. */
#define _GNU_SOURCE
#include "cufile.h"

#include <errno.h>
#include <limits.h>
#include <sys/wait.h>

_Static_assert(sizeof(CUfileError_t) == 8, "error");
_Static_assert(sizeof(CUfileDescr_t) == 24 && offsetof(CUfileDescr_t, handle) == 8, "descriptor");
_Static_assert(offsetof(CUfileDescr_t, fs_ops) == 16, "descriptor");
_Static_assert(sizeof(CUfileDrvProps_t) == 56 && offsetof(CUfileDrvProps_t, fflags) == 32, "properties");
_Static_assert(offsetof(CUfileDrvProps_t, max_batch_io_size) == 48, "properties");
_Static_assert(sizeof(CUfileIOParams_t) == 64 && offsetof(CUfileIOParams_t, u.batch.file_offset) == 16, "parameters");
_Static_assert(offsetof(CUfileIOParams_t, u.batch.devPtr_offset) == 24, "parameters");
_Static_assert(offsetof(CUfileIOParams_t, u.batch.size) == 32 && offsetof(CUfileIOParams_t, fh) == 40, "parameters");
_Static_assert(offsetof(CUfileIOParams_t, opcode) == 48 && offsetof(CUfileIOParams_t, cookie) == 56, "parameters");
_Static_assert(sizeof(CUfileIOEvents_t) == 24 && offsetof(CUfileIOEvents_t, status) == 8, "events");
_Static_assert(offsetof(CUfileIOEvents_t, ret) == 16 && sizeof(CUfileIOVec_t) == 16, "events");
_Static_assert(sizeof(CUfileStatsLevel1_t) == 6 * 16 + 10 * 8 + 15 * 16 + 12 * 8, "statistics");
_Static_assert(sizeof(CUfileStatsLevel2_t) == sizeof(CUfileStatsLevel1_t) + 2 * 32 * 8, "statistics");
_Static_assert(sizeof(CUfilePerGpuStats_t) == 16 + 29 * 8, "statistics");
_Static_assert(offsetof(CUfileStatsLevel3_t, per_gpu_stats) == sizeof(CUfileStatsLevel2_t) + 8, "statistics");

enum { FILE_SIZE = 3 << 20 };
static unsigned char buffer[1 << 20] __attribute__((aligned(4096)));

static void opens_are_counted(void) {
  int version = 0;
  CHECK(cuFileGetVersion(&version).err == CU_FILE_SUCCESS && version == 1150);
  CHECK(cuFileGetVersion(NULL).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileUseCount() == 0 && cuFileDriverClose().err == CU_FILE_DRIVER_NOT_INITIALIZED);
  CHECK(cuFileDriverOpen().err == CU_FILE_SUCCESS && cuFileDriverOpen().err == CU_FILE_SUCCESS);
  CHECK(cuFileUseCount() == 2);
  CHECK(cuFileDriverClose().err == CU_FILE_SUCCESS && cuFileUseCount() == 1);
  CHECK(cuFileDriverClose_v2().err == CU_FILE_SUCCESS && cuFileUseCount() == 0);
  CHECK(cuFileDriverClose_v2().err == CU_FILE_DRIVER_NOT_INITIALIZED);
}

static void properties_are_told_and_set(void) {
  CUfileDrvProps_t p;
  CHECK(cuFileDriverSetMaxDirectIOSize(1024).err == CU_FILE_DRIVER_NOT_INITIALIZED);
  CHECK(cuFileDriverSetPollMode(true, 8).err == CU_FILE_DRIVER_NOT_INITIALIZED);
  CHECK(cuFileDriverGetProperties(NULL).err == CU_FILE_INVALID_VALUE && cuFileUseCount() == 0);
  CHECK(cuFileDriverGetProperties(&p).err == CU_FILE_SUCCESS && cuFileUseCount() == 1); /* opened by that */
  CHECK(p.nvfs.major_version == 0 && p.nvfs.minor_version == 0 && p.nvfs.poll_thresh_size == 4);
  CHECK(p.nvfs.max_direct_io_size == 16384 && p.max_device_cache_size == 131072 && p.per_buffer_cache_size == 1024);
  CHECK(p.max_device_pinned_mem_size == 33554432 && p.max_batch_io_size == 128 && p.max_batch_io_timeout_msecs == 5);
  CHECK(p.nvfs.dcontrolflags == 1u << CU_FILE_ALLOW_COMPAT_MODE && p.fflags == 0xe);
  CHECK(cuFileDriverSetPollMode(true, 1024).err == CU_FILE_SUCCESS);
  CHECK(cuFileDriverSetMaxDirectIOSize(1024).err == CU_FILE_SUCCESS);
  CHECK(cuFileDriverSetMaxCacheSize(2048).err == CU_FILE_SUCCESS);
  CHECK(cuFileDriverSetMaxPinnedMemSize(4096).err == CU_FILE_SUCCESS);
  CHECK(cuFileDriverGetProperties(&p).err == CU_FILE_SUCCESS);
  CHECK(p.nvfs.poll_thresh_size == 1024 && p.nvfs.max_direct_io_size == 1024 && p.max_device_cache_size == 2048);
  CHECK(p.max_device_pinned_mem_size == 4096 && p.nvfs.dcontrolflags == 3);
  CHECK(cuFileDriverSetPollMode(false, 3).err == CU_FILE_DRIVER_UNSUPPORTED_LIMIT);
  CHECK(cuFileDriverSetMaxDirectIOSize(60).err == CU_FILE_DRIVER_UNSUPPORTED_LIMIT);
  CHECK(cuFileDriverSetMaxDirectIOSize(16388).err == CU_FILE_DRIVER_UNSUPPORTED_LIMIT);
  CHECK(cuFileDriverSetMaxCacheSize(6).err == CU_FILE_DRIVER_UNSUPPORTED_LIMIT);
  CHECK(cuFileDriverSetMaxPinnedMemSize(0).err == CU_FILE_DRIVER_UNSUPPORTED_LIMIT);
  CHECK(cuFileDriverClose().err == CU_FILE_SUCCESS);
}

static void handles_are_checked(void) {
  const int fd = make_file(FILE_SIZE);
  CUfileHandle_t fh = NULL;
  CUfileDescr_t descr = {.type = CU_FILE_HANDLE_TYPE_OPAQUE_FD, .handle = {.fd = fd}};
  CHECK(cuFileHandleRegister(NULL, &descr).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileHandleRegister(&fh, NULL).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileHandleRegister(&fh, &descr).err == CU_FILE_SUCCESS && cuFileUseCount() == 1);
  CUfileHandle_t again = NULL;
  CHECK(cuFileHandleRegister(&again, &descr).err == CU_FILE_HANDLE_ALREADY_REGISTERED);
  cuFileHandleDeregister(fh);
  CHECK(cuFileRead(fh, buffer, 4096, 0, 0) == -CU_FILE_HANDLE_NOT_REGISTERED);
  cuFileHandleDeregister(fh); /* twice, and never registered: nothing happens */
  cuFileHandleDeregister(NULL);
  cuFileHandleDeregister((void*)0x1234);
  CHECK(cuFileRead((void*)0x123456, buffer, 4096, 0, 0) == -CU_FILE_HANDLE_NOT_REGISTERED);
  CHECK(cuFileHandleRegister(&again, &descr).err == CU_FILE_SUCCESS && again != fh);
  cuFileHandleDeregister(again);

  descr.handle.fd = -1;
  CHECK(cuFileHandleRegister(&fh, &descr).err == CU_FILE_INVALID_VALUE);
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  descr.handle.fd = ends[0];
  CHECK(cuFileHandleRegister(&fh, &descr).err == CU_FILE_INVALID_FILE_TYPE);
  descr.handle.fd = open(".", O_RDONLY | O_DIRECTORY);
  CHECK(cuFileHandleRegister(&fh, &descr).err == CU_FILE_INVALID_FILE_TYPE);
  close(descr.handle.fd);
  descr.handle.fd = fd;
  REQUIRE(fcntl(fd, F_SETFL, O_APPEND) == 0);
  CHECK(cuFileHandleRegister(&fh, &descr).err == CU_FILE_INVALID_FILE_OPEN_FLAG);
  REQUIRE(fcntl(fd, F_SETFL, 0) == 0);
  descr.type = CU_FILE_HANDLE_TYPE_USERSPACE_FS;
  CHECK(cuFileHandleRegister(&fh, &descr).err == CU_FILE_IO_NOT_SUPPORTED);
  descr.type = CU_FILE_HANDLE_TYPE_OPAQUE_WIN32;
  CHECK(cuFileHandleRegister(&fh, &descr).err == CU_FILE_IO_NOT_SUPPORTED);
  descr.type = 9;
  CHECK(cuFileHandleRegister(&fh, &descr).err == CU_FILE_INVALID_VALUE);
  close(fd);
  close(ends[0]);
  close(ends[1]);
}

static void buffers_are_checked(void) {
  CHECK(cuFileBufRegister(NULL, 4096, 0).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileBufRegister(buffer, 0, 0).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileBufRegister(buffer, 4096, 999).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileBufRegister(buffer, 4096, CU_FILE_RDMA_REGISTER).err == CU_FILE_SUCCESS);
  CHECK(cuFileBufRegister(buffer, 4096, 0).err == CU_FILE_MEMORY_ALREADY_REGISTERED);
  CHECK(cuFileBufRegister(buffer + 100, 8192, 0).err == CU_FILE_MEMORY_ALREADY_REGISTERED);
  CHECK(cuFileBufDeregister(NULL).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileBufDeregister(buffer + 1).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileBufDeregister(buffer).err == CU_FILE_SUCCESS);
  CHECK(cuFileBufDeregister(buffer).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileBufRegister(buffer, sizeof buffer, 0).err == CU_FILE_SUCCESS); /* closing the driver frees it */
  CHECK(cuFileDriverClose().err == CU_FILE_SUCCESS);
  CHECK(cuFileBufDeregister(buffer).err == CU_FILE_DRIVER_NOT_INITIALIZED);
  CHECK(cuFileBufRegister(buffer, sizeof buffer, 0).err == CU_FILE_SUCCESS);
  CHECK(cuFileBufDeregister(buffer).err == CU_FILE_SUCCESS);
}

/* Of any offset, size and address, registered or not. */
static void reads_and_writes_anything(void) {
  const int fd = make_file(FILE_SIZE);
  const CUfileHandle_t fh = register_file(fd);
  for (int registered = 0; registered < 2; ++registered) {
    if (registered) CHECK(cuFileBufRegister(buffer, sizeof buffer, 0).err == CU_FILE_SUCCESS);
    CHECK(cuFileRead(fh, buffer, 65536, 4096, 0) == 65536 && are_of_file(buffer, 4096, 65536));
    CHECK(cuFileRead(fh, buffer, 7777, 12345, 101) == 7777 && are_of_file(buffer + 101, 12345, 7777));
    CHECK(cuFileRead(fh, buffer + 3, 1, 1, 0) == 1 && buffer[3] == byte_at(1));
    CHECK(cuFileRead(fh, buffer, 0, 0, 0) == 0);
    for (int i = 0; i < 5000; ++i) buffer[i] = (unsigned char)(i * 7);
    CHECK(cuFileWrite(fh, buffer, 5000, 100001, 0) == 5000);
    unsigned char back[5002];
    CHECK(pread(fd, back, sizeof back, 100000) == (ssize_t)sizeof back && memcmp(back + 1, buffer, 5000) == 0);
    CHECK(back[0] == byte_at(100000) && back[5001] == byte_at(105001)); /* the neighbours */
    for (int i = 0; i < 5000; ++i) buffer[i] = byte_at(100001 + (size_t)i);
    CHECK(cuFileWrite(fh, buffer, 5000, 100001, 0) == 5000);
    if (registered) CHECK(cuFileBufDeregister(buffer).err == CU_FILE_SUCCESS);
  }
  /* More than the registration has. */
  CHECK(cuFileBufRegister(buffer, 4096, 0).err == CU_FILE_SUCCESS);
  CHECK(cuFileRead(fh, buffer, sizeof buffer, 512, 0) == sizeof buffer && are_of_file(buffer, 512, sizeof buffer));
  CHECK(cuFileBufDeregister(buffer).err == CU_FILE_SUCCESS);

  CHECK(cuFileRead(NULL, buffer, 1, 0, 0) == -CU_FILE_INVALID_VALUE);
  CHECK(cuFileRead(fh, NULL, 1, 0, 0) == -CU_FILE_INVALID_VALUE);
  CHECK(cuFileRead(fh, buffer, 1, -1, 0) == -CU_FILE_INVALID_VALUE);
  CHECK(cuFileWrite(fh, buffer, 1, 0, -1) == -CU_FILE_INVALID_VALUE);
  CHECK(cuFileWrite(fh, buffer, SIZE_MAX, 0, 0) == -CU_FILE_INVALID_VALUE);
  CHECK(cuFileWrite(fh, (void*)(UINTPTR_MAX - 10), 100, 0, 0) == -CU_FILE_INVALID_VALUE);

  CUfileIOVec_t vector[3] = {{buffer, 1000}, {buffer + 1000, 0}, {buffer + 5000, 3000}};
  CHECK(cuFileReadv(fh, vector, 3, 777, 0) == 4000 && are_of_file(buffer, 777, 1000));
  CHECK(are_of_file(buffer + 5000, 1777, 3000) && cuFileWritev(fh, vector, 3, 777, 0) == 4000);
  CHECK(cuFileReadv(fh, vector, 3, 777, 1) == -CU_FILE_INVALID_VALUE);
  CHECK(cuFileReadv(fh, NULL, 1, 777, 0) == -CU_FILE_INVALID_VALUE && cuFileReadv(fh, NULL, 0, 777, 0) == 0);
  cuFileHandleDeregister(fh);
  close(fd);
}

static CUfileIOParams_t request(CUfileHandle_t fh, int opcode, size_t at, size_t size) {
  CUfileIOParams_t p = {.mode = CUFILE_BATCH, .fh = fh, .opcode = opcode, .cookie = (void*)(at + 1)};
  p.u.batch.devPtr_base = buffer;
  p.u.batch.file_offset = (off_t)at;
  p.u.batch.devPtr_offset = (off_t)at;
  p.u.batch.size = size;
  return p;
}

static void batches_are_of_any_file(void) {
  enum { COUNT = 128, PIECE = 8192 };
  const int fds[2] = {make_file(FILE_SIZE), make_file(FILE_SIZE)};
  const CUfileHandle_t files[2] = {register_file(fds[0]), register_file(fds[1])};
  CUfileBatchHandle_t batch = NULL;
  CHECK(cuFileBatchIOSetUp(NULL, 1).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileBatchIOSetUp(&batch, 0).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileBatchIOSetUp(&batch, 129).err == CU_FILE_INVALID_VALUE); /* properties.io_batchsize */
  REQUIRE(cuFileBatchIOSetUp(&batch, COUNT).err == CU_FILE_SUCCESS);
  static CUfileIOParams_t params[COUNT + 1];
  static CUfileIOEvents_t events[COUNT];
  for (size_t i = 0; i <= COUNT; ++i) params[i] = request(files[i % 2], CUFILE_READ, i * PIECE % (1 << 20), PIECE);
  memset(buffer, 0, sizeof buffer);
  CHECK(cuFileBatchIOSubmit(batch, COUNT + 1, params, 0).err == CU_FILE_BATCH_FULL);
  CHECK(cuFileBatchIOSubmit(batch, COUNT, params, 1).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileBatchIOSubmit(batch, 0, params, 0).err == CU_FILE_INVALID_VALUE);
  REQUIRE(cuFileBatchIOSubmit(batch, COUNT, params, 0).err == CU_FILE_SUCCESS);
  unsigned seen = 0;
  unsigned char told[COUNT] = {0};
  while (seen < COUNT) {
    unsigned nr = 50;
    struct timespec limit = {10, 0};
    const unsigned least = COUNT - seen < 10 ? COUNT - seen : 10;
    REQUIRE(cuFileBatchIOGetStatus(batch, 10, &nr, events, &limit).err == CU_FILE_SUCCESS);
    REQUIRE(nr >= least && nr <= 50);
    for (unsigned i = 0; i < nr; ++i) {
      CHECK(events[i].status == CUFILE_COMPLETE && events[i].ret == PIECE);
      ++told[((size_t)events[i].cookie - 1) / PIECE];
    }
    seen += nr;
  }
  for (unsigned i = 0; i < COUNT; ++i) CHECK(told[i] == 1);
  CHECK(are_of_file(buffer, 0, sizeof buffer));
  unsigned nr = COUNT;
  CHECK(cuFileBatchIOGetStatus(batch, COUNT, &nr, events, NULL).err == CU_FILE_SUCCESS && nr == 0);

  /* What is wrong with one leaves nothing submitted. */
  params[1].opcode = 7;
  CHECK(cuFileBatchIOSubmit(batch, 2, params, 0).err == CU_FILE_INVALID_VALUE);
  params[1] = request((void*)0x123456, CUFILE_READ, 0, 1);
  CHECK(cuFileBatchIOSubmit(batch, 2, params, 0).err == CU_FILE_HANDLE_NOT_REGISTERED);
  params[1] = request(files[0], CUFILE_READ, 0, SIZE_MAX); /* and this is found out when it runs */
  CHECK(cuFileBatchIOSubmit(batch, 2, params, 0).err == CU_FILE_SUCCESS);
  nr = 2;
  CHECK(cuFileBatchIOGetStatus(batch, 2, &nr, events, NULL).err == CU_FILE_SUCCESS && nr == 2);
  const int bad = events[0].status == CUFILE_FAILED ? 0 : 1;
  CHECK(events[bad].status == CUFILE_FAILED && (ssize_t)events[bad].ret == -CU_FILE_INVALID_VALUE);
  CHECK(events[1 - bad].status == CUFILE_COMPLETE);

  for (size_t i = 0; i < COUNT; ++i) params[i] = request(files[i % 2], CUFILE_WRITE, i * PIECE % (1 << 20), PIECE);
  CHECK(cuFileBatchIOSubmit(batch, COUNT, params, 0).err == CU_FILE_SUCCESS);
  CHECK(cuFileBatchIOCancel(batch).err == CU_FILE_SUCCESS);
  nr = COUNT;
  CHECK(cuFileBatchIOGetStatus(batch, COUNT, &nr, events, NULL).err == CU_FILE_SUCCESS && nr == COUNT);
  for (unsigned i = 0; i < COUNT; ++i)
    CHECK((events[i].status == CUFILE_COMPLETE && events[i].ret == PIECE) ||
          (events[i].status == CUFILE_CANCELED && (ssize_t)events[i].ret == -ECANCELED));
  CHECK(cuFileBatchIOSubmit(batch, 4, params, 0).err == CU_FILE_SUCCESS);
  cuFileBatchIODestroy(batch); /* waits for what runs */
  CHECK(cuFileBatchIOSubmit(batch, 1, params, 0).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileBatchIOGetStatus(batch, 0, &nr, events, NULL).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileBatchIOGetStatus(batch, 0, NULL, events, NULL).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileBatchIOCancel(batch).err == CU_FILE_INVALID_VALUE);
  cuFileBatchIODestroy(batch);
  for (int i = 0; i < 2; ++i) {
    cuFileHandleDeregister(files[i]);
    close(fds[i]);
  }
}

static void what_there_is_none_of_is_refused(void) {
  int flags = 1;
  size_t kb = 0;
  CHECK(cuFileDriverGetP2PFlags(CU_FILE_NVME_SUPPORTED, &flags).err == CU_FILE_SUCCESS && flags == 0);
  CHECK(cuFileDriverGetP2PFlags(CU_FILE_NVME_SUPPORTED, NULL).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileDriverSetP2PFlags(CU_FILE_NVME_SUPPORTED, 1).err == CU_FILE_PLATFORM_NOT_SUPPORTED);
  CHECK(cuFileExportPCIeTopology("topology").err == CU_FILE_PLATFORM_NOT_SUPPORTED);
  CHECK(cuFileGetBARSizeInKB(-1, &kb).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileGetBARSizeInKB(0, NULL).err == CU_FILE_INVALID_VALUE);
  CHECK(cuFileGetBARSizeInKB(1000, &kb).err == CU_FILE_INVALID_VALUE);
}

/* A child has nothing of its parent's, and may begin anew. */
static void a_child_begins_anew(void) {
  const int fd = make_file(FILE_SIZE);
  const CUfileHandle_t fh = register_file(fd);
  CHECK(cuFileRead(fh, buffer, 4096, 0, 0) == 4096);
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    int bad = cuFileRead(fh, buffer, 4096, 0, 0) != -CU_FILE_HANDLE_NOT_REGISTERED;
    const CUfileHandle_t mine = register_file(fd);
    memset(buffer, 0, 4096);
    bad |= cuFileRead(mine, buffer, 4096, 8192, 0) != 4096 || !are_of_file(buffer, 8192, 4096);
    _exit(bad);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK(cuFileRead(fh, buffer, 4096, 0, 0) == 4096);
  cuFileHandleDeregister(fh);
  close(fd);
}

int main(void) {
  unsetenv("CUFILE_ENV_PATH_JSON");
  opens_are_counted();
  properties_are_told_and_set();
  handles_are_checked();
  buffers_are_checked();
  reads_and_writes_anything();
  batches_are_of_any_file();
  what_there_is_none_of_is_refused();
  a_child_begins_anew();
  CHECK(cuFileDriverClose().err == CU_FILE_SUCCESS && cuFileUseCount() == 0);
  return checks_summary();
}
