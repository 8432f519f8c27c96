// SPDX-License-Identifier: Apache-2.0
#include "serve/config_space.hpp"

#include <algorithm>
#include <utility>

#include "emulator/controller.hpp"

namespace ugds::serve {

namespace {

constexpr std::uint32_t kVendor = 0x00, kDevice = 0x02, kCommand = 0x04, kStatus = 0x06, kRevision = 0x08,
                        kClass = 0x09, kCacheLine = 0x0c, kBar0 = 0x10, kBar4 = 0x20, kSubsystemVendor = 0x2c,
                        kSubsystem = 0x2e, kCapabilities = 0x34, kInterruptLine = 0x3c;
constexpr std::uint32_t kPowerAt = 0x40, kExpressAt = 0x50, kMsixAt = 0x90;
constexpr std::uint32_t kMsixControl = kMsixAt + 2, kDeviceControl = kExpressAt + 8;
constexpr std::uint16_t kMsixEnable = 0x8000, kMsixMask = 0x4000;
constexpr std::uint16_t kFunctionReset = 0x8000;
/// Memory and bus master enable, parity and system errors, and INTx disable.
constexpr std::uint16_t kCommandBits = 0x0546;
constexpr std::uint32_t kMemory64 = 0x4;

}  // namespace

ConfigSpace::ConfigSpace(std::uint64_t bar0_size, std::uint32_t vectors) {
  set(kVendor, 2, emulator::kPciVendor);
  set(kDevice, 2, emulator::kPciDevice);
  set(kCommand, 2, 0, kCommandBits);
  set(kStatus, 2, 0x0010);  // there are capabilities
  set(kRevision, 1, 1);
  set(kClass, 3, 0x010802);
  set(kCacheLine, 1, 0, 0xff);
  set(kBar0, 8, kMemory64, ~(bar0_size - 1));
  set(kSubsystemVendor, 2, emulator::kPciVendor);
  set(kSubsystem, 2, emulator::kPciDevice);
  set(kCapabilities, 1, kPowerAt);
  set(kInterruptLine, 1, 0, 0xff);
  set(kPowerAt, 2, 0x01 | kExpressAt << 8);
  set(kPowerAt + 2, 2, 0x0003);          // version 1.2, D0 and D3hot only
  set(kPowerAt + 4, 2, 0x0008, 0x0003);  // no soft reset between them
  add_express();
  if (vectors != 0) add_msix(vectors);
}

void ConfigSpace::add_express() {
  set(kExpressAt, 2, 0x10);
  set(kExpressAt + 2, 2, 0x0002);               // version 2, an endpoint
  set(kExpressAt + 4, 4, 1u << 15 | 1u << 28);  // role-based errors, function level reset
  set(kDeviceControl, 2, 0x2810, 0x7fff);       // 512-byte reads, relaxed ordering, no snoop
  set(kExpressAt + 0x0c, 4, 0x0000'0043);       // four lanes of 8 GT/s
  set(kExpressAt + 0x10, 2, 0, 0x01fb);         // link control
  set(kExpressAt + 0x12, 2, 0x0043);            // link status
  set(kExpressAt + 0x24, 4, 0x0000'001f);       // completion timeouts
  set(kExpressAt + 0x28, 2, 0, 0x001f);
  set(kExpressAt + 0x2c, 4, 0x0000'000e);  // link speeds up to 8 GT/s
  set(kExpressAt + 0x30, 2, 0x0003, 0x003f);
}

void ConfigSpace::add_msix(std::uint32_t vectors) {
  set(kBar4, 8, kMemory64, ~std::uint64_t{kBar4Size - 1});
  set(kExpressAt + 1, 1, kMsixAt);
  set(kMsixAt, 2, 0x11);
  set(kMsixControl, 2, vectors - 1, kMsixEnable | kMsixMask);
  set(kMsixAt + 4, 4, kTable | 4);  // BAR4
  set(kMsixAt + 8, 4, kPending | 4);
}

void ConfigSpace::set(std::uint32_t offset, std::uint32_t bytes, std::uint64_t value, std::uint64_t writable) {
  for (std::uint32_t i = 0; i < bytes; ++i) {
    value_[offset + i] = static_cast<std::byte>(value >> 8 * i);
    writable_[offset + i] = static_cast<std::byte>(writable >> 8 * i);
  }
}

void ConfigSpace::read(std::uint32_t offset, std::span<std::byte> out) const {
  std::copy_n(value_.begin() + offset, out.size(), out.begin());
}

void ConfigSpace::write(std::uint32_t offset, std::span<const std::byte> data) {
  for (std::size_t i = 0; i < data.size(); ++i) {
    std::byte& at = value_[offset + i];
    const std::byte mask = writable_[offset + i];
    at = (at & ~mask) | (data[i] & mask);
    // The bit reads as zero, and starts a reset.
    if (offset + i == kDeviceControl + 1 && (data[i] & std::byte{kFunctionReset >> 8}) != std::byte{0}) reset_ = true;
  }
}

bool ConfigSpace::msix_enabled() const {
  return (value_[kMsixControl + 1] & std::byte{kMsixEnable >> 8}) != std::byte{0};
}

bool ConfigSpace::take_reset() { return std::exchange(reset_, false); }

MsixTable::MsixTable(std::uint32_t vectors) : bytes_(vectors * kEntry) {
  for (std::uint32_t at = kEntry - 4; at < bytes_; at += kEntry) entries_[at] = std::byte{1};  // masked
}

void MsixTable::read(std::uint32_t offset, std::span<std::byte> out) const {
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = offset + i < bytes_ ? entries_[offset + i] : std::byte{0};  // nothing is ever pending
}

void MsixTable::write(std::uint32_t offset, std::span<const std::byte> data) {
  for (std::size_t i = 0; i < data.size() && offset + i < bytes_; ++i) entries_[offset + i] = data[i];
}

}  // namespace ugds::serve
