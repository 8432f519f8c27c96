// SPDX-License-Identifier: Apache-2.0
//
// Submission and completion queue entries (NVMe Base 2.0, 3.3.3).
#pragma once

#include <cstddef>
#include <cstdint>

namespace ugds::nvme {

struct alignas(64) SubmissionEntry {
  std::uint8_t opcode = 0;
  std::uint8_t flags = 0;  ///< FUSE in 1:0, PSDT in 7:6; ours are 0: not fused, PRPs
  std::uint16_t cid = 0;   ///< command identifier, unique among those in flight on this queue
  std::uint32_t nsid = 0;
  std::uint32_t cdw2 = 0;
  std::uint32_t cdw3 = 0;
  std::uint64_t metadata = 0;
  std::uint64_t prp1 = 0;
  std::uint64_t prp2 = 0;
  std::uint32_t cdw10 = 0;
  std::uint32_t cdw11 = 0;
  std::uint32_t cdw12 = 0;
  std::uint32_t cdw13 = 0;
  std::uint32_t cdw14 = 0;
  std::uint32_t cdw15 = 0;
};
static_assert(sizeof(SubmissionEntry) == 64);
static_assert(offsetof(SubmissionEntry, prp1) == 24);
static_assert(offsetof(SubmissionEntry, cdw10) == 40);

/// The last dword carries the phase bit: it is read first, with acquire, and written last, with release.
struct alignas(16) CompletionEntry {
  std::uint32_t result = 0;  ///< dword 0, command specific
  std::uint32_t result_high = 0;
  std::uint16_t sq_head = 0;  ///< the submission queue's head when this was written
  std::uint16_t sq_id = 0;
  std::uint32_t last = 0;  ///< CID in 15:0, phase in 16, status in 31:17
};
static_assert(sizeof(CompletionEntry) == 16);
static_assert(offsetof(CompletionEntry, last) == 12);

/// The last dword of a completion.
struct CompletionWord {
  std::uint32_t raw = 0;

  constexpr std::uint16_t cid() const { return static_cast<std::uint16_t>(raw); }
  constexpr bool phase() const { return (raw >> 16 & 1) != 0; }
  /// Status type in bits 10:8 and code in 7:0, without "more" and "do not retry". 0 is success.
  constexpr std::uint16_t status() const { return static_cast<std::uint16_t>(raw >> 17 & 0x7ff); }
  constexpr bool succeeded() const { return (raw & 0x7ffu << 17) == 0; }
  constexpr bool do_not_retry() const { return (raw >> 31) != 0; }

  static constexpr CompletionWord make(std::uint16_t cid, bool phase, std::uint16_t status, bool do_not_retry = false) {
    return {std::uint32_t{cid} | std::uint32_t{phase} << 16 | std::uint32_t{status} << 17 |
            std::uint32_t{do_not_retry} << 31};
  }
};
static_assert(CompletionWord::make(7, true, 0x281, true).status() == 0x281);
static_assert(CompletionWord::make(7, true, 0x281, true).do_not_retry());
static_assert(CompletionWord::make(0xffff, false, 0x7ff).cid() == 0xffff);

}  // namespace ugds::nvme
