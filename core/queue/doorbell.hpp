// SPDX-License-Identifier: Apache-2.0
//
// One doorbell, however it is reached: a register in mapped memory, a register behind the transport, or a shadow word
// with an event index (NVMe Base 2.0, B.5) whose register is rung only when the controller asks for it.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/fence.hpp"
#include "device/device.hpp"

namespace ugds::queue {

class Doorbell {
 public:
  Doorbell() = default;
  Doorbell(device::Device& device, std::uint32_t offset)
      : word_(device.doorbell(offset)), device_(&device), offset_(offset) {}
  Doorbell(device::Device& device, std::uint32_t offset, std::uint32_t* shadow, std::uint32_t* event)
      : word_(shadow), event_(event), device_(&device), offset_(offset) {}

  void ring(std::uint32_t value) {
    if (event_ != nullptr) [[likely]] {
      const std::uint32_t old = *word_;  // ours alone to write
      std::atomic_ref(*word_).store(value, std::memory_order_release);
      // The shadow word before the event index: the controller writes its event index, then looks at the shadow.
      full_fence();
      if (!wanted(std::atomic_ref(*event_).load(std::memory_order_acquire), value, old)) return;
    } else if (word_ != nullptr) {
      doorbell_barrier();
      // One aligned 32-bit store. Release costs nothing here and is what an emulated controller's acquire pairs with.
      std::atomic_ref(*word_).store(value, std::memory_order_release);
      return;
    }
    device_->write32(offset_, value);
  }

 private:
  /// Whether the move from `old` to `value` passed the event index.
  static bool wanted(std::uint32_t event, std::uint32_t value, std::uint32_t old) {
    return static_cast<std::uint16_t>(value - event - 1) < static_cast<std::uint16_t>(value - old);
  }

  std::uint32_t* word_ = nullptr;
  std::uint32_t* event_ = nullptr;
  device::Device* device_ = nullptr;
  std::uint32_t offset_ = 0;
};

}  // namespace ugds::queue
