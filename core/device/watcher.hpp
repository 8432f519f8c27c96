// SPDX-License-Identifier: Apache-2.0
//
// One thread of the process that waits for descriptors which become readable seldom, such as a removal request's
// eventfd, and calls whoever asked. It exists once something is watched.
#pragma once

#include <cstdint>

namespace ugds::device {

/// Has `call(context)` called each time that the eventfd `descriptor` was signalled. Throws Failure. Thread-safe.
std::uint64_t watch(int descriptor, void (*call)(void* context), void* context);
/// Ends it. Does not return while the call runs, unless it is made from inside the call.
void unwatch(std::uint64_t watch) noexcept;

}  // namespace ugds::device
