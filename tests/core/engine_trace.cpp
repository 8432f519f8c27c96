// SPDX-License-Identifier: Apache-2.0
//
// What a device that is traced keeps of a batch's commands, which take the short way otherwise.
#include <array>
#include <set>

#include "base/clock.hpp"
#include "engine/batch.hpp"
#include "engine/one_command.hpp"
#include "engine_host.hpp"
#include "queue/trace.hpp"

using namespace engine_test;
using engine::Batch;
using engine::Done;
using engine::Wanted;
using queue::TraceRecord;

namespace {

constexpr std::uint64_t kPage = 4096, kMiB = 1 << 20;
/// Commands of 128 KiB at most.
constexpr const char* kUri = "emulated:16MiB?pump=caller&mdts=5";

/// Requests of one buffer.
struct Asked {
  static constexpr bool kOffsetsTell = false;
  const std::vector<Wanted>* all;
  const memory::Reference* registration;

  const memory::Reference& begin_run(std::size_t) const { return *registration; }
  const memory::Reference& buffer() const { return *registration; }
  bool same_buffer(std::size_t) const { return true; }
  Wanted operator()(std::size_t i) const { return (*all)[i]; }
};

struct Failures {
  int* count;
  void operator()(const Done& done) { *count += done.result < 0; }
};

class Batched {
 public:
  explicit Batched(Handle& handle, std::uint32_t capacity = 64)
      : handle_(handle), id_(handle.open_batch(capacity, engine::Priority::normal)) {}
  ~Batched() { handle_.close_batch(id_); }
  Batched(const Batched&) = delete;
  Batched& operator=(const Batched&) = delete;

