/* SPDX-License-Identifier: Apache-2.0 */
/* Batches and vectored calls as a C program uses them. */
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>

#include "check.h"
#include "device.h"
#include "ugds.h"

enum { kRequests = 128, kSize = 4096 };

static unsigned char out[kRequests * kSize] __attribute__((aligned(4096)));
static unsigned char in[kRequests * kSize] __attribute__((aligned(4096)));

static int error_says(const char* words) {
  char text[1024];
  return uGDSGetLastError(text, sizeof text) != 0 && strstr(text, words) != NULL;
}

static void fill(uGDSIOParams_t* params, int opcode, void* base, int count) {
  for (int i = 0; i < count; ++i) {
    params[i] = (uGDSIOParams_t){.base = base,
                                 .file_offset = (off_t)i * kSize,
                                 .buf_offset = (off_t)i * kSize,
                                 .size = kSize,
                                 .opcode = opcode,
                                 .cookie = (void*)(uintptr_t)i};
  }
}

static void run(uGDSBatchHandle_t batch, uGDSIOParams_t* params, unsigned count) {
  uGDSIOEvents_t events[kRequests];
  unsigned seen[kRequests] = {0}, left = count;
  CHECK(uGDSBatchIOSubmit(batch, count, params, 0).err == UGDS_SUCCESS);
  while (left != 0) {
    unsigned nr = 50;
    CHECK(uGDSBatchIOGetStatus(batch, 1, &nr, events, NULL).err == UGDS_SUCCESS);
    CHECK(nr >= 1 && nr <= 50);
    for (unsigned i = 0; i < nr; ++i) {
      CHECK(events[i].status == UGDS_BATCH_COMPLETE);
      CHECK(events[i].ret == (ssize_t)params[(uintptr_t)events[i].cookie].size);
      CHECK(seen[(uintptr_t)events[i].cookie]++ == 0);
    }
    left -= nr;
  }
}

static void test_a_batch_writes_and_reads(void) {
  uGDSIOParams_t params[kRequests];
  uGDSBatchHandle_t batch = NULL;
  uGDSHandle_t fh = open_device("emulated:16MiB?order=random");
  CHECK(uGDSBufRegister(out, sizeof out, 0).err == UGDS_SUCCESS);
  CHECK(uGDSBufRegister(in, sizeof in, 0).err == UGDS_SUCCESS);
  for (size_t i = 0; i < sizeof out; ++i) out[i] = (unsigned char)(i * 7 + i / 4096);
  CHECK(uGDSBatchIOSetUp(&batch, fh, kRequests).err == UGDS_SUCCESS);
  fill(params, 1, out, kRequests);
  run(batch, params, kRequests);
  memset(in, 0, sizeof in);
  fill(params, 0, in, kRequests);
  /* Interior pointers, with and without an offset. */
  for (int i = 0; i < kRequests; i += 2) params[i].base = in + params[i].buf_offset, params[i].buf_offset = 0;
  run(batch, params, kRequests);
  CHECK(memcmp(in, out, sizeof in) == 0);
  uGDSBatchIODestroy(batch);
  uGDSHandleDeregister(fh);
  CHECK(uGDSBufDeregister(in).err == UGDS_SUCCESS);
  CHECK(uGDSBufDeregister(out).err == UGDS_SUCCESS);
}

