/* SPDX-License-Identifier: Apache-2.0 */
/*
 * No argument of the C API reaches memory outside a registration: random pointers, sizes and offsets, sums that
 * overflow included, through every call that names memory. Beside each registration lies memory that is ours to look at
 * and the library's to leave alone. A model says what memory and device hold after each request, by what it returned.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>

#include "check.h"
#include "random.h"
#include "ugds.h"

enum { BLOCK = 512, DEVICE = 1 << 20, GUARD = 65536, LENGTH = 4 * GUARD, PIECES = 6, ROUNDS = 40000 };

static unsigned char *arena, *expected; /* LENGTH bytes: what is there, and what should be */
static unsigned char* back;             /* DEVICE bytes, registered: to see what the device holds */
static unsigned char stored[DEVICE];    /* what it should hold */
static struct {
  unsigned char* base;
  size_t size;
} held[2];
static uGDSHandle_t fh;
static uGDSBatchHandle_t batch;

/* Numbers near the ends of what there is. */
static uint64_t edge(void) {
  static const uint64_t ends[] = {0, 1u << 31, UINT64_C(1) << 32, UINT64_C(1) << 47, UINT64_C(1) << 63, DEVICE};
  const uint64_t near = below(3) == 0 ? below(9) - 4 : (below(9) - 4) * BLOCK;
  return below(8) == 0 ? next() : ends[below(6)] + near;
}
static uint64_t some_size(void) { return below(6) == 0 ? edge() : (1 + below(below(8) == 0 ? 400 : 16)) * BLOCK; }
static uint64_t some_offset(void) { return below(6) == 0 ? edge() : below(DEVICE / BLOCK) * BLOCK; }

/* A pointer and an offset, whose sum is mostly near the begin or the end of a registration. */
static void some_place(uint64_t* pointer, uint64_t* offset) {
  const unsigned which = (unsigned)below(2);
  const uint64_t base = (uintptr_t)held[which].base, size = held[which].size;
  uint64_t at = base + below(size / 4) * 4;
  if (below(4) == 0) at = base + (below(4) == 0 ? 0 : size) + (below(9) - 4) * (below(2) == 0 ? 4 : BLOCK);
  if (below(16) == 0) at = (uintptr_t)arena + below(LENGTH);
  if (below(32) == 0) at = edge();
  switch (below(5)) {
    case 0: *pointer = at; break;
    case 1: *pointer = base; break;
    case 2: *pointer = base + below(size); break;
    case 3: *pointer = at - edge(); break;
    default: *pointer = edge();
  }
  *offset = at - *pointer;
}

/* Whether [at, at + size) lies in one registration. */
static int is_held(uint64_t at, uint64_t size) {
  for (int i = 0; i < 2; ++i) {
    const uint64_t base = (uintptr_t)held[i].base;
    if (at >= base && at - base <= held[i].size && size <= held[i].size - (at - base)) return 1;
  }
  return 0;
}

/* What a request that succeeded did. */
static void apply(int writes, uint64_t at, uint64_t size, uint64_t offset) {
  if (size == 0) return; /* an empty piece of a vector may be anywhere */
  CHECK(is_held(at, size));
  CHECK(offset <= DEVICE && size <= DEVICE - offset);
  if (!is_held(at, size) || offset > DEVICE || size > DEVICE - offset) return;
  unsigned char* memory = expected + (at - (uintptr_t)arena);
  if (writes)
    memcpy(stored + offset, memory, size);
  else
    memcpy(memory, stored + offset, size);
}

static void memory_is_as_expected(void) { CHECK(memcmp(arena, expected, LENGTH) == 0); }

static void device_is_as_expected(void) {
  CHECK(uGDSRead(fh, back, DEVICE, 0, 0) == DEVICE);
  CHECK(memcmp(back, stored, DEVICE) == 0);
}

/* New bytes in all of the arena, so that every change shows. */
static void stir(void) {
  for (size_t i = 0; i < LENGTH; i += 8) {
    const uint64_t bytes = next();
    memcpy(arena + i, &bytes, 8);
  }
  memcpy(expected, arena, LENGTH);
}

static unsigned long succeeded;

