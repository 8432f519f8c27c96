/* SPDX-License-Identifier: Apache-2.0 */
/* What the C API says of things that are released in the wrong order, and in a child of a fork. */
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "device.h"
#include "ugds.h"

static unsigned char buffer[65536] __attribute__((aligned(4096)));

static int error_says(const char* words) {
  char text[1024];
  const int said = uGDSGetLastError(text, sizeof text) != 0 && strstr(text, words) != NULL;
  if (!said) fprintf(stderr, "not \"%s\": %s\n", words, text);
  return said;
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

struct reading {
  uGDSHandle_t fh;
  ssize_t result;
};

static void* read_once(void* argument) {
  struct reading* reading = argument;
  do { /* while start_reading() has the buffer deregistered, there is nothing to read into */
    reading->result = uGDSRead(reading->fh, buffer, 4096, 0, 0);
  } while (reading->result == -EINVAL || reading->result == -ESTALE);
  return NULL;
}

/* Until the read is at the device: until its buffer cannot be released any more. */
static pthread_t start_reading(struct reading* reading) {
  pthread_t thread;
  CHECK(uGDSBufRegister(buffer, sizeof buffer, 0).err == UGDS_SUCCESS);
  REQUIRE(pthread_create(&thread, NULL, read_once, reading) == 0);
  while (uGDSBufDeregister(buffer).err != UGDS_BUSY) {
    /* It was not there yet: it goes on when there is a buffer again. */
    uGDSBufRegister(buffer, sizeof buffer, 0);
    const struct timespec nap = {0, 1000000};
    nanosleep(&nap, NULL);
  }
  return thread;
}

/* 0 looks, above 0 waits for so long, -1 for ever, and below that is by force. */
static void test_four_ways_to_deregister(void) {
  for (int round = 0; round < 3; ++round) {
    struct reading reading = {open_device("emulated:1MiB?latency=1500ms&queues=1"), 0};
    const pthread_t thread = start_reading(&reading);
    const double start = seconds();
    CHECK(error_says("in flight on the buffer: 1 command on queue 1 of emulated:1MiB"));
    CHECK(uGDSHandleDeregisterEx(reading.fh, 0).err == UGDS_BUSY);
    CHECK(error_says("1 call is running; 1 command is in flight on queue 1"));
    CHECK(seconds() - start < 1);
    CHECK(uGDSDriverClose().err == UGDS_BUSY);
    CHECK(error_says("emulated:1MiB?latency=1500ms&queues=1: 1 call is running"));
    CHECK(error_says("the buffer at "));
    if (round == 0) {
      CHECK(uGDSHandleDeregisterEx(reading.fh, 1).err == UGDS_BUSY); /* and nothing has changed */
      CHECK(seconds() - start > 0.9);
      CHECK(error_says("1 call is running"));
    }
    if (round == 2) { /* force is for a device that is wedged: nobody is inside of that for long */
      CHECK(uGDSHandleDeregisterEx(reading.fh, -2).err == UGDS_BUSY);
      CHECK(error_says("1 call is running"));
      pthread_join(thread, NULL);
    }
    CHECK(uGDSHandleDeregisterEx(reading.fh, round == 0 ? 30 : round == 1 ? -1 : -2).err == UGDS_SUCCESS);
    if (round != 2) pthread_join(thread, NULL);
    CHECK(reading.result == 4096);
    CHECK(uGDSHandleDeregisterEx(reading.fh, 0).err == UGDS_HANDLE_NOT_REGISTERED);
    CHECK(error_says("closed"));
    CHECK(uGDSRead(reading.fh, buffer, 4096, 0, 0) == -EBADF);
    CHECK(uGDSBufDeregister(buffer).err == UGDS_SUCCESS);
  }
}

static void test_a_batch_that_holds_a_device_is_named(void) {
  uGDSHandle_t fh = open_device("emulated:1MiB?latency=500ms&queues=2");
  uGDSBatchHandle_t batch = NULL;
  uGDSIOParams_t params[3];
  uGDSIOEvents_t events[3];
  unsigned count = 3;
  CHECK(uGDSBufRegister(buffer, sizeof buffer, 0).err == UGDS_SUCCESS);
  CHECK(uGDSBatchIOSetUp(&batch, fh, 8).err == UGDS_SUCCESS);
  for (int i = 0; i < 3; ++i) params[i] = (uGDSIOParams_t){buffer, 0, i * 4096, 4096, 0, NULL};
  CHECK(uGDSBatchIOSubmit(batch, 3, params, 0).err == UGDS_SUCCESS);
  CHECK(uGDSHandleDeregisterEx(fh, 0).err == UGDS_BUSY);
  CHECK(error_says("3 commands are in flight on queue 2; 3 requests of batch 0 are not collected"));
  CHECK(uGDSBufDeregister(buffer).err == UGDS_BUSY);
  CHECK(error_says("3 commands on queue 2 of emulated:1MiB"));
  CHECK(uGDSBatchIOGetStatus(batch, 3, &count, events, NULL).err == UGDS_SUCCESS && count == 3);
  CHECK(events[0].ret == 4096 && events[2].ret == 4096);
  CHECK(uGDSHandleDeregisterEx(fh, 0).err == UGDS_SUCCESS); /* an idle batch holds nothing */
  CHECK(uGDSBatchIOGetStatus(batch, 0, &count, events, NULL).err == UGDS_HANDLE_NOT_REGISTERED);
  uGDSBatchIODestroy(batch);
  CHECK(uGDSBufDeregister(buffer).err == UGDS_SUCCESS);
}

/* Every call of a child on what its parent has says so. */
static int in_child(uGDSHandle_t fh, uGDSBatchHandle_t batch, void* memory) {
  uint64_t bytes = 0;
  unsigned count = 1;
  size_t size = 4096;
  off_t zero = 0;
  ssize_t done = 0;
  struct iovec piece = {buffer, 4096};
  uGDSIOParams_t params = {buffer, 0, 0, 4096, 0, NULL};
  uGDSIOEvents_t events;
  uGDSDmabufExport_t export;
  uGDSRDMARegion_t region = {0};
  checks_failed = 0; /* the parent's */
#define SAYS(call, code)   \
  CHECK((call) == (code)); \
  CHECK(error_says("fork"))
  SAYS(uGDSRead(fh, buffer, 4096, 0, 0), -EBADF);
  SAYS(uGDSWrite(fh, buffer, 4096, 0, 0), -EBADF);
  SAYS(uGDSReadv(fh, &piece, 1, 0), -EBADF);
  SAYS(uGDSWritev(fh, &piece, 1, 0), -EBADF);
  SAYS(uGDSFlush(fh), -EBADF);
  SAYS(uGDSDiscard(fh, 0, 4096), -EBADF);
  SAYS(uGDSGetDeviceCapacity(fh, &bytes).err, UGDS_HANDLE_NOT_REGISTERED);
  SAYS(uGDSHandleDeregisterEx(fh, 0).err, UGDS_HANDLE_NOT_REGISTERED);
  SAYS(uGDSHandleDeregisterEx(fh, 1).err, UGDS_HANDLE_NOT_REGISTERED);
  SAYS(uGDSHandleDeregisterEx(fh, -1).err, UGDS_HANDLE_NOT_REGISTERED);
  SAYS(uGDSHandleDeregisterEx(fh, -2).err, UGDS_HANDLE_NOT_REGISTERED);
  SAYS(uGDSBatchIOSetUp(&batch, fh, 1).err, UGDS_HANDLE_NOT_REGISTERED);
  SAYS(uGDSBatchIOSubmit(batch, 1, &params, 0).err, UGDS_HANDLE_NOT_REGISTERED);
  SAYS(uGDSBatchIOGetStatus(batch, 1, &count, &events, NULL).err, UGDS_HANDLE_NOT_REGISTERED);
  SAYS(uGDSBatchIOCancel(batch).err, UGDS_HANDLE_NOT_REGISTERED);
  uGDSBatchIODestroy(batch);
  SAYS(uGDSReadAsync(fh, buffer, &size, &zero, &zero, &done, NULL).err, UGDS_HANDLE_NOT_REGISTERED);
  SAYS(uGDSWriteAsync(fh, buffer, &size, &zero, &zero, &done, NULL).err, UGDS_HANDLE_NOT_REGISTERED);
  SAYS(uGDSBufDeregister(buffer).err, UGDS_MEMORY_NOT_REGISTERED);
  SAYS(uGDSExportDmabuf(buffer, &export).err, UGDS_MEMORY_NOT_REGISTERED);
  SAYS(uGDSRDMARegister(buffer, buffer, 0, &region).err, UGDS_MEMORY_NOT_REGISTERED);
  SAYS(uGDSRDMAUnregister(buffer, &region).err, UGDS_INVALID_VALUE);
  SAYS(uGDSHostFree(memory).err, UGDS_INVALID_VALUE);
  /* What the child opens itself works, and its own mistakes are its own. */
  /* Without a thread of its own: the thread sanitizer does not follow those of a child. */
  uGDSHandle_t own = open_device("emulated:1MiB?pump=caller");
  SAYS(uGDSRead(own, buffer, 4096, 0, 0), -EINVAL);
  CHECK(uGDSBufRegister(buffer, sizeof buffer, 0).err == UGDS_SUCCESS);
  CHECK(uGDSRead(own, buffer, 4096, 0, 0) == 4096);
  CHECK(uGDSDriverClose().err == UGDS_SUCCESS);
  return checks_summary();
}

static void test_a_child_is_told(void) {
  struct reading reading = {open_device("emulated:1MiB?latency=700ms&queues=2"), 0};
  uGDSBatchHandle_t batch = NULL;
  void* memory = uGDSHostAlloc(4096);
  CHECK(uGDSBatchIOSetUp(&batch, reading.fh, 1).err == UGDS_SUCCESS);
  const pthread_t thread = start_reading(&reading); /* a thread is inside while the process forks */
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(in_child(reading.fh, batch, memory));
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  /* The parent is unharmed. */
  pthread_join(thread, NULL);
  CHECK(reading.result == 4096);
  uGDSIOParams_t params = {buffer, 0, 0, 4096, 0, NULL};
  uGDSIOEvents_t event;
  unsigned count = 1;
  CHECK(uGDSBatchIOSubmit(batch, 1, &params, 0).err == UGDS_SUCCESS);
  CHECK(uGDSBatchIOGetStatus(batch, 1, &count, &event, NULL).err == UGDS_SUCCESS && event.ret == 4096);
  uGDSBatchIODestroy(batch);
  CHECK(uGDSHostFree(memory).err == UGDS_SUCCESS);
  CHECK(uGDSBufDeregister(buffer).err == UGDS_SUCCESS);
  CHECK(uGDSHandleDeregisterEx(reading.fh, 0).err == UGDS_SUCCESS);
}

/* A thread that submits and ends leaves what it submitted to whoever collects. */
static void* submit_and_end(void* batch) {
  static uGDSIOParams_t params;
  params = (uGDSIOParams_t){buffer, 0, 0, 4096, 0, buffer};
  return (void*)(uintptr_t)(uGDSBatchIOSubmit(batch, 1, &params, 0).err != UGDS_SUCCESS);
}

static void test_a_thread_ends_with_a_request_in_flight(void) {
  uGDSHandle_t fh = open_device("emulated:1MiB?latency=200ms");
  uGDSBatchHandle_t batch = NULL;
  pthread_t thread;
  void* failed = NULL;
  CHECK(uGDSBufRegister(buffer, sizeof buffer, 0).err == UGDS_SUCCESS);
  CHECK(uGDSBatchIOSetUp(&batch, fh, 1).err == UGDS_SUCCESS);
  REQUIRE(pthread_create(&thread, NULL, submit_and_end, batch) == 0);
  pthread_join(thread, &failed);
  CHECK(failed == NULL);
  uGDSIOEvents_t event;
  unsigned count = 1;
  CHECK(uGDSBatchIOGetStatus(batch, 1, &count, &event, NULL).err == UGDS_SUCCESS);
  CHECK(count == 1 && event.ret == 4096 && event.cookie == buffer);
  uGDSBatchIODestroy(batch);
  CHECK(uGDSBufDeregister(buffer).err == UGDS_SUCCESS);
  uGDSHandleDeregister(fh);
}

int main(void) {
  CHECK(uGDSDriverOpen().err == UGDS_SUCCESS);
  test_four_ways_to_deregister();
  test_a_batch_that_holds_a_device_is_named();
  test_a_child_is_told();
  test_a_thread_ends_with_a_request_in_flight();
  return checks_summary();
}
