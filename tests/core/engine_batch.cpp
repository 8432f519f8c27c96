// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <thread>

#include "engine_batch_host.hpp"

using namespace engine_test;

namespace {

constexpr std::uint64_t KiB = 1024, MiB = 1024 * KiB;

std::vector<Request> small_reads(const Buffer& buffer, unsigned count) {
  std::vector<Request> list;
  for (unsigned i = 0; i < count; ++i) list.push_back(reading(buffer, i * 4 * KiB, 4 * KiB, i * 4 * KiB, i));
  return list;
}

/// Reads of one registration, open or not.
struct Stale {
  static constexpr bool kOffsetsTell = false;
  const memory::Reference& reference;
  const memory::Reference& begin_run(std::size_t) { return reference; }
  const memory::Reference& buffer() const { return reference; }
  bool same_buffer(std::size_t) const { return true; }
  Wanted operator()(std::size_t i) const { return {.size = 4096, .cookie = i}; }
};

void inject_status(Open& open, std::uint64_t offset) {
  emulator::Fault fault;
  fault.status = nvme::status::unrecovered_read_error;
  fault.lba = offset / 4096;
  fault.blocks = 1;
  fault.opcode = 2;
  open.controller().inject(fault);
}

}  // namespace

TEST_CASE("batch: one doorbell tells of a submission, as long as the ring has room") {
  Open open("emulated:16MiB?pump=caller");
  Buffer buffer(2 * MiB);
  OpenBatch batch(open.handle, 256);
  for (const unsigned count : {1u, 2u, 128u, 256u}) {
    CAPTURE(count);
    const auto before = open.controller().counters();
    REQUIRE(batch.submit(small_reads(buffer, count)) == count);
    CHECK(batch.all().size() == count);
    const auto after = open.controller().counters();
    CHECK(after.reads - before.reads == count);
    CHECK(after.doorbells - before.doorbells == 1);
  }
}

TEST_CASE("batch: small requests, large ones and those of many registrations come back as they were written") {
  for (const char* shape :
       {"pump=caller", "pump=caller&order=reverse", "order=random", "lba=512&mdts=1", "queues=1&depth=2", "queues=1",
        "mdts=0", "shadow=0", "doorbells=trapped", "mpsmin=1&mpsmax=2", "depth=3"}) {
    CAPTURE(shape);
    Open open(std::string("emulated:64MiB?") + shape);
    Buffer out(8 * MiB), in(8 * MiB, 4), other(64 * KiB, 2048);
    out.fill(1);
    other.fill(2);
    std::vector<Request> writes, reads;
    std::uint64_t at = 0;
    for (const std::uint64_t size :
         {4 * KiB, 8 * KiB, 4 * KiB, 64 * KiB, 4 * KiB, 128 * KiB, 1 * MiB, 4 * KiB, 3 * MiB}) {
      writes.push_back(writing(out, at, size, at, at));
      reads.push_back(reading(in, at, size, at, at));
      at += size;
    }
    writes.push_back(writing(other, 32 * MiB, 60 * KiB, 0, ~0ul));
    OpenBatch batch(open.handle, 64);
    REQUIRE(batch.submit(writes) == static_cast<std::int64_t>(writes.size()));
    for (const auto& [cookie, told] : batch.all()) CHECK_MESSAGE(told.result > 0, told.message);
    REQUIRE(batch.submit(reads) == static_cast<std::int64_t>(reads.size()));
    for (const auto& [cookie, told] : batch.all()) CHECK_MESSAGE(told.result > 0, told.message);
    CHECK(std::memcmp(in.data(), out.data(), at) == 0);
    Buffer copy(64 * KiB);
    REQUIRE(read(open.handle, copy, 32 * MiB, 60 * KiB) == 60 * KiB);
    CHECK(std::memcmp(copy.data(), other.data(), 60 * KiB) == 0);
  }
}

TEST_CASE("batch: 128 large commands fly at once, the next waits, and small ones pass") {
  Open open("emulated:64MiB?pump=caller&mdts=5", {.queues = 2});
  Buffer buffer(32 * MiB);
  OpenBatch batch(open.handle, 512);
  std::vector<Request> list;
  for (unsigned i = 0; i < 130; ++i) list.push_back(reading(buffer, i * 128 * KiB, 128 * KiB, i * 128 * KiB, i));
  REQUIRE(batch.submit(list) == 130);
  CHECK(open.handle.batch_pair().load() == 128);
  // Nothing needs a list page of these.
  REQUIRE(batch.submit(small_reads(buffer, 1)) == 1);
  CHECK(open.handle.batch_pair().load() == 129);
  std::map<std::uint64_t, Told> told;
  // A cookie is told twice here: of the large one and of the small one.
  std::size_t count = 0;
  batch.batch().collect(batch.id.generation, ~std::size_t{0}, ~std::size_t{0}, ~std::uint64_t{0} >> 1, {},
                        [&](const Done& done) { count += done.result > 0; });
  CHECK(count == 131);
}

