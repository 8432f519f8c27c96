/* SPDX-License-Identifier: Apache-2.0 */
/* The C API as a C program uses it: compiled against the header alone, linked with libugds.so. */
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "ugds.h"

static uGDSHandle_t open_device(const char* uri) {
  uGDSHandle_t fh = NULL;
  uGDSDescr_t descr = {.type = UGDS_HANDLE_TYPE_USERSPACE_FS, .handle = {.handle = (void*)uri}};
  CHECK(uGDSHandleRegister(&fh, &descr).err == UGDS_SUCCESS);
  CHECK(fh != NULL);
  return fh;
}

static int error_says(const char* words) {
  char text[1024];
  return uGDSGetLastError(text, sizeof text) != 0 && strstr(text, words) != NULL;
}

static void test_layout(void) {
  CHECK(sizeof(uGDSDescr_t) == 16);
  CHECK(sizeof(uGDSError_t) == 8);
  CHECK(sizeof(uGDSIOParams_t) == 48);
  CHECK(sizeof(uGDSIOEvents_t) == 24);
  CHECK(uGDSVersion() == 100);
}

static void test_driver_must_be_open(void) {
  uGDSHandle_t fh = NULL;
  uGDSDescr_t descr = {.type = UGDS_HANDLE_TYPE_USERSPACE_FS, .handle = {.handle = "emulated:1MiB"}};
  char byte[4096];
  CHECK(uGDSHandleRegister(&fh, &descr).err == UGDS_DRIVER_NOT_INITIALIZED);
  CHECK(uGDSBufRegister(byte, sizeof byte, 0).err == UGDS_DRIVER_NOT_INITIALIZED);
  CHECK(uGDSDriverClose().err == UGDS_DRIVER_NOT_INITIALIZED);
  CHECK(error_says("driver"));
}

static void test_round_trip(void) {
  static unsigned char out[1 << 20] __attribute__((aligned(4096))), in[(1 << 20) + 8192] __attribute__((aligned(4096)));
  uGDSHandle_t fh = open_device("emulated:16MiB?mdts=4");
  uint64_t capacity = 0;
  CHECK(uGDSGetDeviceCapacity(fh, &capacity).err == UGDS_SUCCESS);
  CHECK(capacity == 16u << 20);
  for (size_t i = 0; i < sizeof out; ++i) out[i] = (unsigned char)(i * 7 + i / 4096);
  CHECK(uGDSBufRegister(out, sizeof out, 0).err == UGDS_SUCCESS);
  CHECK(uGDSBufRegister(in, sizeof in, 0).err == UGDS_SUCCESS);
  CHECK(uGDSBufRegister(in + 100, 10, 0).err == UGDS_MEMORY_ALREADY_REGISTERED);
  CHECK(uGDSWrite(fh, out, sizeof out, 1 << 20, 0) == (ssize_t)sizeof out);
  CHECK(uGDSFlush(fh) == 0);
  /* By offset, and by an interior pointer. */
  memset(in, 0xee, sizeof in);
  CHECK(uGDSRead(fh, in, sizeof out, 1 << 20, 4) == (ssize_t)sizeof out);
  CHECK(memcmp(in + 4, out, sizeof out) == 0);
  CHECK(in[0] == 0xee && in[3] == 0xee && in[4 + sizeof out] == 0xee);
  memset(in, 0xee, sizeof in);
  CHECK(uGDSRead(fh, in + 4096, 8192, (1 << 20) + 4096, 512) == 8192);
  CHECK(memcmp(in + 4096 + 512, out + 4096, 8192) == 0);
  CHECK(uGDSDiscard(fh, 1 << 20, 4096) == 0);
  CHECK(uGDSRead(fh, in, 4096, 1 << 20, 0) == 4096);
  for (size_t i = 0; i < 4096; ++i)
    if (in[i] != 0) {
      CHECK(!"discarded blocks read as zeros");
      break;
    }
  CHECK(uGDSRead(fh, in, 0, 0, 0) == 0);
  CHECK(uGDSBufDeregister(in).err == UGDS_SUCCESS);
  CHECK(uGDSBufDeregister(in).err == UGDS_MEMORY_NOT_REGISTERED);
  CHECK(uGDSBufDeregister(out + 4096).err == UGDS_MEMORY_NOT_REGISTERED);
  /* More than a process can have is refused before anything is made for it. */
  CHECK(uGDSBufRegister(out, (size_t)1 << 48, 0).err == UGDS_INVALID_VALUE);
  CHECK(uGDSBufDeregister(out).err == UGDS_SUCCESS);
  CHECK(uGDSHandleDeregisterEx(fh, 0).err == UGDS_SUCCESS);
}

