// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "fuzz.hpp"

namespace ugds::fuzz {

namespace {

constexpr std::uint64_t kSecond = 1'000'000'000, kStep = 1'000'000;
std::atomic<bool> quick{false};
std::atomic<std::uint64_t> ahead{0};

/// Controllers that are made to wedge are no news to whoever runs this: the library is to write nothing of them.
const int quiet = setenv("UGDS_STATE_DIR", "", 1);

}  // namespace

void broken(const char* what) {
  std::fprintf(stderr, "fuzz: this does not hold: %s\n", what);
  std::abort();
}

QuickTime::QuickTime() {
  static_cast<void>(quiet);
  quick = true;
}
QuickTime::~QuickTime() { quick = false; }

}  // namespace ugds::fuzz

// What the library's own objects call, by the linker's --wrap.
extern "C" {

int __real_clock_gettime(clockid_t clock, timespec* now);
int __real_nanosleep(const timespec* wait, timespec* rest);
int __wrap_clock_gettime(clockid_t clock, timespec* now);
int __wrap_nanosleep(const timespec* wait, timespec* rest);

int __wrap_clock_gettime(clockid_t clock, timespec* now) {
  using namespace ugds::fuzz;
  const int result = __real_clock_gettime(clock, now);
  if (result != 0 || clock != CLOCK_MONOTONIC) return result;
  const std::uint64_t more = quick ? ahead.fetch_add(kStep) + kStep : ahead.load();
  const auto total = static_cast<std::uint64_t>(now->tv_nsec) + more;
  now->tv_sec += static_cast<time_t>(total / kSecond);
  now->tv_nsec = static_cast<long>(total % kSecond);
  return result;
}

int __wrap_nanosleep(const timespec* wait, timespec* rest) {
  using namespace ugds::fuzz;
  if (!quick) return __real_nanosleep(wait, rest);
  ahead.fetch_add(static_cast<std::uint64_t>(wait->tv_sec) * kSecond + static_cast<std::uint64_t>(wait->tv_nsec));
  return 0;
}

}  // extern "C"
