// SPDX-License-Identifier: Apache-2.0
//
// What a thread does when a poll turn finds nothing: let a `pump=caller` controller work, or pause, and give the
// processor away when more threads poll than there are processors. Always out of line of the path that finds something.
#pragma once

#include <cstdint>

#include "base/clock.hpp"
#include "device/device.hpp"

namespace ugds::engine {

/// What an empty poll turn runs for a controller that its callers run; nothing for one that runs by itself.
struct Turn {
  device::Device::Turn run = nullptr;
  void* context = nullptr;

  Turn() = default;
  explicit Turn(const device::Device& device) : run(device.turn()), context(device.turn_context()) {}

  void take() const {
    if (run != nullptr) run(context);
  }
};

class Idle {
 public:
  Idle() = default;
  ~Idle() {
    if (counted_) [[unlikely]]
      leave();
  }
  Idle(const Idle&) = delete;
  Idle& operator=(const Idle&) = delete;

  /// One empty poll turn. True every 64th time: look at the clock and the device now.
  bool pause(const Turn& turn) {
    if (turn.run != nullptr) {
      turn.run(turn.context);
    } else {
      cpu_pause();
    }
    return (++turns_ & 63) == 0 && share(turn);
  }

 private:
  bool share(const Turn& turn);
  void leave();

  std::uint32_t turns_ = 0;
  bool counted_ = false;
};

}  // namespace ugds::engine