  std::int64_t submit(const std::vector<Wanted>& all, const Buffer& buffer, bool malformed = false) {
    return batch().submit(id_.generation, all.size(), true, Asked{&all, &buffer.reference()},
                          [&](std::size_t) { return malformed; });
  }
  /// How many of so many requests failed.
  int collect(std::size_t count) {
    int failed = 0;
    CHECK(batch().collect(id_.generation, count, count, 5'000'000'000, {}, Failures{&failed}) ==
          static_cast<std::int64_t>(count));
    return failed;
  }

 private:
  Batch& batch() { return *handle_.batch(id_.slot); }

  Handle& handle_;
  engine::BatchId id_;
};

std::vector<TraceRecord> taken(Handle& handle) {
  std::vector<TraceRecord> out;
  CHECK(handle.take_trace(out));
  return out;
}

/// Page by page over the start of the device, every fourth a durable write.
std::vector<Wanted> pages(std::size_t count) {
  std::vector<Wanted> all;
  for (std::size_t i = 0; i < count; ++i) {
    const bool write = i % 4 == 3;
    all.push_back(
        {.offset = 3 * i * kPage, .size = kPage, .buffer_offset = i * kPage, .write = write, .durable = write});
  }
  return all;
}

}  // namespace

TEST_CASE("a batch of a traced device leaves a record of each command, stamped by the doorbell that told of it") {
  Open open(kUri);
  Buffer buffer(2 * kMiB);
  Batched batch(open.handle);
  std::vector<Wanted> all = pages(40);
  all.push_back({.offset = 4 * kMiB, .size = kMiB, .buffer_offset = kMiB});
  REQUIRE(open.handle.start_trace(1000));
  queue::QueuePair& pair = open.handle.batch_pair();
  const std::uint64_t before = ticks(), doorbells = pair.doorbells();
  REQUIRE(batch.submit(all, buffer) == 41);
  CHECK(batch.collect(41) == 0);
  const std::uint64_t after = ticks();

  const std::vector<TraceRecord> records = taken(open.handle);
  REQUIRE(records.size() >= 40 + 8);
  std::set<std::uint64_t> rung;
  std::uint64_t position = 4 * kMiB;
  for (std::size_t i = 0; i < records.size(); ++i) {
    CAPTURE(i);
    const TraceRecord& r = records[i];
    const bool write = i < 40 && all[i].write != 0, continued = i > 40;
    CHECK(r.offset == (i < 40 ? all[i].offset : position));
    if (i < 40) {
      CHECK(r.bytes == kPage);
    } else {
      position += r.bytes;
    }
    CHECK(r.opcode == (write ? 1 : 2));
    CHECK((r.flags & queue::kTraceDurable) == (write ? queue::kTraceDurable : 0));
    CHECK((r.flags & queue::kTraceContinued) == (continued ? queue::kTraceContinued : 0));
    CHECK(r.queue == pair.id());
    CHECK(r.status == 0);
    CHECK(before <= r.submitted);
    CHECK(r.submitted == (continued ? records[40].submitted : r.submitted));
    CHECK(r.submitted <= r.staged);
    CHECK(r.staged <= r.rung);
    CHECK(r.rung <= r.completed);
    CHECK(r.completed <= after);
    rung.insert(r.rung);
  }
  CHECK(position == 5 * kMiB);
  CHECK(rung.size() == pair.doorbells() - doorbells);
  CHECK(records[0].rung == records[39].rung);
  CHECK(open.handle.stop_trace() == 0);
}

TEST_CASE("a batch that is larger than its queue is recorded as it finds room, by several doorbells") {
  Open open("emulated:16MiB?pump=caller", Policy{.queues = 1, .depth = 16});
  Buffer buffer(2 * kMiB);
  Batched batch(open.handle, 400);
  const std::vector<Wanted> all = pages(400);
  REQUIRE(open.handle.start_trace(1000));
  const std::uint64_t doorbells = open.handle.batch_pair().doorbells();
  REQUIRE(batch.submit(all, buffer) == 400);
  CHECK(batch.collect(400) == 0);
  const std::vector<TraceRecord> records = taken(open.handle);
  REQUIRE(records.size() == 400);
  std::set<std::uint64_t> rung;
  for (std::size_t i = 0; i < 400; ++i) {
    CHECK(records[i].offset == all[i].offset);
    CHECK(records[i].completed >= records[i].rung);
    rung.insert(records[i].rung);
  }
  CHECK(rung.size() > 1);
  CHECK(rung.size() == open.handle.batch_pair().doorbells() - doorbells);
  open.handle.stop_trace();
}

TEST_CASE("a request of a batch that fails is recorded with its status") {
  Open open(kUri);
  Buffer buffer(kMiB);
  Batched batch(open.handle);
  REQUIRE(open.handle.start_trace(100));
  emulator::Fault fault;
  fault.opcode = 1;
  fault.status = 0x280;
  open.controller().inject(fault);
  REQUIRE(batch.submit(pages(8), buffer) == 8);
  CHECK(batch.collect(8) == 1);
  const std::vector<TraceRecord> records = taken(open.handle);
  REQUIRE(records.size() == 8);
  for (std::size_t i = 0; i < 8; ++i) CHECK(records[i].status == (i == 3 ? 0x280 : 0));
  open.handle.stop_trace();
}

TEST_CASE("the short ways are closed while a queue is traced, and open again after") {
  Open open(kUri, Policy{.queues = 1});
  Buffer buffer(kMiB);
  Batched batch(open.handle);
  queue::QueuePair& pair = open.handle.batch_pair();
  const auto room = [&] { return queue::QueuePair::Burst(pair, ticks(), 1).room(); };
  const auto starts = [&] {
    engine::OneCommand one;
    if (!one.start(open.handle, 1, Opcode::read, buffer.reference(), 0, kPage, 0)) return false;
    while (!one.turn(open.handle.turn())) {
    }
    return true;
  };
  const std::uint32_t free = room();
  CHECK(free == pair.depth() - 1);
  CHECK(starts());
  REQUIRE(open.handle.start_trace(100));
  CHECK(room() == 0);
  CHECK_FALSE(starts());
  CHECK(pair.has_room(0, queue::Line::Place{}));
  // Lists that come and go do not open them.
  CHECK(read(open.handle, buffer, 0, 64 * kPage) == 64 * kPage);
  CHECK_FALSE(starts());
  CHECK(open.handle.stop_trace() == 0);
  CHECK(room() == free);
  CHECK(starts());
  REQUIRE(batch.submit(pages(8), buffer) == 8);
  CHECK(batch.collect(8) == 0);
}

TEST_CASE("commands in flight when a trace begins or ends are not recorded, and retire as ever") {
  Open open(kUri);
  Buffer buffer(kMiB);
  Batched batch(open.handle);
  REQUIRE(batch.submit(pages(8), buffer) == 8);
  REQUIRE(open.handle.start_trace(100));
  CHECK(batch.collect(8) == 0);
  CHECK(taken(open.handle).empty());
  REQUIRE(batch.submit(pages(4), buffer) == 4);
  CHECK(open.handle.stop_trace() == 0);
  REQUIRE(open.handle.start_trace(100));
  CHECK(batch.collect(4) == 0);
  CHECK(taken(open.handle).empty());
  REQUIRE(batch.submit(pages(5), buffer) == 5);
  CHECK(batch.collect(5) == 0);
  CHECK(taken(open.handle).size() == 5);
  open.handle.stop_trace();
  const queue::Statistics& counted = open.handle.batch_pair().statistics();
  CHECK(counted.requests() == 17);
}

TEST_CASE("a malformed submission leaves no record") {
  Open open(kUri);
  Buffer buffer(kMiB);
  Batched batch(open.handle);
  REQUIRE(open.handle.start_trace(100));
  std::vector<Wanted> all = pages(8);
  CHECK(batch.submit(all, buffer, true) == Batch::kMalformed);
  CHECK(taken(open.handle).empty());
  REQUIRE(batch.submit(all, buffer) == 8);
  CHECK(batch.collect(8) == 0);
  CHECK(taken(open.handle).size() == 8);
  open.handle.stop_trace();
}

TEST_CASE("each piece of a vectored request is recorded") {
  Open open(kUri);
  Buffer first(kMiB), second(kMiB);
  const std::array segments{engine::Segment{first.reference(), 0, 3 * kPage},
                            engine::Segment{second.reference(), kPage, 2 * kPage}};
  REQUIRE(open.handle.start_trace(100));
  Transfer transfer{.opcode = Opcode::write, .offset = kMiB, .size = 5 * kPage};
  transfer.segments = segments;
  CHECK(engine::run(open.handle, transfer) == 5 * kPage);
  const std::vector<TraceRecord> records = taken(open.handle);
  REQUIRE(records.size() == 2);
  CHECK(records[0].offset == kMiB);
  CHECK(records[0].bytes == 3 * kPage);
  CHECK((records[0].flags & queue::kTraceContinued) == 0);
  CHECK(records[1].offset == kMiB + 3 * kPage);
  CHECK(records[1].bytes == 2 * kPage);
  CHECK((records[1].flags & queue::kTraceContinued) != 0);
  CHECK(records[0].submitted == records[1].submitted);
  open.handle.stop_trace();
}
