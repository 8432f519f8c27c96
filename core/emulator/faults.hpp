// SPDX-License-Identifier: Apache-2.0
//
// The faults that wait to be played.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "emulator/controller.hpp"

namespace ugds::emulator {

/// What a fault looks at in a command.
struct CommandShape {
  bool admin = false;
  std::uint8_t opcode = 0;
  bool has_range = false;
  std::uint64_t lba = 0, blocks = 0;
};

class Faults {
 public:
  void add(const Fault& fault) { list_.push_back(fault); }
  void clear() { list_.clear(); }
  bool empty() const { return list_.empty(); }
  /// The fault to play on a command, used up by one. Faults that pass over it count it towards their `skip`.
  std::optional<Fault> match(const CommandShape& command);
  /// The same for a fault that no command triggers.
  bool take(Fault::Kind kind);

 private:
  static bool spend(Fault& fault);
  std::vector<Fault> list_;
};

/// Whether a register's or the bus's behaviour triggers it, and not a command.
constexpr bool is_register_level(Fault::Kind kind) {
  return kind == Fault::Kind::never_ready || kind == Fault::Kind::never_stopped || kind == Fault::Kind::reset_fails;
}

}  // namespace ugds::emulator
