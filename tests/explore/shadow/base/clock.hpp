// SPDX-License-Identifier: Apache-2.0
//
// Stands before core/base/clock.hpp in the explorer's build: time is what the explorer says it is, and a tick is a
// nanosecond. Who polls gives way to whoever else can do something.
#pragma once

#include <cstdint>
#include <ctime>

namespace ugds {

namespace explore {
extern std::uint64_t now_ns;
void idle();
}  // namespace explore

inline std::uint64_t monotonic_ns() { return explore::now_ns; }
/// Not the same twice, as a processor's counter.
inline std::uint64_t ticks() { return explore::now_ns += 61; }
inline std::uint64_t ticks_per_second() { return 1'000'000'000; }
inline std::uint64_t ns_to_ticks(std::uint64_t ns) { return ns; }
inline std::uint64_t ticks_to_ns(std::uint64_t ticks) { return ticks; }
inline std::uint64_t ticks_as_ns(std::uint64_t ticks) { return ticks; }
inline void cpu_pause() { explore::idle(); }

}  // namespace ugds
