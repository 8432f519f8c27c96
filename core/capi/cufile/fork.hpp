// SPDX-License-Identifier: Apache-2.0
//
// This library's tables and `fork`. To libugds they are one (ForkOrder::cufile): none of their locks is taken under
// another of them.
#pragma once

#include "base/fork.hpp"

namespace ugds::cufile {

/// As ugds::on_fork, of one table of this library. At most kMostTables.
void at_fork(const ForkHooks& hooks);
inline constexpr unsigned kMostTables = 8;

}  // namespace ugds::cufile
