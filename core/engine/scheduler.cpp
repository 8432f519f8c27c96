// SPDX-License-Identifier: Apache-2.0
#include "engine/scheduler.hpp"

#include <algorithm>
#include <utility>

namespace ugds::engine {

Scheduler::Scheduler(const std::string& mode) : name_(mode.empty() ? "latency" : mode), mode_(make_mode(name_)) {}

void Scheduler::begin(const std::atomic<std::uint64_t>* virtual_clock, std::uint32_t chunk,
                      std::function<void(Observed&)> observe) {
  pacer_ = std::make_unique<queue::Pacer>(virtual_clock);
  interval_ = ns_to_ticks(kModeInterval);
  asked_.store(ticks(), std::memory_order_relaxed);
  chunk_ = chunk;
  observe_ = std::move(observe);
  settings_ = mode_->begin();
  apply();
}

void Scheduler::apply() {
  pacer_->configure(settings_.pacing, std::min(chunk_, kPiece));
  for (unsigned i = 0; i < kSizeClasses; ++i) {
    Waiting::Way way = settings_.waiting[i];
    way.sleeps = way.sleeps || (asked_to_sleep_ && way.explore == 0);
    waiting_.set(i, way);
  }
  window_.store(std::max(1u, settings_.window), std::memory_order_relaxed);
  refill_.store(std::max(1u, settings_.refill), std::memory_order_relaxed);
  background_writes_.store(settings_.background_writes, std::memory_order_relaxed);
}

void Scheduler::ask(std::uint64_t now) {
  if (asking_.test_and_set(std::memory_order_acquire)) return;
  asked_.store(now, std::memory_order_relaxed);
  Observed observed;
  for (unsigned i = 0; i < kSizeClasses; ++i) {
    observed.waiting[i] = waiting_.seen(i);
    Waiting::Seen& seen = observed.waiting[i];
    for (std::uint64_t* time : {&seen.polled, &seen.slept, &seen.last_polled, &seen.last_slept})
      *time = ticks_to_ns(*time);
  }
  observed.large_in_flight = pacer_->in_flight();
  observed.large_limit = pacer_->limit();
  observed.small_requests = pacer_->protects();
  observe_(observed);
  if (mode_->adjust(observed, settings_)) apply();
  asking_.clear(std::memory_order_release);
}

}  // namespace ugds::engine