static void test_refusals(void) {
  uGDSIOParams_t params[8], bad;
  uGDSIOEvents_t events[8];
  uGDSBatchHandle_t batch = NULL, other = NULL;
  struct timespec none = {0, 0}, wrong = {0, 2000000000};
  unsigned nr = 0;
  uGDSHandle_t fh = open_device("emulated:1MiB");
  CHECK(uGDSBufRegister(in, sizeof in, 0).err == UGDS_SUCCESS);
  CHECK(uGDSBatchIOSetUp(NULL, fh, 4).err == UGDS_INVALID_VALUE);
  CHECK(uGDSBatchIOSetUp(&batch, NULL, 4).err == UGDS_HANDLE_NOT_REGISTERED);
  CHECK(uGDSBatchIOSetUp(&batch, fh, 0).err == UGDS_INVALID_VALUE);
  CHECK(uGDSBatchIOSetUp(&batch, (uGDSHandle_t)12345, 4).err == UGDS_HANDLE_NOT_REGISTERED);
  CHECK(uGDSBatchIOSetUp(&batch, fh, 4).err == UGDS_SUCCESS);
  memset(params, 0, sizeof params);
  CHECK(uGDSBatchIOSubmit(NULL, 1, params, 0).err == UGDS_INVALID_VALUE);
  CHECK(uGDSBatchIOSubmit(batch, 1, NULL, 0).err == UGDS_INVALID_VALUE);
  CHECK(uGDSBatchIOSubmit(batch, 0, params, 0).err == UGDS_INVALID_VALUE);
  CHECK(uGDSBatchIOSubmit(batch, 5, params, 0).err == UGDS_BATCH_CAPACITY_EXCEEDED);
  fill(params, 0, in, 5);
  CHECK(uGDSBatchIOSubmit(batch, 5, params, 0).err == UGDS_BATCH_CAPACITY_EXCEEDED);
  CHECK(uGDSBatchIOSubmit(batch, 1, params, 1).err == UGDS_INVALID_VALUE);
  CHECK(uGDSBatchIOGetStatus(NULL, 0, &nr, events, NULL).err == UGDS_INVALID_VALUE);
  CHECK(uGDSBatchIOGetStatus(batch, 0, NULL, events, NULL).err == UGDS_INVALID_VALUE);
  CHECK(uGDSBatchIOGetStatus(batch, 0, &nr, NULL, NULL).err == UGDS_INVALID_VALUE);
  CHECK(uGDSBatchIOGetStatus(batch, 0, &nr, events, &wrong).err == UGDS_INVALID_VALUE);
  /* A malformed request leaves nothing submitted, wherever it stands. */
  for (int what = 0; what < 5; ++what) {
    fill(params, 0, in, 4);
    bad = params[3];
    if (what == 0) bad.base = NULL;
    if (what == 1) bad.size = 0;
    if (what == 2) bad.file_offset = -4096;
    if (what == 3) bad.size = 100;
    if (what == 4) bad.opcode = 2;
    params[3] = bad;
    CHECK(uGDSBatchIOSubmit(batch, 4, params, 0).err == UGDS_INVALID_VALUE);
    CHECK(error_says("request 3"));
    nr = 8;
    CHECK(uGDSBatchIOGetStatus(batch, 0, &nr, events, &none).err == UGDS_SUCCESS && nr == 0);
  }
  /* What depends on the device or on registrations is told by its event. */
  fill(params, 0, in, 4);
  params[1].base = out;
  params[2].file_offset = 1 << 20;
  params[3].buf_offset = sizeof in - 100;
  CHECK(uGDSBatchIOSubmit(batch, 4, params, 0).err == UGDS_SUCCESS);
  nr = 0;
  CHECK(uGDSBatchIOGetStatus(batch, 4, &nr, events, NULL).err == UGDS_SUCCESS && nr == 4);
  for (unsigned i = 0; i < nr; ++i) {
    const uintptr_t cookie = (uintptr_t)events[i].cookie;
    CHECK(events[i].status == (cookie == 0 ? UGDS_BATCH_COMPLETE : UGDS_BATCH_FAILED));
    CHECK(events[i].ret == (cookie == 0 ? kSize : cookie == 2 ? -ERANGE : -EINVAL));
  }
  CHECK(error_says("read on emulated:1MiB"));
  /* Asking for more than can come does not wait. */
  nr = 8;
  CHECK(uGDSBatchIOGetStatus(batch, 8, &nr, events, NULL).err == UGDS_SUCCESS && nr == 0);
  /* A destroyed batch, and one of a closed handle, find nothing. */
  CHECK(uGDSBatchIOSetUp(&other, fh, 4).err == UGDS_SUCCESS);
  uGDSBatchIODestroy(other);
  uGDSBatchIODestroy(other);
  uGDSBatchIODestroy(NULL);
  CHECK(uGDSBatchIOSubmit(other, 1, params, 0).err == UGDS_INVALID_VALUE && error_says("destroyed"));
  uGDSHandleDeregister(fh);
  CHECK(uGDSBatchIOSubmit(batch, 1, params, 0).err == UGDS_HANDLE_NOT_REGISTERED);
  uGDSBatchIODestroy(batch);
  CHECK(uGDSBufDeregister(in).err == UGDS_SUCCESS);
}

