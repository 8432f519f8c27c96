// SPDX-License-Identifier: Apache-2.0
#include "engine/idle.hpp"

#include <sched.h>

#include <atomic>

#include "base/clock.hpp"

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

void Idle::enter() {
  counted_ = true;
  pollers.fetch_add(1, std::memory_order_relaxed);
}

void Idle::leave() { pollers.fetch_sub(1, std::memory_order_relaxed); }

bool Idle::pause() {
  if (turn_ != nullptr) {
    turn_(context_);
  } else {
    cpu_pause();
  }
  if ((++turns_ & 63) != 0) [[likely]] return false;
  if (!counted_) enter();
  // A controller of this process polls too, where it is not run by its callers.
  if (pollers.load(std::memory_order_relaxed) + (turn_ == nullptr ? 1 : 0) > processors()) sched_yield();
  return true;
}

}  // namespace ugds::engine
