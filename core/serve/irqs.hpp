// SPDX-License-Identifier: Apache-2.0
//
// A client's eventfds: which vectors have one, and what SET_IRQS does to them (VFIO's VFIO_DEVICE_SET_IRQS).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/descriptor.hpp"
#include "emulator/controller.hpp"
#include "vfio_user/protocol.hpp"

namespace ugds::serve {

class Irqs {
 public:
  explicit Irqs(emulator::Controller& controller);
  ~Irqs() { clear(); }
  Irqs(const Irqs&) = delete;
  Irqs& operator=(const Irqs&) = delete;

  std::uint32_t count(std::uint32_t index) const {
    return static_cast<std::uint32_t>(index < kinds_.size() ? kinds_[index].size() : 0);
  }
  /// Throws Failure: EINVAL for what the request may not say, ENOTSUP for masking.
  void set(const vfio_user::IrqSet& request, std::span<const std::byte> data, std::vector<Descriptor>& files);
  /// Whether MSI-X is enabled in configuration space: without it nothing is sent.
  void enable(bool on);
  void clear() noexcept;

 private:
  void assign(std::uint32_t index, std::uint32_t at, Descriptor file);

  emulator::Controller& controller_;
  bool enabled_ = false;
  std::array<std::vector<Descriptor>, vfio_user::kPciIrqs> kinds_;
};

}  // namespace ugds::serve
