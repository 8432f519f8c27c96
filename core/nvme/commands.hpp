// SPDX-License-Identifier: Apache-2.0
//
// Commands as submission entries: pure functions. The command identifier is left 0 for the queue to set, and data
// pointers for the PRP construction (prp.hpp), except where the command carries a single page.
#pragma once

#include <bit>
#include <cstdint>

#include "base/units.hpp"
#include "nvme/entries.hpp"
#include "nvme/identify.hpp"

namespace ugds::nvme {

enum class AdminOpcode : std::uint8_t {
  delete_sq = 0x00,
  create_sq = 0x01,
  get_log_page = 0x02,
  delete_cq = 0x04,
  create_cq = 0x05,
  identify = 0x06,
  abort = 0x08,
  set_features = 0x09,
  get_features = 0x0a,
  async_event = 0x0c,
  doorbell_buffer_config = 0x7c,
};

enum class Opcode : std::uint8_t {
  flush = 0x00,
  write = 0x01,
  read = 0x02,
  write_zeroes = 0x08,
  dataset_management = 0x09,
};
/// What the library calls it: "read", "write", "flush", "discard", ...
constexpr const char* opcode_name(Opcode opcode) {
  switch (opcode) {
    case Opcode::read: return "read";
    case Opcode::write: return "write";
    case Opcode::flush: return "flush";
    case Opcode::dataset_management: return "discard";
    case Opcode::write_zeroes: return "write zeroes";
  }
  return "request";
}

enum class Feature : std::uint8_t {
  arbitration = 0x01,
  power_management = 0x02,
  temperature_threshold = 0x04,
  error_recovery = 0x05,
  volatile_write_cache = 0x06,
  number_of_queues = 0x07,
  interrupt_coalescing = 0x08,
  interrupt_vector = 0x09,
  write_atomicity = 0x0a,
  async_events = 0x0b,
};

inline constexpr std::uint32_t kAllNamespaces = 0xffffffffu;
/// CDW12 of Read and Write.
inline constexpr std::uint32_t kForceUnitAccess = 1u << 30;
/// CDW12 of Write Zeroes: the blocks may be deallocated.
inline constexpr std::uint32_t kDeallocate = 1u << 25;
/// CDW11 of Dataset Management.
inline constexpr std::uint32_t kDsmDeallocate = 1u << 2;
/// NLB is 16 bits and 0-based.
inline constexpr std::uint32_t kMaxBlocksPerCommand = 65536;
/// Queue identifiers are 16 bits, 0 is the admin queue, and counts are 0-based: 65534 I/O queues at most.
inline constexpr std::uint32_t kMaxIoQueues = 65534;

constexpr SubmissionEntry identify(Cns cns, std::uint32_t nsid, Iova page) {
  SubmissionEntry e;
  e.opcode = static_cast<std::uint8_t>(AdminOpcode::identify);
  e.nsid = nsid;
  e.prp1 = page.value;
  e.cdw10 = static_cast<std::uint8_t>(cns);
  return e;
}

constexpr SubmissionEntry set_features(Feature feature, std::uint32_t value) {
  SubmissionEntry e;
  e.opcode = static_cast<std::uint8_t>(AdminOpcode::set_features);
  e.cdw10 = static_cast<std::uint8_t>(feature);
  e.cdw11 = value;
  return e;
}

constexpr SubmissionEntry get_features(Feature feature) {
  SubmissionEntry e;
  e.opcode = static_cast<std::uint8_t>(AdminOpcode::get_features);
  e.cdw10 = static_cast<std::uint8_t>(feature);
  return e;
}

/// Feature 07h: submission and completion queues asked for; both halves are 0-based. `count` is clamped to the legal.
constexpr SubmissionEntry set_number_of_queues(std::uint32_t count) {
  if (count < 1) count = 1;
  if (count > kMaxIoQueues) count = kMaxIoQueues;
  return set_features(Feature::number_of_queues, (count - 1) << 16 | (count - 1));
}
/// How many pairs were granted, by dword 0 of the completion.
constexpr std::uint32_t granted_queue_pairs(std::uint32_t result) {
  const std::uint32_t submission = (result & 0xffff) + 1, completion = (result >> 16) + 1;
  return submission < completion ? submission : completion;
}

/// Physically contiguous; `vector` is used only where `interrupts` are asked for.
constexpr SubmissionEntry create_completion_queue(std::uint16_t queue, std::uint32_t entries, Iova ring,
                                                  bool interrupts, std::uint16_t vector) {
  SubmissionEntry e;
  e.opcode = static_cast<std::uint8_t>(AdminOpcode::create_cq);
  e.prp1 = ring.value;
  e.cdw10 = (entries - 1) << 16 | queue;
  e.cdw11 = 1u | (interrupts ? 2u | std::uint32_t{vector} << 16 : 0u);
  return e;
}

constexpr SubmissionEntry create_submission_queue(std::uint16_t queue, std::uint32_t entries, Iova ring,
                                                  std::uint16_t completion_queue) {
  SubmissionEntry e;
  e.opcode = static_cast<std::uint8_t>(AdminOpcode::create_sq);
  e.prp1 = ring.value;
  e.cdw10 = (entries - 1) << 16 | queue;
  e.cdw11 = std::uint32_t{completion_queue} << 16 | 1u;
  return e;
}

constexpr SubmissionEntry delete_submission_queue(std::uint16_t queue) {
  SubmissionEntry e;
  e.opcode = static_cast<std::uint8_t>(AdminOpcode::delete_sq);
  e.cdw10 = queue;
  return e;
}

constexpr SubmissionEntry delete_completion_queue(std::uint16_t queue) {
  SubmissionEntry e;
  e.opcode = static_cast<std::uint8_t>(AdminOpcode::delete_cq);
  e.cdw10 = queue;
  return e;
}

constexpr SubmissionEntry abort(std::uint16_t queue, std::uint16_t cid) {
  SubmissionEntry e;
  e.opcode = static_cast<std::uint8_t>(AdminOpcode::abort);
  e.cdw10 = std::uint32_t{cid} << 16 | queue;
  return e;
}
/// Dword 0 of Abort's completion: bit 0 is clear where the command was aborted.
constexpr bool was_aborted(std::uint32_t result) { return (result & 1) == 0; }

/// Shadow doorbells and event indices (NVMe Base 2.0, 5.8 and B.5): one page each.
constexpr SubmissionEntry doorbell_buffer_config(Iova shadow, Iova event_index) {
  SubmissionEntry e;
  e.opcode = static_cast<std::uint8_t>(AdminOpcode::doorbell_buffer_config);
  e.prp1 = shadow.value;
  e.prp2 = event_index.value;
  return e;
}

/// Read, Write or Write Zeroes of `blocks` (1 to kMaxBlocksPerCommand) from `lba`. `control` goes to CDW12's upper
/// half.
constexpr SubmissionEntry block_command(Opcode opcode, std::uint32_t nsid, Lba lba, std::uint32_t blocks,
                                        std::uint32_t control = 0) {
  SubmissionEntry e;
  e.opcode = static_cast<std::uint8_t>(opcode);
  e.nsid = nsid;
  e.cdw10 = static_cast<std::uint32_t>(lba.value);
  e.cdw11 = static_cast<std::uint32_t>(lba.value >> 32);
  e.cdw12 = (blocks - 1) | control;
  return e;
}

/// The same into an entry of an I/O queue's ring, by words of 64 bits, for a command over one page. `first` is opcode,
/// identifier and namespace. The words that no command of an I/O queue uses (reserved, metadata pointer, dwords 14 and
/// 15) are zero in every entry and stay so.
inline void write_block_command(SubmissionEntry& entry, std::uint64_t first, Lba lba, std::uint32_t blocks,
                                std::uint32_t control, std::uint64_t prp1) {
  static_assert(sizeof entry == 64 && std::endian::native == std::endian::little);
  using Word [[gnu::may_alias]] = std::uint64_t;
  Word* const words = reinterpret_cast<Word*>(&entry);
  words[0] = first;
  words[3] = prp1;
  words[4] = 0;
  words[5] = lba.value;
  words[6] = (blocks - 1) | control;
}

constexpr SubmissionEntry flush(std::uint32_t nsid) {
  SubmissionEntry e;
  e.opcode = static_cast<std::uint8_t>(Opcode::flush);
  e.nsid = nsid;
  return e;
}

/// One range of Dataset Management; up to 256 a command.
struct DsmRange {
  std::uint32_t attributes;
  std::uint32_t blocks;
  std::uint64_t lba;
};
static_assert(sizeof(DsmRange) == 16);
inline constexpr std::uint32_t kMaxDsmRanges = 256;

constexpr SubmissionEntry dataset_management(std::uint32_t nsid, std::uint32_t ranges, std::uint32_t attributes,
                                             Iova list) {
  SubmissionEntry e;
  e.opcode = static_cast<std::uint8_t>(Opcode::dataset_management);
  e.nsid = nsid;
  e.prp1 = list.value;
  e.cdw10 = ranges - 1;
  e.cdw11 = attributes;
  return e;
}

static_assert(set_number_of_queues(65536).cdw11 == (65533u << 16 | 65533u));
static_assert(granted_queue_pairs(0x0003'0007) == 4);
static_assert(create_completion_queue(1, 64, Iova(0), true, 3).cdw11 == 0x0003'0003);
static_assert(block_command(Opcode::read, 1, Lba(0x1'0000'0002), 65536).cdw12 == 0xffff);
static_assert(block_command(Opcode::read, 1, Lba(0x1'0000'0002), 1).cdw11 == 1);

}  // namespace ugds::nvme
