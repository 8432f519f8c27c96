// SPDX-License-Identifier: Apache-2.0
//
// The environment as far as it may be believed: in a program that runs with rights which its caller does not have
// (set-user-id, file capabilities) the caller's words decide about nothing of ours. They name libraries to load.
#pragma once

#include <cstdlib>

namespace ugds {

/// A variable's text, or nullptr where it is not set, and in such a program. Every UGDS_ variable is read by this.
inline const char* environment(const char* name) { return secure_getenv(name); }

/// The same for a variable of a GPU runtime's own: what it does is what it has read there, whoever wrote it.
inline const char* runtime_environment(const char* name) { return std::getenv(name); }

}  // namespace ugds
