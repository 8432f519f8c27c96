/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers that are the same in each run (xorshift). */
#ifndef UGDS_TESTS_RANDOM_H
#define UGDS_TESTS_RANDOM_H

#include <stdint.h>

static uint64_t state = 88172645463325252u;
static uint64_t next(void) {
  state ^= state << 13;
  state ^= state >> 7;
  return state ^= state << 17;
}
static uint64_t below(uint64_t limit) { return next() % limit; }

#endif