static void one_request(void) {
  uint64_t pointer, in_buffer;
  some_place(&pointer, &in_buffer);
  const uint64_t size = some_size(), offset = some_offset();
  const int writes = (int)below(2);
  const ssize_t got = writes ? uGDSWrite(fh, (void*)(uintptr_t)pointer, size, (off_t)offset, (off_t)in_buffer)
                             : uGDSRead(fh, (void*)(uintptr_t)pointer, size, (off_t)offset, (off_t)in_buffer);
  CHECK(got < 0 || (uint64_t)got == size);
  if (got < 0) CHECK(got >= -4095 && uGDSGetLastError(NULL, 0) != 0);
  if (got > 0) ++succeeded, apply(writes, pointer + in_buffer, size, offset);
}

/* Requests of a batch, and pieces of a read, may end in any order: none of them here touches what another does. */
static int overlap(uint64_t a, uint64_t a_size, uint64_t b, uint64_t b_size) {
  return a < b + b_size && b < a + a_size;
}

static void one_vector(void) {
  struct iovec pieces[PIECES];
  const int count = below(12) == 0 ? (int)(below(3) == 0 ? INT_MIN : -1) : (int)below(PIECES + 1);
  int writes = (int)below(2);
  uint64_t total = 0;
  for (int i = 0; i < count; ++i) {
    uint64_t pointer, in_buffer;
    some_place(&pointer, &in_buffer);
    pieces[i].iov_base = (void*)(uintptr_t)(pointer + in_buffer);
    pieces[i].iov_len = below(8) == 0 ? edge() : (1 + below(8)) * BLOCK;
    total += pieces[i].iov_len;
    for (int j = 0; j < i; ++j)
      if (overlap((uintptr_t)pieces[j].iov_base, pieces[j].iov_len, (uintptr_t)pieces[i].iov_base, pieces[i].iov_len))
        writes = 1;
  }
  const uint64_t offset = some_offset();
  const struct iovec* vector = below(20) == 0 ? NULL : pieces;
  if (vector == NULL && count > 0) total = 0;
  const ssize_t got =
      writes ? uGDSWritev(fh, vector, count, (off_t)offset) : uGDSReadv(fh, vector, count, (off_t)offset);
  CHECK(got < 0 || (uint64_t)got == total);
  if (got <= 0) return;
  ++succeeded;
  uint64_t done = 0;
  for (int i = 0; i < count; ++i) {
    apply(writes, (uintptr_t)pieces[i].iov_base, pieces[i].iov_len, offset + done);
    done += pieces[i].iov_len;
  }
}

static void one_batch(void) {
  uGDSIOParams_t params[PIECES];
  const unsigned count = (unsigned)below(PIECES + 1);
  for (unsigned i = 0; i < count; ++i) {
    uint64_t pointer, in_buffer;
    some_place(&pointer, &in_buffer);
    params[i] = (uGDSIOParams_t){.base = (void*)(uintptr_t)pointer,
                                 .file_offset = (off_t)some_offset(),
                                 .buf_offset = (off_t)in_buffer,
                                 .size = some_size(),
                                 .opcode = below(40) == 0 ? (int)next() : (int)below(2),
                                 .cookie = (void*)(uintptr_t)i};
    for (unsigned j = 0; j < i; ++j) {
      const uint64_t one = (uintptr_t)params[j].base + (uint64_t)params[j].buf_offset, other = pointer + in_buffer;
      if (overlap(one, params[j].size, other, params[i].size) ||
          overlap((uint64_t)params[j].file_offset, params[j].size, (uint64_t)params[i].file_offset, params[i].size))
        params[i].size = 0; /* malformed: nothing of the submission happens */
    }
  }
  const int submitted = uGDSBatchIOSubmit(batch, count, params, 0).err == UGDS_SUCCESS;
  unsigned told = 0, seen = 0;
  while (submitted && told < count) {
    uGDSIOEvents_t events[PIECES];
    unsigned most = PIECES;
    CHECK(uGDSBatchIOGetStatus(batch, count - told, &most, events, NULL).err == UGDS_SUCCESS);
    CHECK(most != 0 && most <= count - told);
    if (most == 0) return;
    for (unsigned i = 0; i < most; ++i) {
      const unsigned which = (unsigned)(uintptr_t)events[i].cookie;
      CHECK(which < count && (seen & 1u << which) == 0);
      seen |= 1u << which;
      const uGDSIOParams_t* p = &params[which];
      CHECK((events[i].status == UGDS_BATCH_COMPLETE) == (events[i].ret >= 0));
      if (events[i].ret <= 0) continue;
      CHECK((size_t)events[i].ret == p->size);
      ++succeeded;
      apply(p->opcode, (uintptr_t)p->base + (uint64_t)p->buf_offset, p->size, (uint64_t)p->file_offset);
    }
    told += most;
  }
}

