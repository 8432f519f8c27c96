// SPDX-License-Identifier: Apache-2.0
//
// A mode: what a device is to be good at. It chooses settings before the first request, and may change them now and
// then by what was observed; it is never asked on the way of a request. This is the interface by which others add
// modes of their own (docs/modes.md).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/policy.hpp"
#include "engine/waiting.hpp"
#include "queue/pacer.hpp"

namespace ugds::engine {

/// What a mode decides. Read by the engine as plain values.
struct Settings {
  std::array<Waiting::Way, kSizeClasses> waiting{};
  queue::Pacing pacing{};
  /// Commands that one request keeps in flight on its queue pair, at most half of what that holds.
  std::uint32_t window = kWindow;
  /// Commands of a batch that wait for room are staged by as many at a time at least, to share a doorbell.
  std::uint32_t refill = 1;
  /// Writes that do not say otherwise are background requests. Read when the device is opened.
  bool background_writes = false;
};

/// What a mode may decide by.
struct Observed {
  std::array<Waiting::Seen, kSizeClasses> waiting{};  ///< times in nanoseconds
  std::uint64_t commands_in_flight = 0;
  std::uint64_t large_in_flight = 0;  ///< bytes of large and background requests
  std::uint64_t large_limit = 0;      ///< what they may have
  bool small_requests = false;        ///< whether small ones have come lately
  bool interrupts = false;            ///< whether waiters can sleep
};

class Mode {
 public:
  virtual ~Mode() = default;
  Mode() = default;
  Mode(const Mode&) = delete;
  Mode& operator=(const Mode&) = delete;

  /// Fills what the caller left open (depth, interrupts), before the device is opened.
  virtual void plan(Policy&) const {}
  /// The settings to begin with.
  virtual Settings begin() const = 0;
  /// Changes settings by what was observed. In the thread of some waiter, one at a time, every kModeInterval at most
  /// while requests wait. True: they have changed. May not call into the device.
  virtual bool adjust(const Observed&, Settings&) { return false; }
};

inline constexpr std::uint64_t kModeInterval = 5'000'000;  // ns

using MakeMode = std::function<std::unique_ptr<Mode>()>;
/// Makes a mode known by a name, in place of an earlier one of that name. Throws Failure(EEXIST) for the library's own.
void register_mode(const std::string& name, MakeMode make);
/// Throws Failure(EINVAL) that lists the names there are.
std::unique_ptr<Mode> make_mode(const std::string& name);
std::vector<std::string> mode_names();

}  // namespace ugds::engine