static void test_bad_arguments(void) {
  static unsigned char buffer[65536] __attribute__((aligned(4096)));
  uGDSHandle_t fh = open_device("emulated:1MiB"), other = NULL;
  unsigned char* stranger = malloc(8192);
  REQUIRE(stranger != NULL);
  memset(buffer, 0x55, sizeof buffer);
  CHECK(uGDSBufRegister(buffer, sizeof buffer, 0).err == UGDS_SUCCESS);
  CHECK(uGDSRead(fh, buffer, 4096, 1, 0) == -EINVAL && error_says("block size"));
  CHECK(uGDSRead(fh, buffer, 100, 0, 0) == -EINVAL && error_says("block size"));
  CHECK(uGDSRead(fh, buffer, 4096, -4096, 0) == -EINVAL && error_says("negative"));
  CHECK(uGDSRead(fh, buffer, 4096, 0, -4) == -EINVAL && error_says("negative"));
  CHECK(uGDSRead(fh, buffer, 4096, 0, 2) == -EINVAL && error_says("multiple of 4"));
  CHECK(uGDSRead(fh, buffer, 4096, 1 << 20, 0) == -ERANGE && error_says("beyond the device"));
  CHECK(uGDSRead(fh, buffer, 8192, (1 << 20) - 4096, 0) == -ERANGE);
  CHECK(uGDSRead(fh, buffer, 4096, 0x7ffffffffffff000, 0) == -ERANGE);
  CHECK(uGDSRead(fh, buffer, (size_t)-4096, 4096, 0) == -ERANGE);
  CHECK(uGDSRead(fh, buffer, 65536, 0, 4096) == -EINVAL && error_says("beyond the registered buffer"));
  CHECK(uGDSRead(fh, buffer, 4096, 0, 0x7ffffffffffffffc) == -EINVAL);
  CHECK(uGDSRead(fh, stranger, 4096, 0, 0) == -EINVAL && error_says("not registered"));
  CHECK(uGDSWrite(fh, stranger, 4096, 0, 0) == -EINVAL && error_says("write on emulated:1MiB"));
  CHECK(uGDSRead(NULL, buffer, 4096, 0, 0) == -EBADF && error_says("no device was ever opened"));
  CHECK(uGDSRead((uGDSHandle_t)buffer, buffer, 4096, 0, 0) == -EBADF);
  CHECK(uGDSFlush((uGDSHandle_t)1) == -EBADF || fh == (uGDSHandle_t)1);
  for (size_t i = 0; i < sizeof buffer; ++i)
    if (buffer[i] != 0x55) {
      CHECK(!"a refused request changed memory");
      break;
    }

  uGDSDescr_t bad = {.type = 3, .handle = {.handle = "emulated:1MiB?latencyy=3us"}};
  CHECK(uGDSHandleRegister(&other, &bad).err == UGDS_INVALID_VALUE && error_says("latency"));
  bad.handle.handle = "nothing";
  CHECK(uGDSHandleRegister(&other, &bad).err == UGDS_INVALID_VALUE);
  bad.handle.handle = NULL;
  CHECK(uGDSHandleRegister(&other, &bad).err == UGDS_INVALID_VALUE);
  bad.type = 2;
  CHECK(uGDSHandleRegister(&other, &bad).err == UGDS_INVALID_VALUE && error_says("type 2"));
  bad.type = 1;
  bad.handle.fd = 0;
  CHECK(uGDSHandleRegister(&other, &bad).err == UGDS_IO_NOT_SUPPORTED);
  bad.handle.fd = 9999;
  CHECK(uGDSHandleRegister(&other, &bad).err == UGDS_INVALID_VALUE);
  CHECK(uGDSHandleRegister(NULL, &bad).err == UGDS_INVALID_VALUE);
  CHECK(other == NULL);
  CHECK(uGDSBufRegister(NULL, 4096, 0).err == UGDS_INVALID_VALUE);
  CHECK(uGDSBufRegister(stranger, 0, 0).err == UGDS_INVALID_VALUE);
  CHECK(uGDSBufRegister((void*)4096, 4096, 0).err == UGDS_MEMORY_PINNING_FAILED);
  CHECK(uGDSBufRegister(stranger, 4096, 64).err == UGDS_INVALID_VALUE);
  CHECK(uGDSGetDeviceCapacity(fh, NULL).err == UGDS_INVALID_VALUE);
  CHECK(uGDSStreamRegister(NULL).err == UGDS_IO_NOT_SUPPORTED && error_says("there is no GPU"));

  char tiny[4];
  CHECK(uGDSGetLastError(tiny, sizeof tiny) > 4 && tiny[3] == '\0');
  CHECK(uGDSGetLastError(NULL, 0) > 4);

  CHECK(uGDSHandleDeregisterEx(fh, 1).err == UGDS_SUCCESS);
  CHECK(uGDSHandleDeregisterEx(fh, 1).err == UGDS_HANDLE_NOT_REGISTERED);
  CHECK(uGDSRead(fh, buffer, 4096, 0, 0) == -EBADF);
  CHECK(uGDSBufDeregister(buffer).err == UGDS_SUCCESS);
  free(stranger);
}

