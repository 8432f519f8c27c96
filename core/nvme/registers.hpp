// SPDX-License-Identifier: Apache-2.0
//
// Controller registers (NVMe Base 2.0, 3.1.3) and doorbells (NVMe over PCIe Transport 1.0, 3.1.2).
#pragma once

#include <cstdint>

namespace ugds::nvme {

/// Byte offsets into BAR0.
enum class Register : std::uint32_t {
  cap = 0x00,    ///< Controller Capabilities, 64 bits
  vs = 0x08,     ///< Version
  intms = 0x0c,  ///< Interrupt Mask Set
  intmc = 0x10,  ///< Interrupt Mask Clear
  cc = 0x14,     ///< Controller Configuration
  csts = 0x1c,   ///< Controller Status
  nssr = 0x20,   ///< NVM Subsystem Reset
  aqa = 0x24,    ///< Admin Queue Attributes
  asq = 0x28,    ///< Admin Submission Queue Base Address, 64 bits
  acq = 0x30,    ///< Admin Completion Queue Base Address, 64 bits
};

inline constexpr std::uint32_t kDoorbellBase = 0x1000;

/// What every register reads once the device has gone from the bus.
inline constexpr std::uint32_t kAllOnes32 = 0xffffffffu;
inline constexpr std::uint64_t kAllOnes64 = ~std::uint64_t{0};

/// A field of `width` bits at `shift`.
template <unsigned shift, unsigned width, class Raw>
constexpr Raw field(Raw raw) {
  return (raw >> shift) & ((Raw{1} << width) - 1);
}
template <unsigned shift, unsigned width, class Raw>
constexpr Raw with_field(Raw raw, Raw value) {
  constexpr Raw mask = ((Raw{1} << width) - 1) << shift;
  return (raw & ~mask) | ((value << shift) & mask);
}

/// CAP.
struct Capabilities {
  std::uint64_t raw = 0;

  /// Entries that an I/O queue may have at most (MQES is 0-based).
  constexpr std::uint32_t max_queue_entries() const { return static_cast<std::uint32_t>(field<0, 16>(raw)) + 1; }
  /// Queues must be physically contiguous.
  constexpr bool contiguous_queues_required() const { return field<16, 1>(raw) != 0; }
  /// Longest wait for CSTS.RDY to follow CC.EN, in milliseconds (TO counts 500 ms).
  constexpr std::uint32_t ready_timeout_ms() const { return static_cast<std::uint32_t>(field<24, 8>(raw)) * 500; }
  /// Bytes between two doorbells.
  constexpr std::uint32_t doorbell_stride() const { return 4u << field<32, 4>(raw); }
  constexpr bool nvm_command_set() const { return field<37, 1>(raw) != 0; }
  constexpr std::uint64_t min_page_size() const { return std::uint64_t{4096} << field<48, 4>(raw); }
  constexpr std::uint64_t max_page_size() const { return std::uint64_t{4096} << field<52, 4>(raw); }

  struct Fields {
    std::uint32_t max_queue_entries = 1024;
    bool contiguous_queues_required = false;
    std::uint32_t ready_timeout_units = 2;  ///< of 500 ms
    std::uint32_t doorbell_stride_power = 0;
    std::uint32_t min_page_power = 0, max_page_power = 0;  ///< over 4 KiB
  };
  static constexpr Capabilities make(const Fields& f) {
    std::uint64_t raw = 0;
    raw = with_field<0, 16>(raw, std::uint64_t{f.max_queue_entries} - 1);
    raw = with_field<16, 1>(raw, std::uint64_t{f.contiguous_queues_required});
    raw = with_field<24, 8>(raw, std::uint64_t{f.ready_timeout_units});
    raw = with_field<32, 4>(raw, std::uint64_t{f.doorbell_stride_power});
    raw = with_field<37, 1>(raw, std::uint64_t{1});
    raw = with_field<48, 4>(raw, std::uint64_t{f.min_page_power});
    raw = with_field<52, 4>(raw, std::uint64_t{f.max_page_power});
    return {raw};
  }
};

/// CC. Entry sizes are always 64 and 16 bytes, arbitration round robin.
struct Configuration {
  std::uint32_t raw = 0;

