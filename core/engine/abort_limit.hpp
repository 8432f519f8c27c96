// SPDX-License-Identifier: Apache-2.0
//
// How long an Abort and then the command that it aborted may take, together. Every other request waits meanwhile, and
// for the reset that follows where this was in vain. Abort is a best effort for which no time is stated (NVMe
// Base 2.0, 5.1), so that waiting longer promises nothing; a controller that does work answers a command that moves no
// data long before.
#pragma once

#include <cstdint>

namespace ugds::engine {

inline constexpr std::uint64_t kAbortLimit = 25'000'000;

/// For tests, whose controller is a thread that may not get a processor for longer: the limit of this process from now
/// on, in nanoseconds; 0: kAbortLimit. Thread-safe.
void set_abort_limit(std::uint64_t ns);

}  // namespace ugds::engine
