// SPDX-License-Identifier: Apache-2.0
//
// How requests share a device, in virtual time: the line of a queue pair, the pacer, background requests. The device
// moves 4 GiB a second, so that a piece of 128 KiB takes 30.5 us of it.
// Not under sanitizers: seconds of virtual time, which they make minutes of. The engine runs under them in
// engine_soak.cpp and engine_batch.cpp.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

#include <algorithm>
#include <numeric>

#include "engine/mode.hpp"
#include "engine_host.hpp"
#include "queue/background.hpp"
#include "simulation/simulation.hpp"

using namespace engine_test;
using engine::Priority;
using simulation::Actor;
using simulation::Outcome;

namespace {

constexpr std::uint64_t kUs = 1'000, kMs = 1'000'000;
constexpr std::uint64_t kKiB = 1024, kMiB = kKiB * 1024;
constexpr double kBandwidth = 4.0 * 1024 * 1024 * 1024;
const std::string kDevice = "emulated:64MiB?vwc=0&pump=caller&clock=virtual&bandwidth=4GiB/s&latency=";

const Actor kSmallRead{.size = 4 * kKiB, .pause_ns = 20 * kUs};

/// Runs actors on a device of their own.
struct Bench {
  explicit Bench(const std::string& uri, std::uint32_t queues = 4, std::uint32_t depth = 0)
      : open(uri, {.queues = queues, .depth = depth, .deadline_ns = 3600ull * 1'000'000'000}), buffer(16 * kMiB) {}
  std::vector<Outcome> run(const std::vector<Actor>& actors, std::uint64_t ms = 100, std::uint64_t warm_up_ms = 50) {
    return simulation::run(open.handle, buffer.reference(), actors, {warm_up_ms * kMs, ms * kMs});
  }
  queue::Pacer& pacer() { return open.handle.scheduler().pacer(); }

  Open open;
  Buffer buffer;
};

std::vector<Actor> times(std::size_t count, const Actor& actor) { return std::vector<Actor>(count, actor); }
std::vector<Actor> operator+(std::vector<Actor> some, const std::vector<Actor>& more) {
  some.insert(some.end(), more.begin(), more.end());
  return some;
}

std::uint64_t percentile(const std::vector<Outcome>& outcomes, std::size_t first, std::size_t count, unsigned percent) {
  std::vector<std::uint64_t> all;
  for (std::size_t i = first; i < first + count; ++i) {
    all.insert(all.end(), outcomes[i].latencies.begin(), outcomes[i].latencies.end());
  }
  REQUIRE(!all.empty());
  std::sort(all.begin(), all.end());
  return all[std::min(all.size() - 1, all.size() * percent / 100)];
}

double share(const std::vector<Outcome>& outcomes, std::size_t first, std::size_t count, std::uint64_t ms = 100) {
  std::uint64_t bytes = 0;
  for (std::size_t i = first; i < first + count; ++i) bytes += outcomes[i].bytes;
  return static_cast<double>(bytes) / (static_cast<double>(ms) / 1000 * kBandwidth);
}

}  // namespace

TEST_CASE("simulated: a lone read takes the device's latency and its transfer, to the nanosecond") {
  Bench bench(kDevice + "80us");
  const auto alone = bench.run({{.size = 4 * kKiB}});
  REQUIRE(alone[0].latencies.size() > 1000);
  for (const std::uint64_t latency : alone[0].latencies) CHECK(latency / 2 == (80 * kUs + 953) / 2);
}

TEST_CASE("simulated: callers are served at the same instant, and the same plan gives the same latencies") {
  const std::vector<Actor> plan{{.size = 128 * kKiB}, {.size = 128 * kKiB}, kSmallRead, {.size = kMiB, .depth = 4}};
  Bench one(kDevice + "80us"), other(kDevice + "80us");
  const auto first = one.run(plan), second = other.run(plan);
  for (std::size_t i = 0; i < plan.size(); ++i) CHECK(first[i].latencies == second[i].latencies);

  // Neither sees time pass before the other has had its turn: the second waits for the first's transfer alone.
  Bench pair(kDevice + "80us");
  const auto both = pair.run({{.size = 64 * kKiB}, {.size = 64 * kKiB}});
  CHECK(percentile(both, 0, 2, 100) <= 80 * kUs + 2 * 15'260);
  CHECK(both[0].latencies.size() == both[1].latencies.size());
}

TEST_CASE("simulated: what cannot be simulated is refused") {
  Open real("emulated:64MiB?pump=caller");
  Buffer buffer(4096);
  const std::vector<Actor> plan{{.size = 4096}};
  CHECK_THROWS_AS(simulation::run(real.handle, buffer.reference(), plan, {}), Failure);
  Bench bench(kDevice + "80us");
  CHECK_THROWS_AS(bench.run({}), Failure);
  CHECK_THROWS_AS(bench.run({{.size = 32 * kMiB}}), Failure);
  CHECK_THROWS_AS(bench.run({{.size = 0}}), Failure);
}

TEST_CASE("who waits for room in a queue waits for the others' turns and no longer") {
  // One entry for all: each command takes 10 us and what its bytes take.
  Bench bench(kDevice + "10us", 1, 2);
  const auto equal = bench.run(times(4, {.size = 4 * kKiB}));
  const std::uint64_t turn = 10 * kUs + 954;
  for (const Outcome& outcome : equal) {
    CHECK(outcome.latencies.size() > 2000);
    CHECK(*std::max_element(outcome.latencies.begin(), outcome.latencies.end()) <= 4 * turn);
  }
}

TEST_CASE("a small request waits for one command of a large one on a full queue, and not for all of them") {
  Bench bench(kDevice + "10us", 1, 2);
  const auto mixed = bench.run({{.size = 4 * kKiB}, {.size = 16 * kMiB}, {.size = 16 * kMiB}});
  const std::uint64_t piece = 10 * kUs + 30'518;
  CHECK(percentile(mixed, 0, 1, 100) <= 2 * piece + 11 * kUs);
  CHECK(mixed[1].bytes == mixed[2].bytes);
  CHECK(mixed[1].bytes > 0);
}

TEST_CASE("the pacer finds what fills the device, and small requests wait for little more than that") {
  for (const std::string traits :
       {"80us", "20us", "80us&mdts=8", "80us&slots=64&burst=8", "20us&mdts=8&slots=64&burst=8"}) {
    CAPTURE(traits);
    Bench idle(kDevice + traits), loaded(kDevice + traits);
    const std::uint64_t unloaded = percentile(idle.run(times(4, kSmallRead)), 0, 4, 99);
    for (const std::vector<Actor>& large :
         {times(1, {.size = kMiB, .depth = 128}), times(4, {.size = 16 * kMiB}), times(16, {.size = 16 * kMiB}),
          times(2, {.size = 16 * kMiB}) + times(1, {.size = kMiB, .depth = 32})}) {
      const auto both = loaded.run(times(4, kSmallRead) + large, 400);
      CHECK(percentile(both, 0, 4, 99) < 3 * unloaded);
      CHECK(share(both, 4, large.size(), 400) > 0.8);
      CHECK(loaded.pacer().protects());
      CHECK(loaded.pacer().limit() >= 128 * kKiB);
      CHECK(loaded.pacer().limit() <= kMiB);
    }
  }
}

TEST_CASE("the pacer leaves large requests two commands on a device whose latency is all transfer") {
  Bench bench(kDevice + "1us");
  const auto both = bench.run(times(2, kSmallRead) + times(1, {.size = kMiB, .depth = 64}));
  CHECK(bench.pacer().limit() == 128 * kKiB);
  CHECK(share(both, 2, 1) > 0.9);
}

TEST_CASE("without small requests nothing is held back, and large ones are not cut finely") {
  Bench bench(kDevice + "80us&mdts=8");
  const auto before = bench.open.controller().counters();
  const auto alone = bench.run({{.size = kMiB, .depth = 64}, {.size = 16 * kMiB}});
  const auto after = bench.open.controller().counters();
  CHECK_FALSE(bench.pacer().protects());
  CHECK(bench.pacer().limit() > 1ull << 60);
  CHECK(share(alone, 0, 2) > 0.99);
  CHECK((after.bytes_read - before.bytes_read) / (after.reads - before.reads) == kMiB);
}

TEST_CASE("a flush and a discard are nobody's small requests: large ones are not cut finely for them") {
  Bench bench(kDevice + "80us&mdts=8");
  Handle& handle = bench.open.handle;
  bench.run({{.size = kMiB, .depth = 8}}, 5, 5);
  for (const nvme::Opcode opcode : {nvme::Opcode::flush, nvme::Opcode::dataset_management}) {
    CAPTURE(static_cast<int>(opcode));
    Transfer transfer{.size = 4096};
    transfer.opcode = opcode;
    if (opcode == nvme::Opcode::flush) transfer.size = 0;
    engine::Operation operation(handle, transfer);
    while (!operation.turn()) bench.open.controller().advance_ns(1000);
    const auto before = bench.open.controller().counters();
    bench.run({{.size = kMiB, .depth = 8}, {.size = 16 * kMiB}}, 20, 5);
    const auto after = bench.open.controller().counters();
    CHECK_FALSE(bench.pacer().protects());
    CHECK((after.bytes_read - before.bytes_read) / (after.reads - before.reads) == kMiB);
  }
}

TEST_CASE("large requests are protected from each other: none is served much later than the rest") {
  Bench bench(kDevice + "20us");
  const auto both = bench.run(times(4, kSmallRead) + times(12, {.size = 4 * kMiB}), 400);
  for (std::size_t i = 4; i < 16; ++i) {
    CAPTURE(i);
    CHECK(share(both, i, 1, 400) > 0.75 * share(both, 4, 12, 400) / 12);
  }
  CHECK(percentile(both, 4, 12, 100) < percentile(both, 4, 12, 50) * 5 / 4);
}

TEST_CASE("a batch of large requests goes on beside synchronous ones that leave no room") {
  Bench bench(kDevice + "20us");
  const auto both =
      bench.run(times(2, kSmallRead) + times(1, {.size = 2 * kMiB, .depth = 2}) + times(8, {.size = 16 * kMiB}), 400);
  CHECK(share(both, 2, 1, 400) > 0.75 / 9);
}

TEST_CASE("a request that is sent to a queue pair goes there, whatever others have less to do") {
  Bench bench(kDevice + "20us");
  const Transfer transfer{.buffer = bench.buffer.reference(), .size = kMiB};
  for (const auto& pair : bench.open.handle.queues()) {
    engine::Operation operation(bench.open.handle, transfer, pair.get());
    while (!operation.turn()) {
    }
    CHECK(pair->staged() == 8);
  }
}

TEST_CASE("a request that gives up while it waits for its first command holds up nobody") {
  Bench bench(kDevice + "20us", 1);
  bench.run(times(2, kSmallRead) + times(4, {.size = 4 * kMiB}));
  REQUIRE(bench.pacer().protects());
  Handle& handle = bench.open.handle;
  const engine::Turn turn = handle.turn();
  engine::Turn nothing;
  nothing.run = [](void*) {};
  handle.set_turn(nothing);
  const Transfer large{.buffer = bench.buffer.reference(), .size = 4 * kMiB};
  engine::Operation one(handle, large), two(handle, large), other(handle, large);
  for (int i = 0; i < 20; ++i) one.turn(), two.turn();
  const std::uint64_t full = bench.pacer().in_flight();
  REQUIRE(full > 0);
  {
    engine::Operation gone(handle, large);
    for (int i = 0; i < 3; ++i) CHECK_FALSE(gone.turn());
    gone.abandon();
  }
  bench.open.controller().advance_ns(1000);
  while (bench.pacer().in_flight() == full) {
    turn.run(turn.context);
    other.turn();
  }
  // The room is for the one that has gone, until others have looked in vain for a while.
  CHECK(bench.pacer().in_flight() < full);
  for (int i = 0; i < 100; ++i) other.turn();
  CHECK(bench.pacer().in_flight() == full);
  handle.set_turn(turn);
  for (engine::Operation* operation : {&one, &two, &other}) {
    for (int i = 0; i < 1'000'000 && !operation->turn(); ++i) {
    }
    CHECK(operation->done());
    CHECK(operation->result() == 4 * kMiB);
  }
}

TEST_CASE("background requests get their share beside others of any kind, and all there is without them") {
  const Actor writes{.opcode = Opcode::write, .size = kMiB, .depth = 32, .priority = Priority::background};
  const double promised = 38.0 / 256;
  for (const std::string traits : {"80us", "20us", "80us&mdts=8", "80us&slots=64&burst=8"}) {
    CAPTURE(traits);
    Bench alone(kDevice + traits);
    CHECK(share(alone.run({writes}), 0, 1) > 0.99);
    for (const std::vector<Actor>& reads : {times(4, {.size = 16 * kKiB}), times(16, {.size = 128 * kKiB}),
                                            times(1, {.size = 128 * kKiB, .depth = 64})}) {
      Bench bench(kDevice + traits), unloaded(kDevice + traits);
      const double before = share(unloaded.run(reads, 200), 0, reads.size(), 200);
      const auto both = bench.run(reads + times(1, writes), 200);
      CHECK(share(both, reads.size(), 1, 200) == doctest::Approx(promised).epsilon(0.05));
      CHECK(share(both, 0, reads.size(), 200) > 0.8 * before);
    }
  }
}

TEST_CASE("background requests have their turns among themselves") {
  const Actor write{.opcode = Opcode::write, .size = kMiB, .priority = Priority::background};
  Bench bench(kDevice + "20us");
  const auto both = bench.run(times(16, {.size = 128 * kKiB}) + times(4, write), 400);
  CHECK(percentile(both, 16, 4, 100) < percentile(both, 16, 4, 50) * 3 / 2);
}

TEST_CASE("background requests have the device again when the others are gone") {
  const Actor writes{.opcode = Opcode::write, .size = kMiB, .depth = 32, .priority = Priority::background};
  Bench bench(kDevice + "20us");
  bench.run(times(4, {.size = 16 * kKiB}) + times(1, writes));
  CHECK(bench.pacer().yields());
  // Small ones of a moment ago are still protected from what they would meet if they came back: no more than fills.
  CHECK(share(bench.run({writes}), 0, 1) > 0.9);
  CHECK_FALSE(bench.pacer().yields());
}

TEST_CASE("mode priority takes writes for background requests, and the other modes do not") {
  const std::vector<Actor> plan =
      times(4, {.size = 16 * kKiB}) + times(1, {.opcode = Opcode::write, .size = kMiB, .depth = 32});
  Bench priority(kDevice + "80us&mode=priority"), latency(kDevice + "80us&mode=latency");
  const double reads = share(priority.run(plan), 0, 4), others = share(latency.run(plan), 0, 4);
  CHECK(reads > 1.5 * others);
  Bench said(kDevice + "80us&mode=priority");
  std::vector<Actor> normal = plan;
  normal.back().priority = Priority::normal;
  CHECK(share(said.run(normal), 0, 4) == doctest::Approx(others).epsilon(0.01));
}

TEST_CASE("the paper's policy makes small requests wait for all that large ones have in flight") {
  simulation::register_control_mode();
  Bench idle(kDevice + "80us"), batch(kDevice + "80us&mode=unpaced"), sync(kDevice + "80us&mode=unpaced");
  Actor small = kSmallRead;
  small.holds_queue = true;
  const std::uint64_t unloaded = percentile(idle.run({kSmallRead}), 0, 1, 99);
  CHECK(percentile(batch.run({small, {.size = kMiB, .depth = 128}}), 0, 1, 99) > 10 * unloaded);
  const auto held = sync.run(times(1, small) + times(3, {.size = 16 * kMiB, .holds_queue = true}), 400);
  CHECK(percentile(held, 0, 1, 99) > 10 * unloaded);
}

TEST_CASE("a background share probes, waits for its probe to end, and then keeps to its part") {
  queue::BackgroundShare share;
  share.configure(64, 1'000'000);  // a quarter
  constexpr std::uint32_t kBytes = 1u << 20;
  std::uint64_t now = 1, moved = 0;
  int probes = 0;
  while (share.take(now, kBytes, std::uint64_t{kBytes} * probes)) ++probes;
  CHECK(probes == 6);
  for (int i = probes; i > 0; --i) {
    now += 100;  // a MiB in 100
    moved += kBytes;
    share.note_latency(600);
    REQUIRE(share.measures());
    share.give(now, moved, i == 1);
  }
  CHECK(share.pace() == 100);
  CHECK_FALSE(share.take(now, kBytes, 0));  // they have had their share for six times 400
  CHECK_FALSE(share.take(now + 2399, kBytes, 0));
  now += 2400;
  for (int i = 0; i < 10; ++i, now += 400) {
    CHECK(share.take(now, kBytes, kBytes));
    CHECK_FALSE(share.take(now + 399, kBytes, 0));
  }
  CHECK_FALSE(share.measures());
}

#endif