TEST_CASE("batch: a failed request is told of with what is right of it, and its neighbours are not touched") {
  Open open("emulated:64MiB?order=random&mdts=5");
  Buffer buffer(4 * MiB);
  OpenBatch batch(open.handle, 64);
  inject_status(open, 1 * MiB + 384 * KiB);
  REQUIRE(batch.submit({reading(buffer, 0, 1 * MiB, 0, 1), reading(buffer, 1 * MiB, 1 * MiB, 1 * MiB, 2),
                        reading(buffer, 2 * MiB, 4 * KiB, 2 * MiB, 3)}) == 3);
  const auto told = batch.all();
  CHECK(told.at(1).result == 1 * MiB);
  CHECK(told.at(2).result == -EIO);
  CHECK(told.at(2).completed == 384 * KiB);
  CHECK(told.at(2).message.find("unrecovered read error") != std::string::npos);
  CHECK(told.at(3).result == 4 * KiB);
}

TEST_CASE("batch: every rule that a request breaks is told of by its own event, with its range") {
  Open open("emulated:16MiB");
  Buffer buffer(64 * KiB);
  const Buffer* const none = nullptr;
  OpenBatch batch(open.handle, 16);
  const std::vector<Request> list = {reading(buffer, 0, 4 * KiB, 0, 1),
                                     reading(buffer, 100, 4 * KiB, 0, 2),
                                     reading(buffer, 16 * MiB, 4 * KiB, 0, 3),
                                     reading(buffer, ~0ul - 4095, 4 * KiB, 0, 4),
                                     reading(buffer, 0, 4 * KiB, 61 * KiB, 5),
                                     reading(buffer, 0, 4 * KiB, 2, 6),
                                     {none, {.offset = 0, .size = 4096, .cookie = 7}},
                                     reading(buffer, 0, 0, 0, 8),
                                     writing(buffer, 16 * MiB - 4 * KiB, 4 * KiB, 60 * KiB, 9)};
  REQUIRE(batch.submit(list) == static_cast<std::int64_t>(list.size()));
  const auto told = batch.all();
  REQUIRE(told.size() == list.size());
  for (const std::uint64_t good : {1, 9}) CHECK(told.at(good).result == 4 * KiB);
  CHECK(told.at(8).result == 0);
  CHECK(told.at(2).result == -EINVAL);
  CHECK(told.at(3).result == -ERANGE);
  CHECK(told.at(4).result == -ERANGE);
  CHECK(told.at(5).result == -EINVAL);
  CHECK(told.at(6).message.find("multiple of 4 bytes") != std::string::npos);
  CHECK(told.at(7).message.find("not registered") != std::string::npos);
  CHECK(open.handle.in_flight() == 0);
}

TEST_CASE("batch: a malformed request undoes what was staged before it, all of it") {
  Open open("emulated:16MiB?pump=caller");
  Buffer buffer(1 * MiB);
  OpenBatch batch(open.handle, 128);
  std::vector<Request> list = small_reads(buffer, 100);
  list[60].wanted.size = 0;
  const auto refused = [&] {
    return batch.batch().submit(batch.id.generation, list.size(), true, Requests(list),
                                [&](std::size_t i) { return list[i].wanted.size == 0; });
  };
  for (int round = 0; round < 20; ++round) {
    REQUIRE(refused() == Batch::kMalformed);
    CHECK(open.handle.in_flight() == 0);
    CHECK(memory::Registry::instance().in_flight(buffer.reference()) == 0);
    CHECK(batch.batch().outstanding(batch.id.generation) == 0);
  }
  CHECK(open.controller().counters().reads == 0);
  list[60].wanted.size = 4 * KiB;
  REQUIRE(batch.submit(list, true) == 100);
  CHECK(batch.all().size() == 100);
  CHECK(open.controller().counters().reads == 100);
}

