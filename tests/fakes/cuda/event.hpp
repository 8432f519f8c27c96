// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "capture.hpp"
#include "context.hpp"

namespace fake_cuda {

struct Event {
  Event(Context& in, unsigned with) : context(in), flags(with) {}
  Context& context;
  const unsigned flags;

  std::mutex lock;
  std::condition_variable changed;
  std::uint64_t recorded = 0;  ///< how often it was enqueued
  std::uint64_t reached = 0;   ///< up to which of those a stream has come
  std::chrono::steady_clock::time_point when;
  std::shared_ptr<Capture> capture;  ///< the last record was captured by it

  void reach(std::uint64_t number) {
    const std::scoped_lock hold(lock);
    reached = std::max(reached, number);
    when = std::chrono::steady_clock::now();
    changed.notify_all();
  }
  void wait(std::uint64_t number) {
    std::unique_lock hold(lock);
    changed.wait(hold, [&] { return reached >= number; });
  }
};

}  // namespace fake_cuda
