// SPDX-License-Identifier: Apache-2.0
//
// Stands before core/base/fence.hpp in the explorer's build: a full fence empties the thread's store buffer.
#pragma once

#include "atomics.hpp"

namespace ugds {

inline void full_fence() { explore::fence(); }
inline void doorbell_barrier() {}

}  // namespace ugds
