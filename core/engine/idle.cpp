// SPDX-License-Identifier: Apache-2.0
#include "engine/idle.hpp"

#include <sched.h>

#include <atomic>

namespace ugds::engine {

namespace {

std::atomic<int> pollers{0};

int processors() {
  static const int count = [] {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  }();
  return count;
}

}  // namespace

void Idle::leave() { pollers.fetch_sub(1, std::memory_order_relaxed); }

/// Counts this thread among the pollers, and yields if there are more of them than processors. Always true.
bool Idle::share(const Turn& turn) {
  if (!counted_) {
    counted_ = true;
    pollers.fetch_add(1, std::memory_order_relaxed);
  }
  // A controller of this process polls too, where it is not run by its callers.
  if (pollers.load(std::memory_order_relaxed) + (turn.run == nullptr ? 1 : 0) > processors()) sched_yield();
  return true;
}

}  // namespace ugds::engine
