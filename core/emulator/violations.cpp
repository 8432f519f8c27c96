// SPDX-License-Identifier: Apache-2.0
#include "emulator/violations.hpp"

#include <cstdarg>
#include <cstdio>

#include "base/environment.hpp"

namespace ugds::emulator {

void Violations::add(const char* rule, const char* format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::lock_guard guard(lock_);
  const bool first = seen_.insert(rule).second;
  if (first && environment("UGDS_EMULATOR_LOG") != nullptr)
    std::fprintf(stderr, "ugds emulator: violation %s: %s\n", rule, text);
  if (first || list_.size() < kMost) list_.push_back({rule, text});
}

std::vector<Violation> Violations::all() const {
  std::lock_guard guard(lock_);
  return list_;
}

void Violations::clear() {
  std::lock_guard guard(lock_);
  list_.clear();
  seen_.clear();
}

}  // namespace ugds::emulator
