// SPDX-License-Identifier: Apache-2.0
//
// The threads of an execution: each has a stack of its own, and one runs at a time. By default another goes on only
// where one waits, and what happens then is a choice: the device does one of the things that it can, a thread begins
// its next call, or time passes. In a `fine` execution every atomic access may be followed by a step of another thread,
// so many times as the scenario allows.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace ugds::explore {

/// What the outside world can do while every thread waits.
class World {
 public:
  virtual ~World() = default;
  /// How many things the device can do now. The first is what one that works would do, where that has anything to do.
  virtual std::uint32_t device_actions() { return 0; }
  virtual bool device_has_work() { return false; }
  virtual void act(std::uint32_t) {}
  virtual std::string name_of(std::uint32_t) { return "acts"; }
  /// Nothing is chosen any more: what leads to the end happens.
  virtual bool quiet() { return false; }
  /// Properties, after each step.
  virtual void check() {}
};

struct Body {
  const char* name;
  std::function<void()> run;
};

/// How many times a thread may be interrupted where it does not wait, of all threads together; none: 0 and not `fine`.
struct Fineness {
  std::uint32_t preemptions = 0;
};

/// Runs the bodies to their end as threads of one execution. That nobody can go on is a violation, and so is an
/// execution that does not end.
void run_threads(World& world, const std::vector<Body>& bodies, Fineness fineness = {});

/// In a thread, before each call: it waits here until it is chosen.
void begin(const char* call);
/// In a thread: something happened that those who wait may want to look at.
void happened();
/// In a thread, before memory that it has stored to is used for something else.
void flush_stores();
/// Whether the caller is a thread of an execution.
bool in_thread();

}  // namespace ugds::explore
