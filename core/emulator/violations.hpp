// SPDX-License-Identifier: Apache-2.0
//
// The record of what the host did wrong. The rules' words are listed in docs/emulator.md and are stable.
#pragma once

#include <cstddef>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "emulator/controller.hpp"

namespace ugds::emulator {

class Violations {
 public:
  /// Records by printf rules. Beyond kMost only rules that are new are kept, so that a broken loop costs no memory.
  /// Thread-safe.
  void add(const char* rule, const char* format, ...) __attribute__((format(printf, 3, 4)));
  std::vector<Violation> all() const;
  void clear();

 private:
  static constexpr std::size_t kMost = 4096;

  mutable std::mutex lock_;
  std::vector<Violation> list_;
  std::set<std::string> seen_;
};

}  // namespace ugds::emulator
