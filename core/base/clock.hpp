// SPDX-License-Identifier: Apache-2.0
//
// Time. `ticks()` is the processor's own counter, which runs at one rate on every processor of the last fifteen years
// (and on emulated ones), read by one instruction and never by a system call; elsewhere it is CLOCK_MONOTONIC in
// nanoseconds.
#pragma once

#include <cstdint>
#include <ctime>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace ugds {

inline std::uint64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(now.tv_nsec);
}

inline std::uint64_t ticks() {
#if defined(__x86_64__)
  return __rdtsc();
#elif defined(__aarch64__)
  std::uint64_t now;
  asm volatile("mrs %0, cntvct_el0" : "=r"(now));
  return now;
#else
  return monotonic_ns();
#endif
}

/// Ticks in a second. The first call measures for a quarter of a millisecond, where the processor does not say.
std::uint64_t ticks_per_second();

/// Conversions of any span; of one that is longer than centuries to at most 2^63 ticks.
std::uint64_t ns_to_ticks(std::uint64_t ns);
std::uint64_t ticks_to_ns(std::uint64_t ticks);
/// The same for any number of ticks, by a division of 128 bits: for what is written down.
std::uint64_t ticks_as_ns(std::uint64_t ticks);

/// A processor's hint that this is a polling loop.
inline void cpu_pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace ugds
