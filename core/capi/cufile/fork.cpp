// SPDX-License-Identifier: Apache-2.0
#include "capi/cufile/fork.hpp"

#include <cstdlib>

#include "base/immortal.hpp"

namespace ugds::cufile {

namespace {

constinit Immortal<ForkTable<kMostTables>> tables;
constinit std::atomic<unsigned> count{0};

}  // namespace

void at_fork(const ForkHooks& hooks) {
  const unsigned place = count.fetch_add(1);
  if (place >= kMostTables) std::abort();
  tables.value.add(place, hooks);
  static const bool hooked =
      (on_fork(ForkOrder::cufile,
               {[] { tables.value.prepare(); }, [] { tables.value.in_parent(); }, [] { tables.value.in_child(); }}),
       true);
  static_cast<void>(hooked);
}

}  // namespace ugds::cufile
