/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The submitting thread makes no system call over 10,000 polled reads on a device that is awake. A seccomp filter on
 * that thread turns every call into a signal, which is counted. A planted call shows that the filter sees them.
 */
#define _GNU_SOURCE
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
#include "ugds.h"

enum { reads = 10000 };

static atomic_int calls, last_call;
static atomic_int finished;
static atomic_long wrong;
static int planted;

static void count(int number, siginfo_t* info, void* context) {
  (void)number;
  (void)context;
  atomic_fetch_add(&calls, 1);
  atomic_store(&last_call, info->si_syscall);
}

static int trap_this_thread(void) {
  struct sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rt_sigreturn, 0, 1), /* the handler's own way back */
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
  };
  struct sock_fprog program = {.len = sizeof filter / sizeof *filter, .filter = filter};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return -1;
  return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}

struct job {
  uGDSHandle_t fh;
  unsigned char* buffer;
};

static void* submit(void* argument) {
  struct job* job = argument;
  for (int i = 0; i < 100; ++i) uGDSRead(job->fh, job->buffer, 4096, 0, 0);
  if (trap_this_thread() != 0) {
    atomic_store(&finished, -1);
    return NULL;
  }
  for (int i = 0; i < reads; ++i) {
    if (uGDSRead(job->fh, job->buffer, 4096, (i % 256) * 4096, 0) != 4096 ||
        job->buffer[0] != (unsigned char)(i % 256)) {
      atomic_fetch_add(&wrong, 1);
    }
    if (planted && i == reads / 2) syscall(SYS_getppid);
  }
  atomic_store(&finished, 1);
  for (;;) {
  } /* even leaving a thread is a system call */
  return NULL;
}

int main(int argc, char** argv) {
  const char* uri = argc > 1 ? argv[1] : "emulated:1MiB?idle=60s";
  planted = argc > 2 && strcmp(argv[2], "planted") == 0;
  struct sigaction action = {.sa_sigaction = count, .sa_flags = SA_SIGINFO};
  REQUIRE(sigaction(SIGSYS, &action, NULL) == 0);
  static unsigned char buffer[1 << 20] __attribute__((aligned(4096)));
  uGDSDescr_t descr = {.type = UGDS_HANDLE_TYPE_USERSPACE_FS, .handle = {.handle = (void*)uri}};
  struct job job = {.buffer = buffer};
  REQUIRE(uGDSDriverOpen().err == UGDS_SUCCESS);
  REQUIRE(uGDSHandleRegister(&job.fh, &descr).err == UGDS_SUCCESS);
  REQUIRE(uGDSBufRegister(buffer, sizeof buffer, 0).err == UGDS_SUCCESS);
  for (size_t i = 0; i < sizeof buffer; ++i) buffer[i] = (unsigned char)(i / 4096);
  REQUIRE(uGDSWrite(job.fh, buffer, sizeof buffer, 0, 0) == (ssize_t)sizeof buffer);
  pthread_t thread;
  REQUIRE(pthread_create(&thread, NULL, submit, &job) == 0);
  for (int waited = 0; atomic_load(&finished) == 0 && waited < 60000; ++waited) usleep(1000);
  REQUIRE(atomic_load(&finished) == 1);
  printf("%s: %d system calls in %d reads%s\n", uri, atomic_load(&calls), (int)reads, planted ? " (one planted)" : "");
  if (atomic_load(&calls) != 0) printf("the last was number %d\n", atomic_load(&last_call));
  CHECK(atomic_load(&calls) == (planted ? 1 : 0));
  CHECK(atomic_load(&wrong) == 0);
  const int code = checks_summary();
  fflush(stdout);
  _exit(code);
}
