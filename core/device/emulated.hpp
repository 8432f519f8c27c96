// SPDX-License-Identifier: Apache-2.0
//
// The emulated transport: a controller in this process (emulator/), reached as any other.
#pragma once

#include <string>

#include "base/text.hpp"
#include "device/device.hpp"
#include "emulator/controller.hpp"

namespace ugds::device {

class EmulatedDevice final : public Device {
 public:
  EmulatedDevice(std::string text, const Uri& uri);

  const std::string& uri() const override { return uri_; }
  Transport transport() const override { return Transport::emulated; }
  Limits limits() const override { return {.interrupt_vectors = controller_.options().vector_count()}; }

  std::uint32_t read32(std::uint32_t offset) override;
  std::uint64_t read64(std::uint32_t offset) override;
  void write32(std::uint32_t offset, std::uint32_t value) override;
  void write64(std::uint32_t offset, std::uint64_t value) override;
  std::uint32_t* doorbell(std::uint32_t offset) override;
  Mapping map(void* address, Bytes length, Access access, std::uint64_t* pages) override;
  Mapping map_foreign(const ForeignRange& range, Access access, std::uint64_t* pages) override;
  void unmap(const Mapping& mapping) noexcept override;
  void set_interrupts(std::span<const int> eventfds) override;
  bool reset() noexcept override;
  Turn turn() const override;
  void* turn_context() const override;
  const std::atomic<std::uint64_t>* virtual_clock() const override { return controller_.virtual_clock(); }

  /// The controller itself, for ugds.testing.
  emulator::Controller& controller() { return controller_; }

 private:
  std::string uri_;
  emulator::Controller controller_;
};

}  // namespace ugds::device
