// SPDX-License-Identifier: Apache-2.0
//
// Exploring without a memory of states: an execution is the sequence of its choices, and every sequence is run from the
// start, depth first. Choices beyond a stated depth are all answered by 0, which is always the answer of a device that
// works, so that every execution ends.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace ugds::explore {

/// One of 0 to `count` - 1. `what` says what for, `option` names each, for reports; both are called only then.
std::uint32_t choose(std::uint32_t count, const char* what, const std::function<std::string(std::uint32_t)>& option);
std::uint32_t choose(std::uint32_t count, const char* what);

/// Runs `body` for every sequence of choices up to `depth`, and prints how many that were. `UGDS_EXPLORE_DEEPER` in the
/// environment adds to the depth, and sanitizers, which are slow, take from it.
struct Scenario {
  const char* name;
  std::uint32_t depth;
  std::uint32_t less_under_sanitizers = 2;
};
void explore(const Scenario& scenario, const std::function<void()>& body);

/// A property does not hold: prints it with the choices that led here, and ends the program.
[[noreturn]] void violated(const char* property, const std::string& how);
inline void require(bool holds, const char* property, const char* how) {
  if (!holds) [[unlikely]]
    violated(property, how);
}

}  // namespace ugds::explore
