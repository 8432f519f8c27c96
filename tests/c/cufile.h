/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of the cuFile-compatible library share: a file of known bytes, and how it is registered. */
#ifndef UGDS_TESTS_CUFILE_H
#define UGDS_TESTS_CUFILE_H

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "abi.h"
#include "check.h"

static char file_path[] = "cufile-test-XXXXXX";

static unsigned char byte_at(size_t i) { return (unsigned char)(i * 2654435761u >> 13); }

/* A new file of `size` bytes, open for reading and writing, that is gone with its descriptor. */
static inline int make_file(size_t size) {
  char path[sizeof file_path];
  memcpy(path, file_path, sizeof path);
  const int fd = mkstemp(path);
  REQUIRE(fd >= 0);
  unlink(path);
  unsigned char* bytes = malloc(size);
  REQUIRE(bytes != NULL);
  for (size_t i = 0; i < size; ++i) bytes[i] = byte_at(i);
  REQUIRE(write(fd, bytes, size) == (ssize_t)size);
  free(bytes);
  return fd;
}

static inline CUfileHandle_t register_file(int fd) {
  CUfileHandle_t fh = NULL;
  CUfileDescr_t descr = {.type = CU_FILE_HANDLE_TYPE_OPAQUE_FD, .handle = {.fd = fd}};
  REQUIRE(cuFileHandleRegister(&fh, &descr).err == CU_FILE_SUCCESS && fh != NULL);
  return fh;
}

static inline int are_of_file(const unsigned char* bytes, size_t offset, size_t size) {
  for (size_t i = 0; i < size; ++i) {
    if (bytes[i] != byte_at(offset + i)) return 0;
  }
  return 1;
}

#endif
