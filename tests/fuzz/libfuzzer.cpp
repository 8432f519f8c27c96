// SPDX-License-Identifier: Apache-2.0
//
// One target for libFuzzer, the one that UGDS_FUZZ_TARGET names.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fuzz.hpp"

using ugds::fuzz::Target;

static const Target* chosen = nullptr;

extern "C" int LLVMFuzzerInitialize(int*, char***);
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int LLVMFuzzerInitialize(int*, char***) {
  const char* name = std::getenv("UGDS_FUZZ_TARGET");
  for (const Target* target = Target::first; name != nullptr && target != nullptr; target = target->next) {
    if (std::strcmp(target->name, name) == 0) chosen = target;
  }
  if (chosen != nullptr) return 0;
  std::fprintf(stderr, "UGDS_FUZZ_TARGET names one of:");
  for (const Target* target = Target::first; target != nullptr; target = target->next)
    std::fprintf(stderr, " %s", target->name);
  std::fprintf(stderr, "\n");
  std::exit(2);
}

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  ugds::fuzz::Input input(data, size);
  chosen->body(input);
  return 0;
}
