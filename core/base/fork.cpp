// SPDX-License-Identifier: Apache-2.0
#include "base/fork.hpp"

#include <pthread.h>

#include <atomic>

namespace ugds {

namespace {
std::atomic<unsigned> generation{0};
}

void on_fork(const ForkHooks& hooks) {
  static const bool counted = [] {
    pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });
    return true;
  }();
  static_cast<void>(counted);
  pthread_atfork(hooks.prepare, hooks.parent, hooks.child);
}

unsigned fork_generation() { return generation.load(std::memory_order_relaxed); }

}  // namespace ugds
