// SPDX-License-Identifier: Apache-2.0
#include "base/fork.hpp"

#include <pthread.h>

#include "base/immortal.hpp"

namespace ugds {

namespace {

constinit Immortal<ForkTable<static_cast<std::size_t>(ForkOrder::observed_events) + 1>> tables;
std::atomic<unsigned> generation{0};

void prepare() { tables.value.prepare(); }
void in_parent() { tables.value.in_parent(); }
void in_child() {
  generation.fetch_add(1);
  tables.value.in_child();
}

}  // namespace

void on_fork(ForkOrder order, const ForkHooks& hooks) {
  tables.value.add(static_cast<std::size_t>(order), hooks);
  static const int registered = pthread_atfork(prepare, in_parent, in_child);
  static_cast<void>(registered);
}

unsigned fork_generation() { return generation.load(std::memory_order_relaxed); }

}  // namespace ugds
