// SPDX-License-Identifier: Apache-2.0
#include "emulator/faults.hpp"

#include <mutex>

#include "nvme/commands.hpp"

namespace ugds::emulator {

namespace {

std::mutex lock;
std::vector<Fault>& at_open() {
  static std::vector<Fault> list;
  return list;
}

bool matches(const Fault& fault, const CommandShape& command) {
  if (is_register_level(fault.kind) || fault.admin != command.admin) return false;
  if (fault.opcode >= 0 && fault.opcode != command.opcode) return false;
  if (fault.kind == Fault::Kind::identify && fault.cns >= 0 && fault.cns != static_cast<int>(command.cdw10 & 0xff))
    return false;
  const bool everywhere = fault.lba == 0 && fault.blocks == ~std::uint64_t{0};
  if (everywhere) return true;
  if (!command.has_range || command.blocks == 0 || fault.blocks == 0) return false;
  // By last blocks, since lba + blocks may pass 2^64.
  const std::uint64_t fault_last =
      fault.blocks - 1 > ~std::uint64_t{0} - fault.lba ? ~std::uint64_t{0} : fault.lba + fault.blocks - 1;
  return command.lba <= fault_last && fault.lba <= command.lba + (command.blocks - 1);
}

}  // namespace

void Faults::add(const Fault& fault) {
  Fault made = fault;
  if (fault.kind == Fault::Kind::identify) {
    made.admin = true;
    made.opcode = static_cast<int>(nvme::AdminOpcode::identify);
  } else if (fault.kind == Fault::Kind::abort_lies || fault.kind == Fault::Kind::abort_denies) {
    made.admin = true;
    made.opcode = static_cast<int>(nvme::AdminOpcode::abort);
  }
  list_.push_back(made);
  if (fault.kind == Fault::Kind::all_ones || fault.kind == Fault::Kind::reads_as) lies_ = true;
}

void Faults::clear() {
  list_.clear();
  lies_ = false;
}

std::optional<std::uint64_t> Faults::read(std::uint32_t offset, std::uint32_t width) {
  for (Fault& fault : list_) {
    if (fault.kind != Fault::Kind::all_ones && fault.kind != Fault::Kind::reads_as) continue;
    if (fault.at != Fault::kAnywhere && fault.at != offset) continue;
    if (!spend(fault)) continue;
    const std::uint64_t value = fault.kind == Fault::Kind::all_ones ? ~std::uint64_t{0} : fault.value;
    return width >= 8 ? value : value & 0xffffffffu;
  }
  return std::nullopt;
}

bool Faults::spend(Fault& fault) {
  if (fault.count == 0) return false;
  if (fault.skip != 0) {
    --fault.skip;
    return false;
  }
  --fault.count;
  return true;
}

std::optional<Fault> Faults::match(const CommandShape& command) {
  for (Fault& fault : list_)
    if (matches(fault, command) && spend(fault)) return fault;
  return std::nullopt;
}

bool Faults::take(Fault::Kind kind) {
  for (Fault& fault : list_)
    if (fault.kind == kind && spend(fault)) return true;
  return false;
}

std::vector<Fault> faults_at_open() {
  const std::lock_guard guard(lock);
  return at_open();
}

void inject_at_open(const Fault& fault) {
  const std::lock_guard guard(lock);
  at_open().push_back(fault);
}

void clear_faults_at_open() {
  const std::lock_guard guard(lock);
  at_open().clear();
}

}  // namespace ugds::emulator
