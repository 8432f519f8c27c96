// SPDX-License-Identifier: Apache-2.0
#include "base/clock.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ugds {

namespace {

bool has_invariant_counter() {
#if defined(__x86_64__)
  // Invariant TSC: CPUID 8000_0007h, EDX bit 8.
  unsigned a, b, c, d;
  return __get_cpuid(0x80000007u, &a, &b, &c, &d) != 0 && (d & (1u << 8)) != 0;
#elif defined(__aarch64__)
  return true;
#else
  return false;
#endif
}

std::uint64_t measure() {
#if defined(__aarch64__)
  std::uint64_t frequency;
  asm volatile("mrs %0, cntfrq_el0" : "=r"(frequency));
  return frequency;
#else
  if (!kInvariantCounter) return 1'000'000'000u;
  const std::uint64_t t0 = ticks(), n0 = monotonic_ns();
  std::uint64_t n1 = n0;
  while (n1 - n0 < 250'000) n1 = monotonic_ns();
  const std::uint64_t t1 = ticks();
  return static_cast<std::uint64_t>(static_cast<double>(t1 - t0) * 1e9 / static_cast<double>(n1 - n0));
#endif
}

}  // namespace

const bool kInvariantCounter = has_invariant_counter();

std::uint64_t ticks_per_second() {
  static const std::uint64_t rate = measure();
  return rate;
}

std::uint64_t ns_to_ticks(std::uint64_t ns) {
  return static_cast<std::uint64_t>(static_cast<double>(ns) * static_cast<double>(ticks_per_second()) * 1e-9);
}

std::uint64_t ticks_to_ns(std::uint64_t t) {
  return static_cast<std::uint64_t>(static_cast<double>(t) * 1e9 / static_cast<double>(ticks_per_second()));
}

}  // namespace ugds
