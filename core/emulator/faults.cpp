// SPDX-License-Identifier: Apache-2.0
#include "emulator/faults.hpp"

namespace ugds::emulator {

namespace {

bool matches(const Fault& fault, const CommandShape& command) {
  if (is_register_level(fault.kind) || fault.admin != command.admin) return false;
  if (fault.opcode >= 0 && fault.opcode != command.opcode) return false;
  const bool everywhere = fault.lba == 0 && fault.blocks == ~std::uint64_t{0};
  if (everywhere) return true;
  if (!command.has_range || command.blocks == 0 || fault.blocks == 0) return false;
  // By last blocks, since lba + blocks may pass 2^64.
  const std::uint64_t fault_last =
      fault.blocks - 1 > ~std::uint64_t{0} - fault.lba ? ~std::uint64_t{0} : fault.lba + fault.blocks - 1;
  return command.lba <= fault_last && fault.lba <= command.lba + (command.blocks - 1);
}

}  // namespace

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

}  // namespace ugds::emulator