/* Calls that name memory without moving any. What is registered by chance is given back. */
static void one_other(void) {
  uint64_t pointer, in_buffer;
  some_place(&pointer, &in_buffer);
  void* const at = (void*)(uintptr_t)(pointer + in_buffer);
  for (int i = 0; i < 2; ++i)
    if (at == held[i].base) return;
  uGDSDmabufExport_t exported = {-1, 0, 0};
  uGDSRDMARegion_t region = {0};
  switch (below(6)) {
    case 0: {
      const size_t size = below(2) == 0 ? edge() : some_size();
      if (uGDSBufRegister(at, size, 0).err == UGDS_SUCCESS) {
        CHECK(!is_held((uintptr_t)at, 1));
        CHECK(uGDSBufDeregister(at).err == UGDS_SUCCESS);
      }
      break;
    }
    case 1: CHECK(uGDSBufDeregister(at).err != UGDS_SUCCESS); break;
    case 2: CHECK(at == NULL || uGDSHostFree(at).err != UGDS_SUCCESS); break;
    case 3: CHECK(uGDSExportDmabuf(at, &exported).err != UGDS_SUCCESS && exported.fd == -1); break;
    case 4: CHECK(uGDSRDMAUnregister(at, &region).err != UGDS_SUCCESS); break;
    default: {
      const uGDSHandle_t other = (uGDSHandle_t)at;
      if (other == fh) return;
      CHECK(uGDSRead(other, held[0].base, BLOCK, 0, 0) < 0);
      CHECK(uGDSHandleDeregisterEx(other, 0).err != UGDS_SUCCESS);
    }
  }
}

static void discard_within_bounds(void) {
  const uint64_t offset = edge(), size = edge();
  const ssize_t got = uGDSDiscard(fh, (off_t)offset, size);
  CHECK(got <= 0);
  if (got != 0 || size == 0) return;
  CHECK(offset <= DEVICE && size <= DEVICE - offset);
  if (offset <= DEVICE && size <= DEVICE - offset) memset(stored + offset, 0, size);
}

int main(void) {
  arena = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  expected = malloc(LENGTH);
  back = aligned_alloc(4096, DEVICE);
  CHECK(arena != MAP_FAILED && expected != NULL && back != NULL);
  CHECK(uGDSDriverOpen().err == UGDS_SUCCESS);
  uGDSDescr_t descr = {.type = UGDS_HANDLE_TYPE_USERSPACE_FS,
                       .handle.handle = "emulated:1MiB?lba=512&pump=caller&mdts=3"};
  CHECK(uGDSHandleRegister(&fh, &descr).err == UGDS_SUCCESS);
  /* One that begins and ends inside pages, and one of whole pages; between them less than a page on one side. */
  held[0].base = arena + GUARD + 100;
  held[0].size = 50000;
  held[1].base = arena + 2 * GUARD;
  held[1].size = GUARD;
  for (int i = 0; i < 2; ++i) CHECK(uGDSBufRegister(held[i].base, held[i].size, 0).err == UGDS_SUCCESS);
  CHECK(uGDSBufRegister(back, DEVICE, 0).err == UGDS_SUCCESS);
  CHECK(uGDSBatchIOSetUp(&batch, fh, PIECES).err == UGDS_SUCCESS);
  memset(back, 0, DEVICE);
  CHECK(uGDSWrite(fh, back, DEVICE, 0, 0) == DEVICE);

  for (int round = 0; round < ROUNDS; ++round) {
    if (round % 16 == 0) stir();
    switch (below(8)) {
      case 0:
      case 1:
      case 2: one_request(); break;
      case 3:
      case 4: one_vector(); break;
      case 5:
      case 6: one_batch(); break;
      default: below(8) == 0 ? discard_within_bounds() : one_other();
    }
    memory_is_as_expected();
    if (round % 64 == 0) device_is_as_expected();
  }
  device_is_as_expected();
  /* Else nothing was shown. */
  CHECK(succeeded > ROUNDS / 20);

  uGDSBatchIODestroy(batch);
  CHECK(uGDSBufDeregister(back).err == UGDS_SUCCESS);
  for (int i = 0; i < 2; ++i) CHECK(uGDSBufDeregister(held[i].base).err == UGDS_SUCCESS);
  CHECK(uGDSHandleDeregisterEx(fh, 1).err == UGDS_SUCCESS);
  CHECK(uGDSDriverClose().err == UGDS_SUCCESS);
  free(back);
  free(expected);
  munmap(arena, LENGTH);
  return checks_summary();
}
