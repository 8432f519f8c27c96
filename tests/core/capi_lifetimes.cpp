// SPDX-License-Identifier: Apache-2.0
//
// The C API on a device that could not be stopped, and what it tells of that: the four ways to deregister a handle, and
// the log.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/event_log.hpp"
#include "capi/internal.hpp"
#include "engine/batch.hpp"
#include "engine/table.hpp"
#include "engine_host.hpp"
#include "ugds.h"

using namespace engine_test;
using emulator::Fault;

namespace {

Fault fault(Fault::Kind kind, std::uint32_t count = 1) {
  Fault f;
  f.kind = kind;
  f.abortable = false;
  f.count = count;
  return f;
}

struct Driver {
  Driver() { REQUIRE(uGDSDriverOpen().err == UGDS_SUCCESS); }
  ~Driver() { CHECK(uGDSDriverClose().err == UGDS_SUCCESS); }
};

/// Opened with a deadline that the C API has no word for.
uGDSHandle_t open_handle() {
  Policy policy;
  policy.deadline_ns = 200'000'000;
  policy.queues = 1;
  return reinterpret_cast<uGDSHandle_t>(engine::Table::instance().open("emulated:1MiB?timeout=1", policy));
}

std::string last_words() {
  char text[1024];
  uGDSGetLastError(text, sizeof text);
  return text;
}

bool says(const char* words) {
  const bool found = last_words().find(words) != std::string::npos;
  if (!found) MESSAGE(last_words());
  return found;
}

/// Lines as they come.
struct Told {
  std::mutex lock;
  std::vector<std::string> lines;
  std::vector<int> levels;

  static void take(int level, const char* line, void* context) {
    auto& self = *static_cast<Told*>(context);
    const std::lock_guard guard(self.lock);
    self.lines.emplace_back(line);
    self.levels.push_back(level);
  }
  bool has(const char* words) {
    const std::lock_guard guard(lock);
    for (const std::string& line : lines) {
      if (line.find(words) != std::string::npos) return true;
    }
    return false;
  }
};

/// The next command meets the fault, and no reset ends it.
void make_unstoppable(uGDSHandle_t fh, Fault::Kind kind) {
  const engine::Table::Use use(engine::Table::instance(), capi::id_of(fh));
  auto& controller = controller_of(*use);
  controller.inject(fault(kind));
  controller.inject(fault(Fault::Kind::never_stopped, 1000));
  controller.inject(fault(Fault::Kind::reset_fails, 1000));
}

}  // namespace

TEST_CASE("capi: a wedged handle is refused in every way but by a force that works, and then nothing is held") {
  const Driver driver;
  alignas(4096) static std::byte memory[8192];
  const uGDSHandle_t fh = open_handle();
  REQUIRE(uGDSBufRegister(memory, sizeof memory, 0).err == UGDS_SUCCESS);
  make_unstoppable(fh, Fault::Kind::late_write);
  CHECK(uGDSRead(fh, memory, 4096, 0, 0) == -ETIMEDOUT);
  CHECK(says("could not be stopped"));
  // It stays as it is, and says why, whatever is asked: none of these waits for what cannot come.
  for (const int timeout : {0, 1, -1, -2}) {
    CAPTURE(timeout);
    CHECK(uGDSHandleDeregisterEx(fh, timeout).err == UGDS_BUSY);
    CHECK(says("1 command is in flight on queue 1; it is wedged: the controller could not be stopped"));
    CHECK(uGDSBufDeregister(memory).err == UGDS_BUSY);
    CHECK(says("1 command on queue 1 of emulated:1MiB"));
    CHECK(uGDSRead(fh, memory, 4096, 0, 0) == -EIO);
  }
  {
    const engine::Table::Use use(engine::Table::instance(), capi::id_of(fh));
    controller_of(*use).clear_faults();
  }
  CHECK(uGDSHandleDeregisterEx(fh, 0).err == UGDS_BUSY);  // only force resets it
  CHECK(uGDSHandleDeregisterEx(fh, -2).err == UGDS_SUCCESS);
  CHECK(uGDSHandleDeregisterEx(fh, -2).err == UGDS_HANDLE_NOT_REGISTERED);
  CHECK(uGDSBufDeregister(memory).err == UGDS_SUCCESS);
}

