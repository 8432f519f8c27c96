// SPDX-License-Identifier: Apache-2.0
//
// Targets of the fuzzer. Each says of one input what must hold whatever it is, and is a program of libFuzzer's where
// that is to be had (tools/fuzz.py); the inputs that are kept (corpus/TARGET/) are replayed by every build of the
// tests.
//
// An input that has ended goes on as zeros for ever, and zero always means what a correct peer does: so that a mutation
// changes one thing, and a short input is a good one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace ugds::fuzz {

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : left_(data, size) {}

  bool empty() const { return left_.empty(); }
  std::uint8_t byte() { return value<std::uint8_t>(); }
  template <class T>
  T value() {
    T value{};
    const std::size_t there = std::min(sizeof value, left_.size());
    if (there != 0) std::memcpy(&value, left_.data(), there);
    left_ = left_.subspan(there);
    return value;
  }
  /// As many as there are, at most.
  std::span<const std::uint8_t> bytes(std::size_t most) {
    const auto taken = left_.first(std::min(most, left_.size()));
    left_ = left_.subspan(taken.size());
    return taken;
  }
  /// A number below `limit`, which is not 0.
  std::uint32_t below(std::uint32_t limit) { return limit <= 256 ? byte() % limit : value<std::uint16_t>() % limit; }

 private:
  std::span<const std::uint8_t> left_;
};

/// What must hold does not: ends the program, with the words.
[[noreturn]] void broken(const char* what);
inline void demand(bool holds, const char* what) {
  if (!holds) broken(what);
}

using Body = void (*)(Input&);

struct Target {
  Target(const char* its_name, Body its_body) : name(its_name), body(its_body), next(first) { first = this; }
  const char* name;
  Body body;
  Target* next;
  static inline Target* first = nullptr;
};

/// While one lives, CLOCK_MONOTONIC as the library reads it moves by a millisecond at each look, and nobody really
/// sleeps: a controller that never answers costs no time.
class QuickTime {
 public:
  QuickTime();
  ~QuickTime();
};

}  // namespace ugds::fuzz