static void test_time_out_of_status(void) {
  uGDSIOParams_t params[2];
  uGDSIOEvents_t events[2];
  struct timespec limit = {0, 5000000}, before, after;
  unsigned nr = 2;
  uGDSBatchHandle_t batch = NULL;
  uGDSHandle_t fh = open_device("emulated:1MiB?latency=200ms");
  CHECK(uGDSBufRegister(in, sizeof in, 0).err == UGDS_SUCCESS);
  CHECK(uGDSBatchIOSetUp(&batch, fh, 2).err == UGDS_SUCCESS);
  fill(params, 0, in, 2);
  CHECK(uGDSBatchIOSubmit(batch, 2, params, 0).err == UGDS_SUCCESS);
  CHECK(uGDSBufDeregister(in).err == UGDS_BUSY);
  CHECK(uGDSHandleDeregisterEx(fh, 0).err == UGDS_BUSY);
  clock_gettime(CLOCK_MONOTONIC, &before);
  CHECK(uGDSBatchIOGetStatus(batch, 2, &nr, events, &limit).err == UGDS_SUCCESS && nr == 0);
  clock_gettime(CLOCK_MONOTONIC, &after);
  CHECK((after.tv_sec - before.tv_sec) * 1000000000LL + after.tv_nsec - before.tv_nsec >= 5000000);
  /* Destroying waits: afterwards the memory is free. */
  uGDSBatchIODestroy(batch);
  CHECK(uGDSBufDeregister(in).err == UGDS_SUCCESS);
  uGDSHandleDeregister(fh);
}

static void test_vectored(void) {
  struct iovec pieces[4];
  uGDSHandle_t fh = open_device("emulated:16MiB?mdts=2&order=random");
  CHECK(uGDSBufRegister(out, sizeof out, 0).err == UGDS_SUCCESS);
  CHECK(uGDSBufRegister(in, sizeof in, 0).err == UGDS_SUCCESS);
  memset(in, 0, sizeof in);
  /* Out of order in memory, in order on the device. */
  pieces[0] = (struct iovec){out + 40 * kSize, 9 * kSize};
  pieces[1] = (struct iovec){out, kSize};
  pieces[2] = (struct iovec){out + 20 * kSize, 0};
  pieces[3] = (struct iovec){out + 3 * kSize, 17 * kSize};
  CHECK(uGDSWritev(fh, pieces, 4, 1 << 20) == 27 * kSize);
  CHECK(uGDSRead(fh, in, 27 * kSize, 1 << 20, 0) == 27 * kSize);
  CHECK(memcmp(in, out + 40 * kSize, 9 * kSize) == 0);
  CHECK(memcmp(in + 9 * kSize, out, kSize) == 0);
  CHECK(memcmp(in + 10 * kSize, out + 3 * kSize, 17 * kSize) == 0);
  memset(in, 0, sizeof in);
  pieces[0] = (struct iovec){in + 50 * kSize, 2 * kSize};
  pieces[1] = (struct iovec){in + 10 * kSize, 25 * kSize};
  CHECK(uGDSReadv(fh, pieces, 2, 1 << 20) == 27 * kSize);
  CHECK(memcmp(in + 50 * kSize, out + 40 * kSize, 2 * kSize) == 0);
  CHECK(memcmp(in + 10 * kSize, out + 42 * kSize, 7 * kSize) == 0);
  CHECK(memcmp(in + 17 * kSize, out, kSize) == 0);
  CHECK(uGDSReadv(fh, pieces, 0, 0) == -EINVAL && uGDSReadv(fh, NULL, 1, 0) == -EINVAL);
  CHECK(uGDSReadv(fh, pieces, 2, 100) == -EINVAL && uGDSReadv(fh, pieces, 2, 16 << 20) == -ERANGE);
  pieces[1].iov_len = 100;
  CHECK(uGDSReadv(fh, pieces, 2, 0) == -EINVAL && error_says("block size"));
  pieces[1] = (struct iovec){pieces, kSize};
  CHECK(uGDSReadv(fh, pieces, 2, 0) == -EINVAL && error_says("not registered"));
  uGDSHandleDeregister(fh);
  CHECK(uGDSReadv(fh, pieces, 1, 0) == -EBADF);
  CHECK(uGDSBufDeregister(in).err == UGDS_SUCCESS);
  CHECK(uGDSBufDeregister(out).err == UGDS_SUCCESS);
}

int main(void) {
  CHECK(uGDSDriverOpen().err == UGDS_SUCCESS);
  test_a_batch_writes_and_reads();
  test_refusals();
  test_time_out_of_status();
  test_vectored();
  CHECK(uGDSDriverClose().err == UGDS_SUCCESS);
  return checks_summary();
}
