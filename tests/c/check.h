/* SPDX-License-Identifier: Apache-2.0 */
/* The least that a C test needs: counted checks, and the closing line. */
#ifndef UGDS_TESTS_CHECK_H
#define UGDS_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>

static int checks_passed, checks_failed;
static int checks_summary(void);

static inline int check(int ok, const char* file, int line, const char* words) {
  if (ok) {
    ++checks_passed;
  } else {
    ++checks_failed;
    fprintf(stderr, "%s:%d: failed: %s\n", file, line, words);
  }
  return ok;
}

#define CHECK(condition) check((condition) != 0, __FILE__, __LINE__, #condition)
#define REQUIRE(condition) \
  (check((condition) != 0, __FILE__, __LINE__, #condition) ? (void)0 : exit((checks_summary(), 255)))

static int checks_summary(void) {
  printf("%d passed, %d failed, 0 skipped\n", checks_passed, checks_failed);
  return checks_failed == 0 ? 0 : 1;
}

#endif