struct worker {
  uGDSHandle_t fh;
  unsigned char* buffer;
  int number, wrong;
};

static void* work(void* argument) {
  struct worker* w = argument;
  for (unsigned round = 0; round < 400; ++round) {
    const size_t size = 4096u * (1 + round % 5);
    const off_t offset = (off_t)w->number * (1 << 20) + (off_t)(round % 16) * 65536;
    memset(w->buffer, (int)(w->number * 31 + round), size);
    if (uGDSWrite(w->fh, w->buffer, size, offset, 0) != (ssize_t)size) ++w->wrong;
    memset(w->buffer, 0, size);
    if (uGDSRead(w->fh, w->buffer, size, offset, 0) != (ssize_t)size) ++w->wrong;
    for (size_t i = 0; i < size; ++i) {
      if (w->buffer[i] != (unsigned char)(w->number * 31 + round)) {
        ++w->wrong;
        break;
      }
    }
  }
  return NULL;
}

/* Eight threads over as few queue pairs as one. */
static void test_threads(const char* uri) {
  enum { threads = 8 };
  static unsigned char buffers[threads][32768] __attribute__((aligned(4096)));
  uGDSHandle_t fh = open_device(uri);
  pthread_t thread[threads];
  struct worker workers[threads];
  CHECK(uGDSBufRegister(buffers, sizeof buffers, 0).err == UGDS_SUCCESS);
  for (int i = 0; i < threads; ++i) {
    workers[i] = (struct worker){.fh = fh, .buffer = buffers[i], .number = i, .wrong = 0};
    REQUIRE(pthread_create(&thread[i], NULL, work, &workers[i]) == 0);
  }
  for (int i = 0; i < threads; ++i) {
    pthread_join(thread[i], NULL);
    CHECK(workers[i].wrong == 0);
  }
  CHECK(uGDSBufDeregister(buffers).err == UGDS_SUCCESS);
  uGDSHandleDeregister(fh);
}

static void test_fork(void) {
  static unsigned char buffer[4096] __attribute__((aligned(4096)));
  uGDSHandle_t fh = open_device("emulated:1MiB");
  CHECK(uGDSBufRegister(buffer, sizeof buffer, 0).err == UGDS_SUCCESS);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    int wrong = 0;
    if (uGDSRead(fh, buffer, 4096, 0, 0) != -EBADF || !error_says("fork")) wrong |= 1;
    if (uGDSBufDeregister(buffer).err == UGDS_SUCCESS) wrong |= 2;
    /* A device of its own works. */
    uGDSHandle_t own = NULL;
    uGDSDescr_t descr = {.type = 3, .handle = {.handle = "emulated:1MiB"}};
    if (uGDSHandleRegister(&own, &descr).err != UGDS_SUCCESS) wrong |= 4;
    if (uGDSBufRegister(buffer, sizeof buffer, 0).err != UGDS_SUCCESS) wrong |= 8;
    if (uGDSRead(own, buffer, 4096, 0, 0) != 4096) wrong |= 16;
    _exit(wrong);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  if (WEXITSTATUS(status) != 0) fprintf(stderr, "child: %d\n", WEXITSTATUS(status));
  CHECK(uGDSRead(fh, buffer, 4096, 0, 0) == 4096);
  CHECK(uGDSBufDeregister(buffer).err == UGDS_SUCCESS);
  uGDSHandleDeregister(fh);
}

