// SPDX-License-Identifier: Apache-2.0
//
// Commands of the NVM command set (NVM Command Set 1.0, 3).
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "base/units.hpp"
#include "emulator/impl.hpp"

namespace ugds::emulator {

namespace status = nvme::status;
using nvme::Opcode;

namespace {

std::uint16_t write_status(int error) {
  if (error == 0) return status::success;
  return error == ENOSPC || error == EDQUOT || error == EFBIG ? status::capacity_exceeded : status::write_fault;
}

bool forces_unit_access(const Command& command) { return (command.entry.cdw12 & nvme::kForceUnitAccess) != 0; }

}  // namespace

std::uint16_t Controller::Impl::report(const Access& access, const char* what) {
  const auto at = static_cast<unsigned long long>(access.at);
  switch (access.kind) {
    case Access::Kind::read_only: violations.add("read-only-access", "%s at IOVA 0x%llx", what, at); break;
    case Access::Kind::foreign:
      violations.add("foreign-access", "%s at IOVA 0x%llx, in memory that holds data alone", what, at);
      break;
    default: violations.add("unmapped-access", "%s at IOVA 0x%llx", what, at); break;
  }
  return status::data_transfer_error;
}

/// For admin commands, whose pages a host looks at itself.
std::uint16_t Controller::Impl::send(const Transfer& transfer, const void* data, std::uint64_t bytes) {
  auto* from = static_cast<const std::byte*>(data);
  for (const Transfer::Piece& piece : transfer.data) {
    const std::uint64_t part = std::min(bytes, piece.bytes);
    if (const Access access = memory.write(piece.iova, from, part); !access)
      return report(access, "an admin command's page");
    from += part;
    bytes -= part;
  }
  return status::success;
}

std::uint16_t Controller::Impl::receive(const Transfer& transfer, void* data, std::uint64_t bytes) {
  auto* to = static_cast<std::byte*>(data);
  for (const Transfer::Piece& piece : transfer.data) {
    const std::uint64_t part = std::min(bytes, piece.bytes);
    int error = 0;
    auto take = [&](const std::byte* from, std::uint64_t run, Copier* copier) {
      if (copier == nullptr) {
        std::memcpy(to, from, run);
      } else {
        error = copier->copy_out(to, reinterpret_cast<std::uintptr_t>(from), run);
      }
      to += run;
      return error == 0;
    };
    const Access access = memory.data_runs(piece.iova, part, false, take);
    if (!access) return report(access, "a data buffer");
    if (error != 0) return status::data_transfer_error;
    bytes -= part;
  }
  return status::success;
}

std::uint16_t Controller::Impl::prepare_io(Command& command) {
  const nvme::SubmissionEntry& e = command.entry;
  const auto opcode = static_cast<Opcode>(e.opcode);
  const Geometry& g = subsystem->geometry();
  const bool moves_data = opcode == Opcode::read || opcode == Opcode::write;
  const bool has_range = moves_data || opcode == Opcode::write_zeroes;
  if (has_range) {
    command.lba = e.cdw10 | std::uint64_t{e.cdw11} << 32;
    command.blocks = std::uint64_t{e.cdw12 & 0xffff} + 1;
  }
  const bool known = moves_data || opcode == Opcode::flush || (opcode == Opcode::write_zeroes && options.zeroes) ||
                     (opcode == Opcode::dataset_management && options.dsm);
  if (!known) return status::invalid_opcode;
  const bool everywhere = opcode == Opcode::flush && e.nsid == nvme::kAllNamespaces;
  if ((e.nsid < 1 || e.nsid > g.namespaces) && !everywhere) {
    violations.add("nsid", "opcode 0x%x for namespace %u of %u", e.opcode, e.nsid, g.namespaces);
    return status::invalid_namespace;
  }
  if (!check_reserved(command)) return status::invalid_field;
  if (opcode == Opcode::dataset_management) {
    command.direction = Direction::from_host;
    command.length = (std::uint64_t{e.cdw10 & 0xff} + 1) * sizeof(nvme::DsmRange);
    return read_prps(command, e.prp1, e.prp2, command.length);
  }
  if (moves_data) {
    command.length = command.blocks * g.unit();
    const std::uint64_t most = std::uint64_t{4096} << options.mpsmin << options.mdts;
    if (options.mdts != 0 && command.length > most) {
      violations.add("mdts", "%llu bytes, and MDTS allows %llu", static_cast<unsigned long long>(command.length),
                     static_cast<unsigned long long>(most));
      return status::invalid_field;
    }
  }
  if (has_range && (command.lba >= g.blocks || command.blocks > g.blocks - command.lba))
    return status::lba_out_of_range;
  if (!moves_data) return status::success;
  command.direction = opcode == Opcode::read ? Direction::to_host : Direction::from_host;
  if (g.separate() != 0) {
    if (!is_aligned(e.metadata, 4)) {
      violations.add("prp-alignment", "MPTR 0x%llx is not dword-aligned", static_cast<unsigned long long>(e.metadata));
      return status::invalid_field;
    }
    command.transfer.metadata = {e.metadata, command.blocks * g.separate()};
  }
  return read_prps(command, e.prp1, e.prp2, command.length);
}

std::uint16_t Controller::Impl::execute_io(Command& command) {
  const nvme::SubmissionEntry& e = command.entry;
  switch (static_cast<Opcode>(e.opcode)) {
    case Opcode::read: return read_blocks(command);
    case Opcode::write: return write_blocks(command);
    case Opcode::dataset_management: return manage_dataset(command);
    case Opcode::flush:
      ++counters.flushes;
      return write_status(subsystem->flush(e.nsid == nvme::kAllNamespaces ? 0 : e.nsid));
    case Opcode::write_zeroes:
      return write_status(
          subsystem->discard(e.nsid, command.lba, command.blocks, forces_unit_access(command) || is_durable()));
  }
  return status::invalid_opcode;
}

/// Every byte is reachable, or nothing is moved.
std::uint16_t Controller::Impl::check_memory(const Command& command) {
  const bool write = command.direction == Direction::to_host;
  for (const Transfer::Piece& piece : command.transfer.data)
    if (const Access access = memory.check_data(piece.iova, piece.bytes, write); !access)
      return report(access, "a data buffer");
  const Transfer::Piece& metadata = command.transfer.metadata;
  if (const Access access = memory.check_data(metadata.iova, metadata.bytes, write); !access)
    return report(access, "a metadata buffer");
  return status::success;
}

/// All of a read's or a write's data, which `check_memory` has found reachable. The controller's lock is held, though a
/// copier can take milliseconds: registers that are read, and doorbells, need no lock, while a register write, mapping
/// and unmapping wait for one command at most. Without the lock, memory could be unmapped under the copy.
Moved Controller::Impl::move(const Command& command, Media& media) {
  const Geometry& g = subsystem->geometry();
  const bool write = command.direction == Direction::to_host;
  std::uint64_t at = g.data_at(command.entry.nsid, command.lba);
  Moved moved;
  auto take = [&](std::byte* pointer, std::uint64_t bytes, Copier* copier) {
    moved = mover.move(media, command.direction, at, pointer, bytes, copier);
    at += bytes;
    return static_cast<bool>(moved);
  };
  if (mover.shares(command.length)) [[unlikely]] {
    moved = move_shared(command, media, at);
  } else {
    for (const Transfer::Piece& piece : command.transfer.data) {
      memory.data_runs(piece.iova, piece.bytes, write, take);
      if (!moved) break;
    }
  }
  const Transfer::Piece& metadata = command.transfer.metadata;
  if (!moved || metadata.bytes == 0) return moved;
  at = g.metadata_at(command.entry.nsid, command.lba);
  memory.data_runs(metadata.iova, metadata.bytes, write, take);
  return moved;
}

Moved Controller::Impl::move_shared(const Command& command, Media& media, std::uint64_t at) {
  Moved moved;
  auto together = [&] {
    const std::uint64_t bytes = mover.added();
    moved = mover.move_together(media, command.direction, at, subsystem->geometry().unit());
    at += bytes;
    return static_cast<bool>(moved);
  };
  auto take = [&](std::byte* pointer, std::uint64_t bytes, Copier* copier) {
    return mover.add(pointer, bytes, copier) || (together() && mover.add(pointer, bytes, copier));
  };
  const bool write = command.direction == Direction::to_host;
  for (const Transfer::Piece& piece : command.transfer.data) {
    memory.data_runs(piece.iova, piece.bytes, write, take);
    if (!moved) return moved;
  }
  together();
  return moved;
}

std::uint16_t Controller::Impl::read_blocks(Command& command) {
  if (const std::uint16_t failed = check_memory(command); failed != 0) return failed;
  const Moved moved = move(command, subsystem->media());
  if (moved.memory != 0) return status::data_transfer_error;
  if (moved.media != 0) return status::unrecovered_read_error;
  ++counters.reads;
  counters.bytes_read += command.length;
  return status::success;
}

std::uint16_t Controller::Impl::write_blocks(Command& command) {
  if (const std::uint16_t failed = check_memory(command); failed != 0) return failed;
  const bool durable = forces_unit_access(command) || is_durable();
  Moved moved;
  const int failed = subsystem->change(command.entry.nsid, command.lba, command.blocks, durable, [&](Media& media) {
    moved = move(command, media);
    return moved.memory != 0 ? moved.memory : moved.media;
  });
  if (moved.memory != 0) return status::data_transfer_error;
  if (failed != 0) return write_status(failed);
  ++counters.writes;
  counters.bytes_written += command.length;
  return status::success;
}

std::uint16_t Controller::Impl::manage_dataset(const Command& command) {
  std::vector<nvme::DsmRange> ranges(command.length / sizeof(nvme::DsmRange));
  if (const std::uint16_t failed = receive(command.transfer, ranges.data(), command.length); failed != 0) return failed;
  const std::uint64_t blocks = subsystem->geometry().blocks;
  for (const nvme::DsmRange& range : ranges)
    if (range.lba > blocks || range.blocks > blocks - range.lba) return status::lba_out_of_range;
  if ((command.entry.cdw11 & nvme::kDsmDeallocate) == 0) return status::success;
  for (const nvme::DsmRange& range : ranges) {
    const int error = subsystem->discard(command.entry.nsid, range.lba, range.blocks, is_durable());
    if (error != 0) return write_status(error);
  }
  return status::success;
}

void Controller::Impl::corrupt(const Command& command) {
  if (command.transfer.data.empty()) return;
  if (command.direction == Direction::to_host) {
    const Transfer::Piece& piece = command.transfer.data[command.transfer.data.size() / 2];
    memory.data_runs(piece.iova + piece.bytes / 2, 1, true, [](std::byte* at, std::uint64_t, Copier* copier) {
      const std::uint64_t address = reinterpret_cast<std::uintptr_t>(at);
      std::byte byte{};
      if (copier == nullptr) {
        *at ^= std::byte{0x10};
      } else if (copier->copy_out(&byte, address, 1) == 0) {
        byte ^= std::byte{0x10};
        static_cast<void>(copier->copy_in(address, &byte, 1));  // where it fails, there is nothing wrong to be seen
      }
      return true;
    });
    return;
  }
  if (command.blocks == 0) return;
  const Geometry& g = subsystem->geometry();
  const std::uint64_t offset = g.data_at(1, command.lba) + command.length / 2;
  std::byte byte{};
  subsystem->peek(command.entry.nsid, offset, &byte, 1);
  byte ^= std::byte{0x10};
  subsystem->poke(command.entry.nsid, offset, &byte, 1);
}

}  // namespace ugds::emulator
