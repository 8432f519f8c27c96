// SPDX-License-Identifier: Apache-2.0
//
// A PCI controller that vfio-pci holds (`pci:0000:65:00.0`), by iommufd or type1 or, when asked for by name, without an
// IOMMU.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/descriptor.hpp"
#include "device/claim.hpp"
#include "device/device.hpp"
#include "device/iommu.hpp"

namespace ugds::device {

class VfioDevice final : public Device {
 public:
  /// `?iommu=auto|iommufd|type1|none`. Throws Failure: what is wrong, and the command that mends it.
  VfioDevice(std::string text, const PciFunction& function, const Uri& uri);
  ~VfioDevice() override;

  const std::string& uri() const override { return uri_; }
  Transport transport() const override { return Transport::vfio; }
  Limits limits() const override { return limits_; }

  std::uint32_t read32(std::uint32_t offset) override;
  std::uint64_t read64(std::uint32_t offset) override;
  void write32(std::uint32_t offset, std::uint32_t value) override;
  void write64(std::uint32_t offset, std::uint64_t value) override;
  std::uint32_t* doorbell(std::uint32_t offset) override;
  Mapping map(void* address, Bytes length, Access access, std::uint64_t* pages) override;
  Mapping map_descriptor(const DescriptorRange& range, Access access, std::uint64_t* pages) override;
  void unmap(const Mapping& mapping) noexcept override;
  void set_interrupts(std::span<const int> eventfds) override;
  bool reset() noexcept override;
  void notify(const Notices& notices) override;
  /// Closing the device clears bus mastering and resets the function, and its translation ends.
  bool release() noexcept override;

 private:
  std::shared_ptr<Iommu> translation();
  void map_registers();
  void find_interrupts();
  void enable_bus_master();
  void set_trigger(std::uint32_t index, std::span<const int> eventfds);

  std::string uri_;
  std::optional<Claim> claim_;  ///< until `release`: another device may come to the same address
  std::mutex lock_;             ///< over access_, which `release` empties
  VfioAccess access_;
  Limits limits_;
  std::byte* registers_ = nullptr;  ///< BAR0; once released, memory that reads as all ones
  std::uint64_t register_bytes_ = 0;
  bool can_reset_ = false, tells_removal_ = false, has_interrupts_ = false;
  Descriptor removal_;
  std::uint64_t removal_watch_ = 0;
  Notices notices_;
};

}  // namespace ugds::device
