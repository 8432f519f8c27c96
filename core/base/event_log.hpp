// SPDX-License-Identifier: Apache-2.0
//
// What goes wrong with devices, told as it happens: one event, one line of JSON (docs/failures.md lists the events and
// their fields). Events come from paths that are slow already, and often from under locks: adding one copies it into a
// ring and never waits for whoever reads it. A thread of the log's, which is there while there is something to tell,
// writes them where they are wanted:
//
//   a callback      set by a program in C
//   standard error  where UGDS_LOG says so
//   a file          small and bounded, for `ugds doctor --last-fault` (fault_file.hpp)
//
// Python's observer is called at once, by whoever adds: it keeps a copy, and logs it in a thread of Python's.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "base/error.hpp"

namespace ugds {

enum class Level : std::uint8_t { info, warning, error };
const char* level_name(Level level);

/// One event. What is a `const char*` is static text.
struct Event {
  const char* name = "";  ///< "command_failed", "overdue", "abort", "reset", ...
  Level level = Level::warning;
  std::int32_t queue = -1;    ///< -1: of no queue
  std::int32_t command = -1;  ///< its identifier; -1: of no command
  const char* operation = "";
  std::uint64_t lba = 0;
  std::uint32_t blocks = 0;          ///< 0: of no range
  std::uint16_t status = kNoStatus;  ///< NVMe status
  char status_words[72] = "";
  const char* action = "";        ///< what the library does about it
  const char* remedy = "";        ///< what its user can do
  char device[kDeviceText] = "";  ///< the URI; a longer one is cut, and ends in "..."
  char detail[240] = "";
  // Of the log.
  bool numerous = false;       ///< of those that come in numbers, and take not all of the room that there is
  std::uint64_t left_out = 0;  ///< events of the device that were not told since the last that was
  std::uint64_t time_ns = 0;   ///< of the system's clock, since 1970
};
void set_detail(Event& event, const char* format, ...) __attribute__((format(printf, 2, 3)));

/// The event as one line of JSON, without a newline.
std::string line_of(const Event& event);

/// Where the events of one device come from. Thread-safe.
class EventSource {
 public:
  /// Lines a second of events that come in numbers.
  static constexpr std::uint32_t kPerSecond = 16;

  void set_device(const char* uri);
  /// Whether one more event that comes in numbers is told now; if not, it is counted.
  bool admit();
  /// Tells of an event. Fills what is the source's. Never waits for a reader.
  void tell(Event event) noexcept;
  /// What was left out and not yet said, which becomes an event of its own.
  void tell_rest() noexcept;
  std::uint64_t left_out() const { return left_out_.load(std::memory_order_relaxed); }

 private:
  char device_[kDeviceText] = "";
  std::atomic<std::uint64_t> second_{0}, left_out_{0};
  std::atomic<std::uint32_t> told_{0};
};

class EventLog {
 public:
  /// The process's own.
  static EventLog& instance();
  /// Makes `fork` safe for it. Called before anything that events come from is locked.
  static void prepare();

  using Callback = void (*)(int level, const char* line, void* context);
  /// Called with each line by the log's thread, one after the other; nullptr: nothing is. The one before is not running
  /// any more when this returns, unless this is called by it.
  void set_callback(Callback callback, void* context);
  using Observer = void (*)(const Event&);
  /// Called by whoever adds an event, perhaps under locks: it may not wait for anything.
  void set_observer(Observer observer);

  void add(const Event& event) noexcept;
  /// The last commands of a device that wedged, in the format of traces, for the file beside that of faults.
  void keep_trace(std::string trace) noexcept;
  /// Waits until everything that was added before is told. False: not within the limit.
  bool flush(std::uint64_t limit_ns);

 private:
  EventLog() = default;
};

}  // namespace ugds