TEST_CASE("capi: who waits for ever for a device that hangs is told when it is wedged") {
  const Driver driver;
  alignas(4096) static std::byte memory[8192];
  const uGDSHandle_t fh = open_handle();
  REQUIRE(uGDSBufRegister(memory, sizeof memory, 0).err == UGDS_SUCCESS);
  make_unstoppable(fh, Fault::Kind::hang);
  uGDSBatchHandle_t batch = nullptr;
  REQUIRE(uGDSBatchIOSetUp(&batch, fh, 1).err == UGDS_SUCCESS);
  uGDSIOParams_t params{};
  params.base = memory;
  params.size = 4096;
  REQUIRE(uGDSBatchIOSubmit(batch, 1, &params, 0).err == UGDS_SUCCESS);
  CHECK(uGDSHandleDeregisterEx(fh, -1).err == UGDS_BUSY);  // nobody else looks at the deadline
  CHECK(says("it is wedged: the controller could not be stopped"));
  {
    const engine::Table::Use use(engine::Table::instance(), capi::id_of(fh));
    controller_of(*use).clear_faults();
  }
  CHECK(uGDSHandleDeregisterEx(fh, -2).err == UGDS_SUCCESS);
  CHECK(uGDSBufDeregister(memory).err == UGDS_SUCCESS);
}

TEST_CASE("capi: a handle has batches for as long as it is open, and none of them is ever another") {
  const Driver driver;
  const uGDSHandle_t fh = open_handle();
  const engine::HandleId id = capi::id_of(fh);
  uGDSBatchHandle_t first = nullptr;
  REQUIRE(uGDSBatchIOSetUp(&first, fh, 1).err == UGDS_SUCCESS);
  uGDSBatchIODestroy(first);
  uGDSIOEvents_t event;
  const auto status = [&](uGDSBatchHandle_t batch) {
    unsigned count = 1;
    return uGDSBatchIOGetStatus(batch, 0, &count, &event, nullptr).err;
  };
  // A program that makes one for each of its submissions has as many within hours, and has them all.
  std::vector<uGDSBatchHandle_t> stale{first};
  for (const std::uint32_t generation : {0x00ff'ffffu, 0x0100'0001u, 0xffff'fffdu, 0xffff'ffffu}) {
    {
      const engine::Table::Use handle(engine::Table::instance(), id);
      handle->batch(0)->age(generation);
    }
    uGDSBatchHandle_t batch = nullptr;
    REQUIRE(uGDSBatchIOSetUp(&batch, fh, 1).err == UGDS_SUCCESS);
    CHECK(status(batch) == UGDS_SUCCESS);
    for (uGDSBatchHandle_t old : stale) CHECK(status(old) == UGDS_INVALID_VALUE);
    uGDSBatchIODestroy(batch);
    CHECK(status(batch) == UGDS_INVALID_VALUE);
    stale.push_back(batch);
  }
  // The first slot's are spent: what comes now has another's.
  uGDSBatchHandle_t later = nullptr;
  REQUIRE(uGDSBatchIOSetUp(&later, fh, 1).err == UGDS_SUCCESS);
  for (uGDSBatchHandle_t old : stale) CHECK(status(old) == UGDS_INVALID_VALUE);
  CHECK(status(later) == UGDS_SUCCESS);
  uGDSBatchIODestroy(later);
  CHECK(uGDSHandleDeregisterEx(fh, 0).err == UGDS_SUCCESS);
}