static void test_memory_of_the_library(void) {
  CHECK(uGDSHostAlloc(0) == NULL);
  CHECK(uGDSHostAlloc((size_t)1 << 60) == NULL);
  CHECK(uGDSHostFree(NULL).err == UGDS_SUCCESS);
  unsigned char* memory = uGDSHostAlloc(10000);
  CHECK(memory != NULL && (uintptr_t)memory % 4096 == 0 && memory[9999] == 0);
  CHECK(uGDSHostFree(memory + 1).err == UGDS_INVALID_VALUE);
  uGDSHandle_t fh = open_device("emulated:1MiB");
  CHECK(uGDSBufRegister(memory + 4096, 4096, 0).err == UGDS_SUCCESS);
  CHECK(uGDSHostFree(memory).err == UGDS_BUSY);
  memset(memory, 7, 10000);
  CHECK(uGDSRead(fh, memory + 4096, 4096, 0, 0) == 4096);
  CHECK(memory[4095] == 7 && memory[4096] == 0 && memory[8192] == 7);
  CHECK(uGDSBufDeregister(memory + 4096).err == UGDS_SUCCESS);
  CHECK(uGDSHostFree(memory).err == UGDS_SUCCESS);
  CHECK(uGDSHostFree(memory).err == UGDS_INVALID_VALUE);
  uGDSHandleDeregister(fh);
}

static void test_interrupts(void) {
  static unsigned char buffer[4096];
  setenv("UGDS_INTERRUPT_MODE", "perhaps", 1);
  uGDSHandle_t fh = NULL;
  uGDSDescr_t descr = {.type = UGDS_HANDLE_TYPE_USERSPACE_FS};
  descr.handle.handle = (void*)"emulated:1MiB?latency=1ms";
  CHECK(uGDSHandleRegister(&fh, &descr).err == UGDS_INVALID_VALUE);
  setenv("UGDS_INTERRUPT_MODE", "1", 1);
  fh = open_device("emulated:1MiB?latency=3ms");
  unsetenv("UGDS_INTERRUPT_MODE");
  CHECK(uGDSBufRegister(buffer, sizeof buffer, 0).err == UGDS_SUCCESS);
  struct timespec before, after;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &before);
  for (int i = 0; i < 100; ++i) CHECK(uGDSRead(fh, buffer, sizeof buffer, 0, 0) == sizeof buffer);
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &after);
  /* Of 300 ms that they take at least: a thread that polls uses all of it, and under a sanitizer everything costs more.
   */
  CHECK((after.tv_sec - before.tv_sec) * 1000000000L + after.tv_nsec - before.tv_nsec < 150000000L);
  CHECK(uGDSBufDeregister(buffer).err == UGDS_SUCCESS);
  uGDSHandleDeregister(fh);
}

static void test_driver_close_releases_what_is_left(void) {
  static unsigned char buffer[4096];
  CHECK(uGDSDriverOpen().err == UGDS_SUCCESS); /* the second */
  uGDSHandle_t fh = open_device("emulated:1MiB");
  CHECK(uGDSBufRegister(buffer, sizeof buffer, 0).err == UGDS_SUCCESS);
  CHECK(uGDSDriverClose().err == UGDS_SUCCESS);
  CHECK(uGDSRead(fh, buffer, 4096, 0, 0) == 4096);
  CHECK(uGDSDriverClose().err == UGDS_SUCCESS);
  CHECK(uGDSRead(fh, buffer, 4096, 0, 0) == -EBADF);
  CHECK(uGDSDriverOpen().err == UGDS_SUCCESS);
  CHECK(uGDSBufRegister(buffer, sizeof buffer, 0).err == UGDS_SUCCESS);
  CHECK(uGDSDriverClose().err == UGDS_SUCCESS);
}

int main(void) {
  test_layout();
  test_driver_must_be_open();
  CHECK(uGDSDriverOpen().err == UGDS_SUCCESS);
  test_round_trip();
  test_bad_arguments();
  test_threads("emulated:16MiB?queues=1");
  test_threads("emulated:16MiB?queues=4&depth=4");
  test_threads("emulated:16MiB?pump=caller&queues=2&order=random");
  test_fork();
  test_memory_of_the_library();
  test_interrupts();
  test_driver_close_releases_what_is_left();
  return checks_summary();
}