  constexpr bool enabled() const { return field<0, 1>(raw) != 0; }
  constexpr std::uint32_t command_set() const { return field<4, 3>(raw); }
  constexpr std::uint64_t page_size() const { return std::uint64_t{4096} << field<7, 4>(raw); }
  constexpr std::uint32_t shutdown_notification() const { return field<14, 2>(raw); }
  constexpr std::uint32_t submission_entry_power() const { return field<16, 4>(raw); }
  constexpr std::uint32_t completion_entry_power() const { return field<20, 4>(raw); }

  constexpr Configuration with_enabled(bool on) const { return {with_field<0, 1>(raw, std::uint32_t{on})}; }
  /// 1: normal shutdown, 2: abrupt.
  constexpr Configuration with_shutdown(std::uint32_t kind) const { return {with_field<14, 2>(raw, kind)}; }

  static constexpr Configuration make(std::uint64_t page_size) {
    std::uint32_t power = 0;
    while ((std::uint64_t{4096} << power) < page_size) ++power;
    std::uint32_t raw = 0;
    raw = with_field<7, 4>(raw, power);
    raw = with_field<16, 4>(raw, 6u);
    raw = with_field<20, 4>(raw, 4u);
    return {raw};
  }
};

/// CSTS.
struct ControllerStatus {
  std::uint32_t raw = 0;

  constexpr bool ready() const { return field<0, 1>(raw) != 0; }
  constexpr bool fatal() const { return field<1, 1>(raw) != 0; }
  /// 0: none, 1: in progress, 2: complete.
  constexpr std::uint32_t shutdown_status() const { return field<2, 2>(raw); }
  /// The device does not answer on the bus any more.
  constexpr bool gone() const { return raw == kAllOnes32; }

  constexpr ControllerStatus with_ready(bool on) const { return {with_field<0, 1>(raw, std::uint32_t{on})}; }
  constexpr ControllerStatus with_fatal(bool on) const { return {with_field<1, 1>(raw, std::uint32_t{on})}; }
  constexpr ControllerStatus with_shutdown_status(std::uint32_t s) const { return {with_field<2, 2>(raw, s)}; }
};

/// AQA: both admin queues' sizes, 0-based in the register.
struct AdminQueueAttributes {
  std::uint32_t raw = 0;

  constexpr std::uint32_t submission_entries() const { return field<0, 12>(raw) + 1; }
  constexpr std::uint32_t completion_entries() const { return field<16, 12>(raw) + 1; }
  static constexpr AdminQueueAttributes make(std::uint32_t submission, std::uint32_t completion) {
    return {((completion - 1) << 16) | (submission - 1)};
  }
};

/// Byte offset in BAR0 of a queue's doorbell. `stride` is Capabilities::doorbell_stride().
constexpr std::uint32_t submission_doorbell(std::uint32_t queue, std::uint32_t stride) {
  return kDoorbellBase + 2 * queue * stride;
}
constexpr std::uint32_t completion_doorbell(std::uint32_t queue, std::uint32_t stride) {
  return kDoorbellBase + (2 * queue + 1) * stride;
}

static_assert(Capabilities::make({.max_queue_entries = 65536}).max_queue_entries() == 65536);
static_assert(Capabilities::make({.doorbell_stride_power = 3}).doorbell_stride() == 32);
static_assert(Configuration::make(4096).raw == 0x00460000);
static_assert(Configuration::make(65536).page_size() == 65536);
static_assert(AdminQueueAttributes::make(32, 16).raw == 0x000f001f);
static_assert(submission_doorbell(3, 4) == 0x1018 && completion_doorbell(3, 4) == 0x101c);

}  // namespace ugds::nvme
