/* SPDX-License-Identifier: Apache-2.0 */
/* A program that is killed: it writes, flushes, and keeps a journal of what it was told, until then.
 *
 *     journal URI JOURNAL SEED FIRST
 *
 * The device's beginning is SLOTS slots of SLOT bytes; each 512 bytes of a slot begin with its number and which write
 * it was, counted over all from FIRST on. Before a write the journal has "i SLOT WRITE", after it "w SLOT WRITE", and
 * after a flush "f". Without arguments it tests itself, for a moment. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "ugds.h"

enum { SLOTS = 16, SLOT = 8192, SECTOR = 512, DEPTH = 4 };

static unsigned char* memory; /* of DEPTH slots */

static void note(int journal, const char* format, unsigned slot, unsigned number) {
  char line[64];
  const int length = snprintf(line, sizeof line, format, slot, number);
  REQUIRE(write(journal, line, (size_t)length) == length);
}

static void write_slot(uGDSHandle_t fh, int journal, unsigned slot, uint32_t number) {
  unsigned char* const at = memory + number % DEPTH * SLOT;
  for (unsigned i = 0; i < SLOT; i += SECTOR) {
    memcpy(at + i, &slot, sizeof slot);
    memcpy(at + i + sizeof slot, &number, sizeof number);
  }
  note(journal, "i %u %u\n", slot, number);
  REQUIRE(uGDSWrite(fh, memory, SLOT, slot * SLOT, number % DEPTH * SLOT) == SLOT);
  note(journal, "w %u %u\n", slot, number);
}

/* `writes` of them, or for ever where that is 0. */
static void go_on(uGDSHandle_t fh, int journal, unsigned seed, uint32_t number, uint32_t writes) {
  for (uint32_t i = 0; writes == 0 || i < writes; ++i) {
    write_slot(fh, journal, (unsigned)rand_r(&seed) % SLOTS, number + i);
    if (rand_r(&seed) % 4 != 0) continue;
    REQUIRE(uGDSFlush(fh) == 0);
    note(journal, "f\n", 0, 0);
  }
}

int main(int count, char** arguments) {
  const int alone = count != 5;
  const char* uri = alone ? "emulated:1MiB" : arguments[1];
  const int journal = open(alone ? "/dev/null" : arguments[2], O_WRONLY | O_APPEND | O_CREAT, 0600);
  REQUIRE(journal >= 0);
  REQUIRE(uGDSDriverOpen().err == UGDS_SUCCESS);
  uGDSHandle_t fh = NULL;
  uGDSDescr_t descr = {.type = UGDS_HANDLE_TYPE_USERSPACE_FS, .handle = {.handle = (void*)uri}};
  if (uGDSHandleRegister(&fh, &descr).err != UGDS_SUCCESS) {
    char text[1024] = "";
    uGDSGetLastError(text, sizeof text);
    fprintf(stderr, "%s\n", text);
    return 2;
  }
  memory = uGDSHostAlloc(DEPTH * SLOT); /* which a server in another process can map */
  REQUIRE(memory != NULL);
  REQUIRE(uGDSBufRegister(memory, DEPTH * SLOT, 0).err == UGDS_SUCCESS);
  note(journal, "o\n", 0, 0);
  go_on(fh, journal, alone ? 1 : (unsigned)atoi(arguments[3]), alone ? 1 : (uint32_t)atoi(arguments[4]),
        alone ? 200 : 0);
  CHECK(uGDSBufDeregister(memory).err == UGDS_SUCCESS);
  CHECK(uGDSHostFree(memory).err == UGDS_SUCCESS);
  uGDSHandleDeregister(fh);
  CHECK(uGDSDriverClose().err == UGDS_SUCCESS);
  close(journal);
  return checks_summary();
}