TEST_CASE("batch: capacity is what is submitted and not collected") {
  Open open("emulated:16MiB");
  Buffer buffer(1 * MiB);
  OpenBatch batch(open.handle, 10);
  CHECK(batch.submit(small_reads(buffer, 11), true) == Batch::kFull);
  CHECK(batch.submit(small_reads(buffer, 7), true) == 7);
  CHECK(batch.submit(small_reads(buffer, 4), true) == Batch::kFull);
  std::map<std::uint64_t, Told> told;
  CHECK(batch.collect(told, 2, 2) == 2);
  CHECK(batch.submit(small_reads(buffer, 20)) == 5);
  told.clear();
  std::size_t count = 0;
  batch.batch().collect(batch.id.generation, ~std::size_t{0}, ~std::size_t{0}, ~std::uint64_t{0} >> 1, {},
                        [&](const Done&) { ++count; });
  CHECK(count == 10);
  CHECK_THROWS_AS(open.handle.open_batch(0, engine::Priority::unsaid), Failure);
  CHECK_THROWS_AS(open.handle.open_batch(engine::kMaxBatchCapacity + 1, engine::Priority::unsaid), Failure);
}

TEST_CASE("batch: collecting waits for the least, for what can come, or for the time") {
  Open open("emulated:16MiB?latency=20ms");
  Buffer buffer(1 * MiB);
  OpenBatch batch(open.handle, 16);
  std::map<std::uint64_t, Told> told;
  CHECK(batch.collect(told, 5) == 0);  // nothing can come
  REQUIRE(batch.submit(small_reads(buffer, 4)) == 4);
  CHECK(batch.collect(told, 1, 16, 0) == 0);
  const std::uint64_t start = monotonic_ns();
  CHECK(batch.collect(told, 1, 16, 1'000'000) == 0);
  CHECK(monotonic_ns() - start >= 1'000'000);
  CHECK(batch.collect(told, 100) == 4);  // no more than that
  CHECK(monotonic_ns() - start < 2'000'000'000);
}

TEST_CASE("batch: cancelling takes back what the device was not given, and tells how far each is right") {
  Open open("emulated:64MiB?pump=caller&mdts=5", {.queues = 2});
  Buffer buffer(48 * MiB);
  OpenBatch batch(open.handle, 64);
  std::vector<Request> list;
  for (unsigned i = 0; i < 3; ++i) list.push_back(reading(buffer, i * 10 * MiB, 10 * MiB, i * 10 * MiB, i));
  REQUIRE(batch.submit(list) == 3);  // 80 commands each: 128 of the 240 are in flight
  CHECK(batch.batch().cancel(batch.id.generation) == 2);
  const auto told = batch.all();
  CHECK(told.at(0).result == 10 * MiB);
  CHECK(told.at(1).result == -ECANCELED);
  CHECK(told.at(1).completed == 48 * 128 * KiB);
  CHECK(told.at(2).result == -ECANCELED);
  CHECK(told.at(2).completed == 0);
  REQUIRE(batch.submit(list) == 3);
  CHECK(batch.all().size() == 3);
}

TEST_CASE("batch: several on one handle, by several threads, beside synchronous requests") {
  for (const char* shape : {"queues=1&depth=4", "queues=1", "queues=3&order=random", "queues=2&mdts=1&vectors=4"}) {
    for (const bool interrupts : {false, true}) {
      CAPTURE(shape);
      CAPTURE(interrupts);
      Policy policy;
      policy.interrupts = interrupts ? engine::Interrupts::yes : engine::Interrupts::no;
      Open open(std::string("emulated:64MiB?") + shape, policy);
      std::atomic<int> wrong{0};
      std::vector<std::thread> threads;
      for (unsigned t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
          Buffer buffer(512 * KiB), copy(512 * KiB);
          const std::uint64_t base = t * MiB;
          OpenBatch batch(open.handle, 40);
          for (unsigned round = 0; round < 15; ++round) {
            buffer.fill(t * 100 + round);
            if (t == 0) {
              if (write(open.handle, buffer, base, 512 * KiB) != 512 * KiB) ++wrong;
              if (read(open.handle, copy, base, 512 * KiB) != 512 * KiB) ++wrong;
            } else {
              const std::uint64_t size = t == 1 ? 128 * KiB : 16 * KiB * t;
              std::vector<Request> writes, reads;
              for (std::uint64_t at = 0; at + size <= 512 * KiB; at += size) {
                writes.push_back(writing(buffer, base + at, size, at, at));
                reads.push_back(reading(copy, base + at, size, at, at));
              }
              batch.submit(writes);
              for (const auto& [cookie, told] : batch.all()) wrong += told.result <= 0;
              batch.submit(reads);
              for (const auto& [cookie, told] : batch.all()) wrong += told.result <= 0;
            }
            if (std::memcmp(buffer.data(), copy.data(), 480 * KiB) != 0) ++wrong;
          }
        });
      }
      for (auto& thread : threads) thread.join();
      CHECK(wrong.load() == 0);
      CHECK(open.handle.in_flight() == 0);
    }
  }
}

