// SPDX-License-Identifier: Apache-2.0
//
// An object of the process that exists before any code runs and is never destroyed, so that late callers find it. It is
// reached by its address, without a check whether it was made.
#pragma once

namespace ugds {

template <class T>
union Immortal {
  T value;
  constexpr Immortal() : value() {}
  ~Immortal() {}  // NOLINT: on purpose
};

}  // namespace ugds
