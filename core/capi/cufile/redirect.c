/* SPDX-License-Identifier: Apache-2.0
 *
 * libugds_redirect.so, which `ugds run` loads before a program beside our libcufile.so.0: who opens another libcufile
 * by its path gets ours. PyTorch does so with the one in NVIDIA's package, though it links the name, and cuda.bindings
 * looks for it there. Names without a path need nothing: the loader has that name already. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

static void* (*next)(const char*, int);
static char ours[PATH_MAX];

__attribute__((constructor)) static void begin(void) {
  Dl_info self;
  *(void**)&next = dlsym(RTLD_NEXT, "dlopen");
  if (dladdr((void*)&begin, &self) == 0) return;
  const char* slash = strrchr(self.dli_fname, '/');
  if (slash == NULL) return;
  const int folder = (int)(slash - self.dli_fname);
  if (snprintf(ours, sizeof ours, "%.*s/libcufile.so.0", folder, self.dli_fname) >= (int)sizeof ours) ours[0] = '\0';
}

/* libcufile.so, libcufile.so.0, libcufile.so.1.15.1; not libcufile_rdma.so. */
static int is_cufile(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash != NULL && strncmp(slash + 1, "libcufile.so", 12) == 0 && (slash[13] == '\0' || slash[13] == '.');
}

/* The call at the end is a jump, so that the loader sees who has called, in whose search path a name is looked up. */
__attribute__((visibility("default"))) void* dlopen(const char* path, int flags) {
  if (next == NULL) begin();
  if (path != NULL && ours[0] != '\0' && is_cufile(path)) path = ours;
  return next(path, flags);
}
