// SPDX-License-Identifier: Apache-2.0
//
// PCI configuration space of the served controller (PCI Express Base 5.0, 7.5 and 7.7): an NVMe controller with MSI-X.
// BAR0 has the registers and doorbells, BAR4 the MSI-X table and its pending bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ugds::serve {

class ConfigSpace {
 public:
  static constexpr std::uint32_t kSize = 4096;
  /// In BAR4.
  static constexpr std::uint32_t kTable = 0, kPending = 0x8000, kBar4Size = 0x10000;

  /// `bar0_size` is a power of two. Without `vectors` there is no MSI-X.
  ConfigSpace(std::uint64_t bar0_size, std::uint32_t vectors);

  /// The caller keeps to [0, kSize).
  void read(std::uint32_t offset, std::span<std::byte> out) const;
  /// What is read-only stays as it is.
  void write(std::uint32_t offset, std::span<const std::byte> data);

  bool msix_enabled() const;
  /// Whether a function level reset was asked for since the last call.
  bool take_reset();

 private:
  void set(std::uint32_t offset, std::uint32_t bytes, std::uint64_t value, std::uint64_t writable = 0);
  void add_msix(std::uint32_t vectors);
  void add_express();

  std::array<std::byte, kSize> value_{}, writable_{};
  bool reset_ = false;
};

/// The MSI-X table, which is only kept: a client's eventfds come by messages, and take no notice of addresses or masks.
class MsixTable {
 public:
  explicit MsixTable(std::uint32_t vectors);
  /// The caller keeps to [0, ConfigSpace::kBar4Size).
  void read(std::uint32_t offset, std::span<std::byte> out) const;
  void write(std::uint32_t offset, std::span<const std::byte> data);

 private:
  static constexpr std::uint32_t kEntry = 16;
  std::array<std::byte, ConfigSpace::kPending> entries_{};
  std::uint32_t bytes_;
};

}  // namespace ugds::serve
