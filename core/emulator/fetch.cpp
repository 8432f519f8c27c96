// SPDX-License-Identifier: Apache-2.0
//
// Submission entries become commands: identifiers, reserved fields, and the memory that PRPs name (NVMe Base 2.0,
// 4.1.1).
#include <algorithm>
#include <cstring>

#include "base/units.hpp"
#include "emulator/impl.hpp"

namespace ugds::emulator {

namespace {

using nvme::Opcode;

void append(std::vector<Transfer::Piece>& pieces, std::uint64_t iova, std::uint64_t bytes) {
  if (!pieces.empty() && pieces.back().iova + pieces.back().bytes == iova) {
    pieces.back().bytes += bytes;
  } else {
    pieces.push_back({iova, bytes});
  }
}

struct ReservedBits {
  std::uint32_t cdw10, cdw11, cdw12, cdw13, cdw14, cdw15;
};

/// Bits that the NVM command set leaves reserved where there is no protection information and there are no directives.
ReservedBits reserved_bits(Opcode opcode) {
  constexpr std::uint32_t kAll = ~0u;
  switch (opcode) {
    case Opcode::flush: return {kAll, kAll, kAll, kAll, kAll, kAll};
    case Opcode::read:
    case Opcode::write: return {0, 0, 0x03ff'0000, 0xffff'ff00, kAll, kAll};
    case Opcode::write_zeroes: return {0, 0, 0x01ff'0000, kAll, kAll, kAll};
    case Opcode::dataset_management: return {0xffff'ff00, 0xffff'fff8, kAll, kAll, kAll, kAll};
  }
  return {};
}

/// The same for admin commands.
ReservedBits reserved_bits(nvme::AdminOpcode opcode) {
  using enum nvme::AdminOpcode;
  constexpr std::uint32_t kAll = ~0u;
  switch (opcode) {
    case delete_sq:
    case delete_cq: return {0xffff'0000, kAll, kAll, kAll, kAll, kAll};
    case create_sq: return {0, 0x0000'fff8, 0xffff'0000, kAll, kAll, kAll};
    case create_cq: return {0, 0x0000'fffc, kAll, kAll, kAll, kAll};
    case identify: return {0x0000'ff00, 0, kAll, kAll, 0xffff'ff80, kAll};
    case abort: return {0, kAll, kAll, kAll, kAll, kAll};
    case async_event:
    case doorbell_buffer_config: return {kAll, kAll, kAll, kAll, kAll, kAll};
    default: return {};
  }
}

}  // namespace

Command& Controller::Impl::allocate() {
  if (spare.empty()) {
    live.reserve(commands.size() + 1);
    spare.reserve(commands.size() + 1);
    commands.push_back(std::make_unique<Command>());
    spare.push_back(commands.back().get());
  }
  Command& command = *spare.back();
  spare.pop_back();
  command.live_at = static_cast<std::uint32_t>(live.size());
  live.push_back(&command);
  command.stage = Command::Stage::waiting;
  command.direction = Direction::none;
  command.status = 0;
  command.has_fault = command.is_event_request = false;
  command.sequence = next_sequence++;
  command.due = command.length = command.lba = command.blocks = 0;
  command.transfer.clear();
  return command;
}

void Controller::Impl::release(Command& command) {
  if (!command.admin()) ++free_slots;
  if (command.is_event_request) --event_requests;
  if (command.has_fault && command.fault.kind == Fault::Kind::late_write) --late_writers;
  live[command.live_at] = live.back();
  live[command.live_at]->live_at = command.live_at;
  live.pop_back();
  command.stage = Command::Stage::free;
  command.has_fault = command.is_event_request = false;
  command.sequence = 0;
  spare.push_back(&command);
}

bool Controller::Impl::fetch(SubmissionQueue& queue, std::uint32_t most) {
  bool worked = false;
  if (queue.id != 0) most = std::min(most, free_slots);
  for (; most != 0 && queue.head != queue.tail; --most) {
    nvme::SubmissionEntry entry;
    const Access access = memory.read(queue.ring.at(std::uint64_t{queue.head} * sizeof entry), &entry, sizeof entry);
    if (!access) {
      report(access, "a submission entry");
      fail_fatally();
      return true;
    }
    if (++queue.head == queue.depth) queue.head = 0;
    worked = true;
    accept(queue, entry);
    if (state != State::ready || removed.load(std::memory_order_relaxed)) break;
  }
  return worked;
}

void Controller::Impl::accept(SubmissionQueue& queue, const nvme::SubmissionEntry& entry) {
  if (queue.is_in_flight(entry.cid)) {
    violations.add("duplicate-cid", "submission queue %u: command identifier %u is in flight", queue.id, entry.cid);
    Posting posting;
    posting.sq = queue.id;
    posting.cid = entry.cid;
    posting.status = nvme::status::command_id_conflict;
    posting.frees_cid = false;
    return post(*completion[queue.completion_queue], posting);
  }
  Command& command = allocate();
  command.entry = entry;
  command.sq = queue.id;
  if (!command.admin()) --free_slots;
  queue.set_in_flight(entry.cid);
  command.status = queue.id == 0 ? prepare_admin(command) : prepare_io(command);
  if (!command.transfer.lists.empty()) check_lists(command);
  if (!faults.empty()) accept_fault(command);
  if (command.stage == Command::Stage::waiting && state == State::ready) schedule(command);
}

void Controller::Impl::accept_fault(Command& command) {
  const std::optional<Fault> fault = faults.match(
      {command.admin(), command.entry.opcode, command.blocks != 0, command.lba, command.blocks, command.entry.cdw10});
  if (!fault) return;
  command.has_fault = true;
  command.fault = *fault;
  switch (fault->kind) {
    case Fault::Kind::late_write:
      ++late_writers;
      command.stage = Command::Stage::held;
      break;
    case Fault::Kind::hang: command.stage = Command::Stage::held; break;
    case Fault::Kind::fatal: fail_fatally(); break;
    case Fault::Kind::remove:
      // Its commands and queues are dropped when nobody looks at them any more: at the end of the turn.
      command.stage = Command::Stage::held;
      removed.store(true, std::memory_order_release);
      break;
    case Fault::Kind::spurious_interrupt:
      if (const CompletionQueue& queue = *completion[submission[command.sq]->completion_queue]; queue.interrupts)
        raised.push_back(queue.vector);
      break;
    default: break;
  }
}

bool Controller::Impl::check_reserved(const Command& command) {
  const nvme::SubmissionEntry& e = command.entry;
  if ((e.flags & 0x3) != 0 || (e.flags & 0xc0) != 0) {
    violations.add("reserved-field", "opcode 0x%x: flags 0x%x ask for fused operation or SGLs", e.opcode, e.flags);
    return false;
  }
  const ReservedBits bits = command.admin() ? reserved_bits(static_cast<nvme::AdminOpcode>(e.opcode))
                                            : reserved_bits(static_cast<Opcode>(e.opcode));
  const bool clean = (e.flags & 0x3c) == 0 && e.cdw2 == 0 && e.cdw3 == 0 && (e.cdw10 & bits.cdw10) == 0 &&
                     (e.cdw11 & bits.cdw11) == 0 && (e.cdw12 & bits.cdw12) == 0 && (e.cdw13 & bits.cdw13) == 0 &&
                     (e.cdw14 & bits.cdw14) == 0 && (e.cdw15 & bits.cdw15) == 0;
  // A controller need not look at them; ours does, and goes on.
  if (!clean) violations.add("reserved-field", "opcode 0x%x has reserved bits set", e.opcode);
  return true;
}

std::uint16_t Controller::Impl::read_prps(Command& command, std::uint64_t prp1, std::uint64_t prp2,
                                          std::uint64_t length) {
  Transfer& transfer = command.transfer;
  if (length == 0) return nvme::status::success;
  if (!is_aligned(prp1, 4)) {
    violations.add("prp-alignment", "PRP1 0x%llx is not dword-aligned", static_cast<unsigned long long>(prp1));
    return nvme::status::invalid_prp_offset;
  }
  const std::uint64_t first = std::min(length, page_size - (prp1 & (page_size - 1)));
  append(transfer.data, prp1, first);
  const std::uint64_t remaining = length - first;
  if (remaining == 0) return nvme::status::success;
  if (remaining > page_size) return read_lists(transfer, prp2, remaining);
  if (!is_aligned(prp2, page_size)) {
    violations.add("prp-alignment", "PRP2 0x%llx has an offset in its page", static_cast<unsigned long long>(prp2));
    return nvme::status::invalid_prp_offset;
  }
  append(transfer.data, prp2, remaining);
  return nvme::status::success;
}

std::uint16_t Controller::Impl::read_lists(Transfer& transfer, std::uint64_t list, std::uint64_t remaining) {
  bool chained = false;
  while (remaining != 0) {
    if (!is_aligned(list, chained ? page_size : 8)) {
      violations.add("prp-list", "%s 0x%llx is misaligned", chained ? "the pointer to the next list" : "list pointer",
                     static_cast<unsigned long long>(list));
      return nvme::status::invalid_prp_offset;
    }
    // Only what the transfer needs is read. The last entry of a list's page is a pointer to the next list where more
    // than one memory page remains, and an ordinary entry where just one does.
    const std::uint64_t room = (page_size - (list & (page_size - 1))) / 8;
    const std::uint64_t needed = (remaining + page_size - 1) / page_size;
    const std::uint64_t count = std::min(room, needed);
    const std::size_t from = transfer.entries.size();
    transfer.entries.resize(from + count);
    transfer.lists.push_back({list, count * 8});
    if (const Access access = memory.read(list, transfer.entries.data() + from, count * 8); !access) {
      transfer.lists.pop_back();
      transfer.entries.resize(from);
      return report(access, "a PRP list");
    }
    const std::uint64_t addresses = needed > room ? count - 1 : count;
    const std::uint64_t* const entries = transfer.entries.data() + from;
    for (std::uint64_t i = 0, run; i < addresses; i += run) {
      const std::uint64_t entry = entries[i];
      if (!is_aligned(entry, page_size)) {
        violations.add("prp-alignment", "PRP list entry 0x%llx has an offset in its page",
                       static_cast<unsigned long long>(entry));
        return nvme::status::invalid_prp_offset;
      }
      for (run = 1; i + run < addresses && entries[i + run] == entry + run * page_size;) ++run;
      const std::uint64_t bytes = std::min(remaining, run * page_size);
      append(transfer.data, entry, bytes);
      remaining -= bytes;
    }
    if (remaining != 0) list = transfer.entries.back();
    chained = true;
  }
  return nvme::status::success;
}

void Controller::Impl::check_lists(const Command& command) {
  for (const Command* other : live) {
    if (other == &command || other->transfer.lists.empty()) continue;
    for (const Transfer::Piece& mine : command.transfer.lists) {
      for (const Transfer::Piece& theirs : other->transfer.lists) {
        if (!overlap(mine, theirs)) continue;
        violations.add("list-overlap", "commands %u on queue %u and %u on queue %u share list memory at 0x%llx",
                       command.entry.cid, command.sq, other->entry.cid, other->sq,
                       static_cast<unsigned long long>(std::max(mine.iova, theirs.iova)));
        return;
      }
    }
  }
}

void Controller::Impl::check_lists_unchanged(const Command& command) {
  const std::uint64_t* expected = command.transfer.entries.data();
  for (const Transfer::Piece& list : command.transfer.lists) {
    bool same = true;
    const Access access = memory.runs(list.iova, list.bytes, false, [&](const std::byte* at, std::uint64_t bytes) {
      same = same && std::memcmp(at, expected, bytes) == 0;
      expected += bytes / 8;
      return true;
    });
    if (!access) {
      report(access, "a PRP list at completion");
      return;
    }
    if (same) continue;
    violations.add("list-changed", "the PRP list at 0x%llx of command %u on queue %u changed while it was in flight",
                   static_cast<unsigned long long>(list.iova), command.entry.cid, command.sq);
    return;
  }
}

}  // namespace ugds::emulator
