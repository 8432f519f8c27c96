// SPDX-License-Identifier: Apache-2.0
#include "base/event_log.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
#include <new>
#include <string_view>
#include <utility>

#include "base/clock.hpp"
#include "base/fault_file.hpp"
#include "base/fork.hpp"
#include "base/text.hpp"

namespace ugds {

namespace {

/// Events that wait for the log's thread. The last of the room is not for those that come in numbers: whoever reads
/// slowly is told all the same that a device is wedged.
constexpr std::size_t kRoom = 256, kKept = 64;
/// How long the thread stays when everything is told, and how long the end of the process waits for it.
constexpr std::chrono::milliseconds kLinger{50};
constexpr std::uint64_t kLastWords = 1'000'000'000;
constexpr std::size_t kStack = 128 * 1024;

struct Log {
  std::mutex lock;
  std::condition_variable changed;
  std::array<Event, kRoom> ring;
  std::uint64_t added = 0, told = 0;  ///< ever
  std::uint64_t lost = 0;             ///< for which there was no room, and that no line has told of
  bool has_thread = false, quits = false;
  bool calling = false;
  pthread_t thread{};
  EventLog::Callback callback = nullptr;
  void* context = nullptr;
  bool has_trace = false;
  std::string trace;
  std::atomic<EventLog::Observer> observer{nullptr};
};

std::atomic<Log*> the_one{nullptr};

/// Made at the first use, and there for ever: threads add to it until the very end.
Log& the_log() {
  static Log* const log = [] {
    auto* made = new Log;  // NOLINT
    the_one.store(made);
    on_fork(ForkOrder::events, {[] { the_log().lock.lock(); }, [] { the_log().lock.unlock(); },
                                [] {
                                  // What waits is the parent's to tell, and so is the thread.
                                  Log& child = the_log();
                                  child.told = child.added;
                                  child.lost = 0;
                                  child.has_thread = child.calling = child.has_trace = false;
                                  new (&child.changed) std::condition_variable;
                                  child.lock.unlock();
                                }});
    return made;
  }();
  return *log;
}

/// From which level on lines go to standard error. secure_getenv: whoever starts a program that has more rights than
/// they do does not make it write.
int level_on_stderr() {
  static const int level = [] {
    const char* text = secure_getenv("UGDS_LOG");
    if (text == nullptr || *text == '\0' || std::strcmp(text, "0") == 0) return 3;
    for (const Level one : {Level::error, Level::warning}) {
      if (std::strcmp(text, level_name(one)) == 0) return static_cast<int>(one);
    }
    return 0;
  }();
  return level;
}

void write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    if (written <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

/// One event, to all who want it. Without the lock.
void tell_one(Log& log, std::unique_lock<std::mutex>& guard, const Event& event) {
  const EventLog::Callback callback = log.callback;
  void* const context = log.context;
  log.calling = true;
  guard.unlock();
  try {
    std::string line = line_of(event);
    if (callback != nullptr) callback(static_cast<int>(event.level), line.c_str(), context);
    line += '\n';
    if (static_cast<int>(event.level) >= level_on_stderr()) write_all(STDERR_FILENO, line);
    append_fault(line);
  } catch (const std::bad_alloc&) {
    // One line less.
  }
  guard.lock();
  log.calling = false;
}

void* run(void*) {
  Log& log = the_log();
  std::unique_lock guard(log.lock);
  log.thread = pthread_self();
  for (;;) {
    while (log.told != log.added) {
      if (log.has_trace) {
        const std::string trace = std::exchange(log.trace, {});
        log.has_trace = false;
        guard.unlock();
        keep_wedge_trace(trace);
        guard.lock();
      }
      Event event = log.ring[log.told % kRoom];
      event.left_out += std::exchange(log.lost, 0);
      tell_one(log, guard, event);
      ++log.told;
      log.changed.notify_all();
    }
    if (log.quits) break;
    log.changed.wait_for(guard, kLinger);
    if (log.told == log.added) break;
  }
  log.has_thread = false;
  log.changed.notify_all();
  return nullptr;
}

/// Under the lock. Where no thread is to be had, what was added waits for the next event.
void start(Log& log) {
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, kStack);
  // Signals are for the program's threads; those of a full disk or of a closed pipe are for nobody.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  log.has_thread = pthread_create(&thread, &attributes, run, nullptr) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
}

/// When the process ends, or the library is unloaded: the last events are told, and no thread is left in its code.
[[gnu::destructor]] void end_of_process() {
  Log* const made = the_one.load();
  if (made == nullptr) return;
  Log& log = *made;
  std::unique_lock guard(log.lock);
  log.quits = true;
  log.changed.notify_all();
  if (log.has_thread && pthread_equal(log.thread, pthread_self()) == 0)
    log.changed.wait_for(guard, std::chrono::nanoseconds(kLastWords), [&] { return !log.has_thread; });
}

void append_text(std::string& out, const char* name, const char* value) {
  if (*value == '\0') return;
  out += ", \"";
  out += name;
  out += "\": ";
  out += json_text(value);
}

void append_number(std::string& out, const char* name, std::uint64_t value) {
  out += ", \"";
  out += name;
  out += "\": ";
  out += std::to_string(value);
}

std::uint64_t clock_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(now.tv_nsec);
}

std::string time_text(std::uint64_t ns) {
  const auto seconds = static_cast<time_t>(ns / 1'000'000'000u);
  tm parts{};
  gmtime_r(&seconds, &parts);
  char day[32], all[64];
  std::strftime(day, sizeof day, "%Y-%m-%dT%H:%M:%S", &parts);
  std::snprintf(all, sizeof all, "%s.%06uZ", day, static_cast<unsigned>(ns / 1000 % 1'000'000u));
  return all;
}

/// By what a process is told apart from another that had its number: when this library came into it.
const std::uint64_t started_ns = clock_ns(CLOCK_REALTIME);

}  // namespace

const char* level_name(Level level) {
  return level == Level::info ? "info" : level == Level::warning ? "warning" : "error";
}

void set_detail(Event& event, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(event.detail, sizeof event.detail, format, arguments);
  mend_end(event.detail, sizeof event.detail);
  va_end(arguments);
}

std::string line_of(const Event& e) {
  std::string out;
  out.reserve(512);
  out += "{\"time\": \"" + time_text(e.time_ns) + "\"";
  append_text(out, "level", level_name(e.level));
  append_text(out, "event", e.name);
  append_text(out, "device", e.device);
  if (e.queue >= 0) append_number(out, "queue", static_cast<std::uint64_t>(e.queue));
  if (e.command >= 0) append_number(out, "command", static_cast<std::uint64_t>(e.command));
  append_text(out, "operation", e.operation);
  if (e.blocks != 0) {
    append_number(out, "lba", e.lba);
    append_number(out, "blocks", e.blocks);
  }
  if (e.status != kNoStatus) append_number(out, "status", e.status);
  append_text(out, "status_text", e.status_words);
  append_text(out, "action", e.action);
  append_text(out, "detail", e.detail);
  append_text(out, "remedy", e.remedy);
  if (e.left_out != 0) append_number(out, "left_out", e.left_out);
  append_number(out, "pid", static_cast<std::uint64_t>(getpid()));
  append_number(out, "started_ns", started_ns);
  append_text(out, "program", program_invocation_short_name);
  out += '}';
  return out;
}

void EventSource::set_device(const char* uri) { set_device_text(device_, uri); }

bool EventSource::admit() {
  const std::uint64_t second = monotonic_ns() / 1'000'000'000u + 1;
  std::uint64_t before = second_.load(std::memory_order_relaxed);
  if (before != second && second_.compare_exchange_strong(before, second, std::memory_order_relaxed))
    told_.store(0, std::memory_order_relaxed);
  if (told_.load(std::memory_order_relaxed) < kPerSecond && told_.fetch_add(1, std::memory_order_relaxed) < kPerSecond)
    return true;
  left_out_.fetch_add(1, std::memory_order_relaxed);
  return false;
}

void EventSource::tell(Event event) noexcept {
  if (event.device[0] == '\0') std::memcpy(event.device, device_, sizeof event.device);
  event.left_out = left_out_.exchange(0, std::memory_order_relaxed);
  event.time_ns = clock_ns(CLOCK_REALTIME);
  EventLog::instance().add(event);
}

void EventSource::tell_rest() noexcept {
  if (left_out() == 0) return;
  Event event;
  event.name = "left_out";
  event.level = Level::info;
  event.action = "events that came in too great a number were counted, and not told";
  tell(event);
}

EventLog& EventLog::instance() {
  static EventLog log;
  return log;
}

void EventLog::prepare() { static_cast<void>(the_log()); }

void EventLog::set_callback(Callback callback, void* context) {
  Log& log = the_log();
  std::unique_lock guard(log.lock);
  log.callback = callback;
  log.context = context;
  if (log.calling && pthread_equal(log.thread, pthread_self()) == 0)
    log.changed.wait(guard, [&, telling = log.told] { return !log.calling || log.told != telling; });
}

void EventLog::set_observer(Observer observer) { the_log().observer.store(observer, std::memory_order_release); }

void EventLog::add(const Event& event) noexcept try {
  Log& log = the_log();
  if (const Observer observer = log.observer.load(std::memory_order_acquire)) observer(event);
  const std::lock_guard guard(log.lock);
  if (log.callback == nullptr && level_on_stderr() > static_cast<int>(Level::error) && !keeps_faults()) return;
  if (log.added - log.told >= kRoom - (event.numerous ? kKept : 0)) {
    log.lost += 1 + event.left_out;
    return;
  }
  log.ring[log.added % kRoom] = event;
  ++log.added;
  if (log.has_thread) {
    log.changed.notify_all();
  } else if (!log.quits) {
    start(log);
  }
} catch (const std::exception&) {
  // A log that cannot be written is no reason for anything to fail.
}

void EventLog::keep_trace(std::string trace) noexcept try {
  Log& log = the_log();
  const std::lock_guard guard(log.lock);
  log.trace = std::move(trace);
  log.has_trace = true;
} catch (const std::exception&) {
}

bool EventLog::flush(std::uint64_t limit_ns) {
  Log& log = the_log();
  std::unique_lock guard(log.lock);
  const std::uint64_t until = log.added;
  if (log.told >= until) return true;
  if (!log.has_thread && !log.quits) start(log);
  return log.changed.wait_for(guard, std::chrono::nanoseconds(limit_ns), [&] { return log.told >= until; });
}

}  // namespace ugds