TEST_CASE("capi: the log's callback has each event once, in order, and none after it was taken away") {
  const Driver driver;
  Told told;
  uGDSSetLogCallback(&Told::take, &told);
  Buffer buffer(4096);
  {
    Policy policy;
    policy.deadline_ns = 100'000'000;
    Open open("emulated:1MiB", policy);
    open.controller().inject(fault(Fault::Kind::hang));
    CHECK(read(open.handle, buffer, 0, 4096) == -ETIMEDOUT);
    REQUIRE(EventLog::instance().flush(5'000'000'000));
    const std::lock_guard guard(told.lock);
    REQUIRE(told.lines.size() == 4);
    const char* const names[] = {"overdue", "abort", "reset", "recovered"};
    for (int i = 0; i < 4; ++i) {
      CHECK(told.lines[i].find(std::string("\"event\": \"") + names[i] + "\"") != std::string::npos);
      CHECK(told.lines[i].front() == '{');
      CHECK(told.lines[i].back() == '}');
      CHECK(told.levels[i] == (i == 3 ? 0 : 1));
    }
  }
  uGDSSetLogCallback(nullptr, nullptr);
  const std::size_t before = told.lines.size();
  {
    Open open("emulated:1MiB");
    open.controller().inject(fault(Fault::Kind::fatal));
    CHECK(read(open.handle, buffer, 0, 4096) == -ECANCELED);
  }
  CHECK(EventLog::instance().flush(5'000'000'000));
  CHECK(told.lines.size() == before);
}

TEST_CASE("log: who adds never waits for who reads, and what finds no room is counted") {
  struct Slow {
    std::mutex lock;
    std::condition_variable changed;
    bool inside = false, may_go = false, wedged = false;
    std::uint64_t lines = 0, left_out = 0;
  } slow;
  EventLog::instance().set_callback(
      [](int, const char* line, void* context) {
        auto& self = *static_cast<Slow*>(context);
        std::unique_lock guard(self.lock);
        self.inside = true;
        self.changed.notify_all();
        self.changed.wait(guard, [&] { return self.may_go; });
        ++self.lines;
        const std::string text = line;
        if (const auto at = text.find("\"left_out\": "); at != std::string::npos)
          self.left_out += std::stoull(text.substr(at + 12));
        self.wedged = self.wedged || text.find("\"wedged\"") != std::string::npos;
      },
      &slow);
  EventSource source;
  source.set_device("a \"device\" with\na line");
  Event event;
  event.name = "reset";
  source.tell(event);
  {
    std::unique_lock guard(slow.lock);
    slow.changed.wait(guard, [&] { return slow.inside; });
  }
  event.numerous = true;
  for (int i = 0; i < 1000; ++i) source.tell(event);  // the reader is still in its first
  event.numerous = false;
  event.name = "wedged";
  source.tell(event);
  CHECK_FALSE(EventLog::instance().flush(1'000'000));
  {
    const std::lock_guard guard(slow.lock);
    slow.may_go = true;
    slow.changed.notify_all();
  }
  CHECK(EventLog::instance().flush(10'000'000'000));
  EventLog::instance().set_callback(nullptr, nullptr);
  CHECK(slow.lines < 300);
  CHECK(slow.lines + slow.left_out == 1002);
  CHECK(slow.wedged);  // of what comes in numbers is left out, and not of what does not
  event.time_ns = 0;
  CHECK(line_of(event).find("\"time\": \"1970-01-01T00:00:00.000000Z\"") != std::string::npos);
}

TEST_CASE("log: of events that come in numbers a few a second are told, and the rest is counted") {
  Told told;
  EventLog::instance().set_callback(&Told::take, &told);
  EventSource source;
  source.set_device("emulated:1MiB");
  Event event;
  event.name = "command_failed";
  unsigned admitted = 0;
  for (int i = 0; i < 1000; ++i) {
    if (!source.admit()) continue;
    ++admitted;
    source.tell(event);
  }
  CHECK(admitted <= 2 * EventSource::kPerSecond);  // a second may end in between
  CHECK(source.left_out() + admitted >= 1000 - 2 * EventSource::kPerSecond);
  source.tell_rest();
  CHECK(source.left_out() == 0);
  CHECK(EventLog::instance().flush(5'000'000'000));
  EventLog::instance().set_callback(nullptr, nullptr);
  CHECK(told.lines.size() <= admitted + 1);
  CHECK(told.has("\"event\": \"left_out\""));
}
