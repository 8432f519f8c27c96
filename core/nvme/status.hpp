// SPDX-License-Identifier: Apache-2.0
//
// Status codes (NVMe Base 2.0, 4.2.3; NVM Command Set 1.0). A status is the type in bits 10:8 and the code in 7:0.
#pragma once

#include <cstdint>

namespace ugds::nvme {

enum class StatusType : std::uint8_t { generic = 0, command_specific = 1, media = 2, path = 3, vendor = 7 };

constexpr std::uint16_t make_status(StatusType type, std::uint8_t code) {
  return static_cast<std::uint16_t>(static_cast<std::uint16_t>(type) << 8 | code);
}

/// The codes that this library's code names.
namespace status {
inline constexpr std::uint16_t success = 0x000;
inline constexpr std::uint16_t invalid_opcode = 0x001;
inline constexpr std::uint16_t invalid_field = 0x002;
inline constexpr std::uint16_t command_id_conflict = 0x003;
inline constexpr std::uint16_t data_transfer_error = 0x004;
inline constexpr std::uint16_t aborted_power_loss = 0x005;
inline constexpr std::uint16_t internal_error = 0x006;
inline constexpr std::uint16_t abort_requested = 0x007;
inline constexpr std::uint16_t aborted_sq_deletion = 0x008;
inline constexpr std::uint16_t invalid_namespace = 0x00b;
inline constexpr std::uint16_t command_sequence_error = 0x00c;
inline constexpr std::uint16_t invalid_prp_offset = 0x013;
inline constexpr std::uint16_t namespace_write_protected = 0x020;
inline constexpr std::uint16_t lba_out_of_range = 0x080;
inline constexpr std::uint16_t capacity_exceeded = 0x081;
inline constexpr std::uint16_t namespace_not_ready = 0x082;
inline constexpr std::uint16_t invalid_completion_queue = 0x100;
inline constexpr std::uint16_t invalid_queue_id = 0x101;
inline constexpr std::uint16_t invalid_queue_size = 0x102;
inline constexpr std::uint16_t abort_limit_exceeded = 0x103;
inline constexpr std::uint16_t invalid_interrupt_vector = 0x108;
inline constexpr std::uint16_t invalid_queue_deletion = 0x10c;
inline constexpr std::uint16_t feature_not_saveable = 0x10d;
inline constexpr std::uint16_t write_fault = 0x280;
inline constexpr std::uint16_t unrecovered_read_error = 0x281;
/// "Command aborted by host", which no device sends: of what a recovery has ended.
inline constexpr std::uint16_t aborted_by_host = 0x371;
}  // namespace status

/// A status in words, such as "media error: unrecovered read error (0x281)". The string is static where the code is
/// known, else one for each thread, overwritten by the next call. Thread-safe.
const char* status_words(std::uint16_t status);

/// The errno that callers get for a status: EIO for media and path, EINVAL for what the host did wrong, and so on.
int status_errno(std::uint16_t status);

/// What a person can do about it; "" where nothing useful can be said.
const char* status_hint(std::uint16_t status);

}  // namespace ugds::nvme