TEST_CASE("batch: threads that submit and threads that collect share one batch, and no event is lost or doubled") {
  Open open("emulated:64MiB?order=random");
  Buffer buffer(1 * MiB);
  OpenBatch batch(open.handle, 100);
  constexpr unsigned kEach = 3000;
  std::vector<std::atomic<int>> seen(2 * kEach);
  std::atomic<unsigned> total{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (unsigned sent = 0; sent < kEach;) {
        std::vector<Request> list;
        for (unsigned i = sent; i < std::min(kEach, sent + 37); ++i) {
          list.push_back(reading(buffer, i % 64 * 4096, 4096, i % 64 * 4096, t * kEach + i));
        }
        const std::int64_t taken = batch.submit(list);
        if (taken == 0) std::this_thread::yield();
        sent += static_cast<unsigned>(taken);
      }
    });
    threads.emplace_back([&] {
      while (total.load() < 2 * kEach) {
        const std::int64_t got =
            batch.batch().collect(batch.id.generation, 1, 16, 1'000'000, {}, [&](const Done& done) {
              if (done.result == 4096) ++seen[done.cookie];
            });
        total += static_cast<unsigned>(got);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& count : seen) CHECK(count.load() == 1);
}

TEST_CASE("batch: an overdue command times out, is told of so, and the others go on") {
  Open open("emulated:16MiB", short_deadline());
  Buffer buffer(1 * MiB);
  OpenBatch batch(open.handle, 64);
  emulator::Fault hang;
  hang.kind = emulator::Fault::Kind::hang;
  hang.lba = 5;
  hang.blocks = 1;
  hang.opcode = 2;
  open.controller().inject(hang);
  REQUIRE(batch.submit(small_reads(buffer, 20)) == 20);
  const auto told = batch.all();
  REQUIRE(told.size() == 20);
  CHECK(told.at(5).result == -ETIMEDOUT);
  for (const auto& [cookie, what] : told) {
    if (cookie != 5) CHECK(what.result == 4096);
  }
  REQUIRE(batch.submit(small_reads(buffer, 20)) == 20);
  CHECK(batch.all().at(5).result == 4096);
}

TEST_CASE("batch: a caller who never waits meets the deadline and sees a removal all the same") {
  Open open("emulated:16MiB", short_deadline());
  open.expect_violations = true;
  Buffer buffer(1 * MiB);
  OpenBatch batch(open.handle, 64);
  emulator::Fault fault;
  fault.kind = emulator::Fault::Kind::hang;
  open.controller().inject(fault);
  const auto poll = [&](unsigned count) {
    std::map<std::uint64_t, Told> told;
    const std::uint64_t start = monotonic_ns();
    while (told.size() < count && monotonic_ns() - start < 5'000'000'000) batch.collect(told, 0, ~std::size_t{0}, 0);
    return told;
  };
  REQUIRE(batch.submit(small_reads(buffer, 3)) == 3);
  const auto timed_out = poll(3);
  REQUIRE(timed_out.size() == 3);
  int late = 0;
  for (const auto& [cookie, what] : timed_out) late += what.result == -ETIMEDOUT;
  CHECK(late == 1);
  fault.kind = emulator::Fault::Kind::remove;
  open.controller().inject(fault);
  REQUIRE(batch.submit(small_reads(buffer, 3)) == 3);
  CHECK(poll(3).size() == 3);
  CHECK(open.handle.state() == State::lost);
}

TEST_CASE("batch: what a reset ends in the middle is told of, each request once") {
  for (const auto kind : {emulator::Fault::Kind::fatal, emulator::Fault::Kind::remove}) {
    Open open("emulated:64MiB?mdts=5", short_deadline());
    open.expect_violations = true;
    Buffer buffer(32 * MiB);
    OpenBatch batch(open.handle, 64);
    emulator::Fault fault;
    fault.kind = kind;
    fault.skip = 50;
    open.controller().inject(fault);
    std::vector<Request> list;
    for (unsigned i = 0; i < 30; ++i) list.push_back(reading(buffer, i * MiB, 1 * MiB, i * MiB, i));
    REQUIRE(batch.submit(list) == 30);
    const auto told = batch.all();
    REQUIRE(told.size() == 30);
    int failed = 0;
    for (const auto& [cookie, what] : told) failed += what.result < 0;
    CHECK(failed > 0);
    const bool lost = kind == emulator::Fault::Kind::remove;
    CHECK(open.handle.state() == (lost ? State::lost : State::ready));
    if (lost) CHECK(told.at(29).result == -ENODEV);
    REQUIRE(batch.submit(list) == 30);
    for (const auto& [cookie, what] : batch.all()) CHECK(what.result == (lost ? -ENODEV : 1 * MiB));
  }
}

TEST_CASE("batch: a wedged controller ends every request, and the memory stays held") {
  Open open("emulated:16MiB", short_deadline());
  open.expect_violations = true;
  Buffer buffer(1 * MiB);
  emulator::Fault hang, stuck, bus;
  hang.kind = emulator::Fault::Kind::hang;
  hang.abortable = false;
  stuck.kind = emulator::Fault::Kind::never_stopped;
  stuck.count = bus.count = ~std::uint64_t{0};
  bus.kind = emulator::Fault::Kind::reset_fails;
  for (const auto& fault : {hang, stuck, bus}) open.controller().inject(fault);
  {
    OpenBatch batch(open.handle, 64);
    REQUIRE(batch.submit(small_reads(buffer, 20)) == 20);
    const auto told = batch.all();
    REQUIRE(told.size() == 20);
    int timed_out = 0;
    for (const auto& [cookie, what] : told) timed_out += what.result == -ETIMEDOUT;
    CHECK(timed_out == 1);
    CHECK(open.handle.state() == State::wedged);
  }
  CHECK(memory::Registry::instance().in_flight(buffer.reference()) > 0);
  open.controller().clear_faults();
  CHECK(open.handle.force_stop());
  CHECK(memory::Registry::instance().in_flight(buffer.reference()) == 0);
}

TEST_CASE(
    "batch: closing waits for what is in flight, and a closed one finds nothing, however its slot is used again") {
  Open open("emulated:16MiB?latency=2ms");
  Buffer buffer(1 * MiB);
  engine::BatchId old;
  {
    OpenBatch batch(open.handle, 64);
    old = batch.id;
    REQUIRE(batch.submit(small_reads(buffer, 50)) == 50);
  }
  CHECK(memory::Registry::instance().in_flight(buffer.reference()) == 0);
  OpenBatch next(open.handle, 4);
  CHECK(next.id.slot == old.slot);
  Batch& stale = *open.handle.batch(old.slot);
  const std::vector<Request> list = small_reads(buffer, 1);
  CHECK(stale.submit(old.generation, 1, false, Requests(list), [](std::size_t) { return false; }) == Batch::kClosed);
  CHECK(stale.cancel(old.generation) == Batch::kClosed);
  CHECK(stale.collect(old.generation, 1, 1, 0, {}, [](const Done&) {}) == Batch::kClosed);
  CHECK_FALSE(open.handle.close_batch(old));
  CHECK(next.submit(list) == 1);
}

TEST_CASE("batch: neighbours of different buffers go each to its own") {
  Open open("emulated:16MiB?pump=caller");
  Buffer all(64 * KiB), one(64 * KiB), two(64 * KiB);
  all.fill(3);
  REQUIRE(write(open.handle, all, 0, 64 * KiB) == 64 * KiB);
  OpenBatch batch(open.handle, 16);
  std::vector<Request> list;
  for (std::uint64_t i = 0; i < 16; ++i) {
    list.push_back(reading(i / 2 % 2 == 0 ? one : two, i * 4 * KiB, 4 * KiB, i * 4 * KiB, i));
  }
  REQUIRE(batch.submit(list) == 16);
  CHECK(batch.all().size() == 16);
  for (std::uint64_t i = 0; i < 16; ++i) {
    Buffer& mine = i / 2 % 2 == 0 ? one : two;
    Buffer& other = i / 2 % 2 == 0 ? two : one;
    CHECK(std::memcmp(mine.data() + i * 4 * KiB, all.data() + i * 4 * KiB, 4 * KiB) == 0);
    CHECK(std::memcmp(other.data() + i * 4 * KiB, all.data() + i * 4 * KiB, 4 * KiB) != 0);
  }
}

TEST_CASE("batch: memory that is closed in the middle is refused, not read") {
  Open open("emulated:16MiB");
  auto buffer = std::make_unique<Buffer>(64 * KiB);
  OpenBatch batch(open.handle, 64);
  const Buffer kept(64 * KiB);
  const memory::Reference stale = buffer->reference();
  buffer.reset();
  CHECK(batch.batch().submit(batch.id.generation, 3, false, Stale{stale}, [](std::size_t) { return false; }) == 3);
  for (const auto& [cookie, told] : batch.all()) CHECK(told.result == -ESTALE);
}
