// SPDX-License-Identifier: Apache-2.0
//
// Named steps of set-up, each of which a test can make fail once, to see that everything before it is undone.
// On the I/O path there are none.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ugds {

/// Marks a step. Throws Failure(ENOMEM) if a test armed this one.
void setup_step(const char* name);

namespace testing {

/// Makes the `nth` step (from 0) taken by any thread from now on fail, once. Returns nothing; `disarm_steps` ends it.
void arm_step(std::uint64_t nth);
/// Ends arming. Returns whether the armed step was reached.
bool disarm_steps();
/// Starts recording step names; `recorded_steps` gives them and stops.
void record_steps();
std::vector<std::string> recorded_steps();

}  // namespace testing
}  // namespace ugds
