// SPDX-License-Identifier: Apache-2.0
#include "capi/cufile/fork.hpp"

#include <array>
#include <cstdlib>
#include <mutex>

#include "base/immortal.hpp"

namespace ugds::cufile {

namespace {

struct Tables {
  std::mutex lock;
  std::array<ForkHooks, kMostTables> hooks{};
  unsigned count = 0;
};
constinit Immortal<Tables> tables;

void prepare() {
  tables.value.lock.lock();
  for (unsigned i = 0; i < tables.value.count; ++i) tables.value.hooks[i].prepare();
}

void in_parent() {
  for (unsigned i = tables.value.count; i-- > 0;) tables.value.hooks[i].parent();
  tables.value.lock.unlock();
}

void in_child() {
  for (unsigned i = tables.value.count; i-- > 0;) tables.value.hooks[i].child();
  tables.value.lock.unlock();
}

}  // namespace

void at_fork(const ForkHooks& hooks) {
  static const bool hooked = (on_fork(ForkOrder::cufile, {prepare, in_parent, in_child}), true);
  static_cast<void>(hooked);
  const std::lock_guard guard(tables.value.lock);
  if (tables.value.count == kMostTables) std::abort();
  tables.value.hooks[tables.value.count++] = hooks;
}

}  // namespace ugds::cufile
