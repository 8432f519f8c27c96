// SPDX-License-Identifier: Apache-2.0
//
// Switching the recording of commands on and off, for all queue pairs of a device (queue/trace.hpp).
#include "queue/trace.hpp"

#include <bit>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/handle.hpp"

namespace ugds::engine {

bool Handle::start_trace(std::size_t capacity) {
  std::lock_guard guard(recovery_lock_);
  if (tracing()) return false;
  std::vector<std::unique_ptr<queue::Trace>> traces;
  for (const auto& pair : queues_) {
    // As many slots as an identifier can name.
    traces.push_back(std::make_unique<queue::Trace>(capacity, std::bit_ceil(std::size_t{pair->depth()}), pair->id()));
  }
  for (std::size_t i = 0; i < queues_.size(); ++i) {
    acquire(*queues_[i]);
    queues_[i]->trace_into(std::move(traces[i]));
    queues_[i]->release();
  }
  tracing_.store(true, std::memory_order_relaxed);
  return true;
}

bool Handle::take_trace(std::vector<queue::TraceRecord>& out) {
  std::lock_guard guard(recovery_lock_);
  if (!tracing()) return false;
  for (auto& pair : queues_) {
    out.reserve(out.size() + pair->trace()->capacity());  // before the queue is ours: it may throw
    acquire(*pair);
    pair->trace()->take(out);
    pair->release();
  }
  return true;
}

std::uint64_t Handle::stop_trace() {
  std::lock_guard guard(recovery_lock_);
  tracing_.store(false, std::memory_order_relaxed);
  std::uint64_t dropped = 0;
  for (auto& pair : queues_) {
    acquire(*pair);
    const std::unique_ptr<queue::Trace> trace = pair->trace_into(nullptr);
    pair->release();
    if (trace) dropped += trace->dropped();
  }
  return dropped;
}

}  // namespace ugds::engine
