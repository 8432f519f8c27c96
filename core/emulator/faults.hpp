// SPDX-License-Identifier: Apache-2.0
//
// The faults that wait to be played.
#pragma once

#include <atomic>
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
  std::uint32_t cdw10 = 0;
};

class Faults {
 public:
  void add(const Fault& fault);
  void clear();
  bool empty() const { return list_.empty(); }
  /// The fault to play on a command, used up by one. Faults that pass over it count it towards their `skip`.
  std::optional<Fault> match(const CommandShape& command);
  /// The same for a fault that no command triggers.
  bool take(Fault::Kind kind);
  /// Whether reads of registers have to be looked at. Without the controller's lock.
  bool lies() const { return lies_.load(std::memory_order_relaxed); }
  /// What a read of a register gives instead, where a fault says so.
  std::optional<std::uint64_t> read(std::uint32_t offset, std::uint32_t width);

 private:
  static bool spend(Fault& fault);
  std::vector<Fault> list_;
  std::atomic<bool> lies_{false};
};

/// Whether a register's or the bus's behaviour triggers it, and not a command.
constexpr bool is_register_level(Fault::Kind kind) {
  return kind == Fault::Kind::never_ready || kind == Fault::Kind::never_stopped || kind == Fault::Kind::reset_fails ||
         kind == Fault::Kind::all_ones || kind == Fault::Kind::reads_as;
}

/// What `inject_at_open` has planted so far.
std::vector<Fault> faults_at_open();

}  // namespace ugds::emulator
