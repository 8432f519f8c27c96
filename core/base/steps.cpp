// SPDX-License-Identifier: Apache-2.0
#include "base/steps.hpp"

#include <atomic>
#include <cerrno>
#include <mutex>

#include "base/error.hpp"

namespace ugds {

namespace {

enum class Mode { off, recording, armed };
std::atomic<Mode> mode{Mode::off};
std::mutex lock;
std::uint64_t remaining = 0;
bool reached = false;
std::vector<std::string> names;

}  // namespace

void setup_step(const char* name) {
  if (mode.load(std::memory_order_relaxed) == Mode::off) return;
  std::lock_guard guard(lock);
  switch (mode.load(std::memory_order_relaxed)) {
    case Mode::off: return;
    case Mode::recording: names.emplace_back(name); return;
    case Mode::armed:
      if (remaining-- != 0) return;
      reached = true;
      mode = Mode::off;
      fail(ENOMEM, "set-up", std::string("step \"") + name + "\" was made to fail by a test");
  }
}

namespace testing {

void arm_step(std::uint64_t nth) {
  std::lock_guard guard(lock);
  remaining = nth;
  reached = false;
  mode = Mode::armed;
}

bool disarm_steps() {
  std::lock_guard guard(lock);
  mode = Mode::off;
  return reached;
}

void record_steps() {
  std::lock_guard guard(lock);
  names.clear();
  mode = Mode::recording;
}

std::vector<std::string> recorded_steps() {
  std::lock_guard guard(lock);
  mode = Mode::off;
  return std::move(names);
}

}  // namespace testing
}  // namespace ugds
