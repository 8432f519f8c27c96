// SPDX-License-Identifier: Apache-2.0
#include "base/clock.hpp"

namespace ugds {

namespace {

std::uint64_t measure() {
#if defined(__aarch64__)
  std::uint64_t frequency;
  asm volatile("mrs %0, cntfrq_el0" : "=r"(frequency));
  return frequency;
#elif !defined(__x86_64__)
  return 1'000'000'000u;
#else
  const std::uint64_t t0 = ticks(), n0 = monotonic_ns();
  std::uint64_t n1 = n0;
  while (n1 - n0 < 250'000) n1 = monotonic_ns();
  const std::uint64_t t1 = ticks();
  return static_cast<std::uint64_t>(static_cast<double>(t1 - t0) * 1e9 / static_cast<double>(n1 - n0));
#endif
}

}  // namespace

std::uint64_t ticks_per_second() {
  static const std::uint64_t rate = measure();
  return rate;
}

std::uint64_t ns_to_ticks(std::uint64_t ns) {
  const double ticks = static_cast<double>(ns) * static_cast<double>(ticks_per_second()) * 1e-9;
  return ticks < 0x1p63 ? static_cast<std::uint64_t>(ticks) : std::uint64_t{1} << 63;
}

std::uint64_t ticks_to_ns(std::uint64_t t) {
  return static_cast<std::uint64_t>(static_cast<double>(t) * 1e9 / static_cast<double>(ticks_per_second()));
}

std::uint64_t ticks_as_ns(std::uint64_t ticks) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>(static_cast<Wide>(ticks) * 1'000'000'000u / ticks_per_second());
}

}  // namespace ugds
