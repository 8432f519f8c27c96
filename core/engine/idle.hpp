// SPDX-License-Identifier: Apache-2.0
//
// What a thread does when a poll turn finds nothing: let a `pump=caller` controller work, or pause, and give the
// processor away when more threads poll than there are processors. Always out of line of the path that finds something.
#pragma once

#include <cstdint>

#include "device/device.hpp"

namespace ugds::engine {

class Idle {
 public:
  explicit Idle(device::Device* device) : turn_(device->turn()), context_(device->turn_context()) {}
  Idle(device::Device::Turn turn, void* context) : turn_(turn), context_(context) {}
  ~Idle() {
    if (counted_) leave();
  }
  Idle(const Idle&) = delete;
  Idle& operator=(const Idle&) = delete;

  /// One empty poll turn. True every 64th time: look at the clock and the device now.
  bool pause();

 private:
  void enter();
  void leave();

  device::Device::Turn turn_;
  void* context_;
  std::uint32_t turns_ = 0;
  bool counted_ = false;
};

}  // namespace ugds::engine
