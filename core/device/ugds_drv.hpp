// SPDX-License-Identifier: Apache-2.0
//
// A PCI controller that the kernel helper ugds_drv holds: `pci:0000:65:00.0`, or its node `/dev/ugds_drv0`. The helper
// pins and maps memory by the kernel's DMA layer, imports DMA-BUFs of peer devices, and stops the controller before
// anything that it could reach is given away: when the node is closed, by whatever ends the process, and when an
// exporter takes memory back. drv/README.md describes it, drv/uapi/ugds_drv.h its interface.
#pragma once

#include <mutex>
#include <optional>
#include <string>

#include "base/descriptor.hpp"
#include "device/claim.hpp"
#include "device/device.hpp"
#include "device/pci.hpp"

namespace ugds::device {

class UgdsDrvDevice final : public Device {
 public:
  /// A function that the helper holds. Throws Failure: what is wrong, and what mends it.
  UgdsDrvDevice(std::string text, const PciFunction& function, const Uri& uri);
  /// `place` is a node. `?fd=7`: it is open as that descriptor, which stays its caller's, and the file behind it is
  /// used; it may be closed before the device or after it.
  UgdsDrvDevice(std::string text, const Uri& uri);
  ~UgdsDrvDevice() override;

  const std::string& uri() const override { return uri_; }
  Transport transport() const override { return Transport::ugds_drv; }
  Limits limits() const override { return limits_; }

  std::uint32_t read32(std::uint32_t offset) override;
  std::uint64_t read64(std::uint32_t offset) override;
  void write32(std::uint32_t offset, std::uint32_t value) override;
  void write64(std::uint32_t offset, std::uint64_t value) override;
  std::uint32_t* doorbell(std::uint32_t offset) override;
  Mapping map(void* address, Bytes length, Access access, std::uint64_t* pages) override;
  /// Only what is shown to be memory of a peer device: an exporter may have moved it to the host's.
  Mapping map_descriptor(const DescriptorRange& range, Access access, std::uint64_t* pages) override;
  Mapping map_nvidia(std::uint64_t address, Bytes length, Access access, std::uint64_t* pages) override;
  void unmap(const Mapping& mapping) noexcept override;
  OwnMemory allocate(Bytes size, std::uint64_t* pages) override;
  void free(const OwnMemory& memory) noexcept override;
  void set_interrupts(std::span<const int> eventfds) override;
  bool reset() noexcept override;
  void notify(const Notices& notices) override;
  const char* halted() noexcept override;
  bool is_revoked(const Mapping& mapping) noexcept override;
  bool release() noexcept override;

 private:
  UgdsDrvDevice(std::string text, const std::string& path);
  UgdsDrvDevice(std::string text, Descriptor node, const std::string& path);
  void greet(const std::string& path);
  void map_registers(std::uint64_t offset);
  bool is_gone() noexcept;
  void changed();
  void require_usable(const Mapping& mapping, const std::uint64_t* pages);

  std::string uri_;
  std::optional<Claim> claim_;  ///< until the node is closed, or the device has gone
  Descriptor node_;
  Limits limits_;
  std::uint64_t least_page_ = 0;    ///< of the controller
  std::byte* registers_ = nullptr;  ///< BAR0; once released, memory that reads as all ones
  std::mutex lock_;                 ///< over released_
  bool released_ = false;
  Descriptor event_;
  std::uint64_t watch_ = 0;
  Notices notices_;
};

}  // namespace ugds::device
