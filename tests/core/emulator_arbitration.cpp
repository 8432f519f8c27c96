// SPDX-License-Identifier: Apache-2.0
//
// How a controller with few slots shares them among queues, and that nothing is stuck or forgotten while they are full.
#include <chrono>
#include <map>

#include "emulator_host.hpp"

using namespace emulator_test;
using nvme::Opcode;
namespace status = ugds::nvme::status;

namespace {

constexpr std::uint64_t kPage = 4096;
/// Each command takes one microsecond of a pipe that serves one at a time.
const std::string kPipe = "1MiB?pump=caller&clock=virtual&iops=1000000";
constexpr std::uint64_t kService = 1'000;

struct Fixture {
  explicit Fixture(const std::string& uri, std::uint16_t queues = 2, std::uint32_t depth = 128)
      : host(ready_host(uri, depth)), h(*host), buffer(h.c, 65536) {
    for (std::uint16_t id = 2; id <= queues; ++id) REQUIRE(h.create_queue(id, depth) == 0);
  }
  SubmissionEntry read(std::uint64_t lba = 0) { return h.transfer(Opcode::read, 1, lba, 1, buffer, 0, kPage); }
  void submit(std::uint16_t queue, int count) {
    for (int i = 0; i < count; ++i) h.place(queue, read(), static_cast<std::uint16_t>(i));
    h.ring(queue);
  }

  /// The queues of the next `count` completions, in the order in which they come, and when each came.
  struct Came {
    std::uint16_t queue;
    std::uint64_t at;
  };
  std::vector<Came> complete(int count, std::uint16_t queues = 2) {
    std::vector<Came> came;
    for (int idle = 0; static_cast<int>(came.size()) < count && idle < 10'000; ++idle) {
      for (std::uint16_t id = 1; id <= queues; ++id) {
        // Without a turn of its own for an empty queue: of completions in one turn the first queue's would be first.
        const Queue& q = h.queues[id];
        const CompletionWord word{q.cq->as<CompletionEntry>()[q.head].last};
        if (word.phase() != q.phase) continue;
        REQUIRE(h.poll(id).has_value());
        came.push_back({id, h.c.virtual_now_ns()});
      }
      h.turn();
    }
    REQUIRE(static_cast<int>(came.size()) == count);
    return came;
  }
  std::vector<int> order(int count, std::uint16_t queues = 2) {
    std::vector<int> ids;
    for (const Came& c : complete(count, queues)) ids.push_back(c.queue);
    return ids;
  }

  std::unique_ptr<Host> host;
  Host& h;
  Dma buffer;
};

/// How long a command waits that comes behind 64 of another queue.
std::uint64_t latency_behind_a_deep_queue(const std::string& slots) {
  Fixture f(kPipe + slots);
  f.submit(1, 64);
  f.h.turn();
  const std::uint64_t start = f.h.c.virtual_now_ns();
  f.submit(2, 1);
  std::uint64_t took = 0;
  for (const auto& c : f.complete(65))
    if (c.queue == 2) took = c.at - start;
  CHECK(f.h.violation_count() == 0);
  return took;
}

}  // namespace

TEST_CASE("slots: a deep queue keeps another's command waiting for the slots' worth of service, without them for all") {
  CHECK(latency_behind_a_deep_queue("") == 65 * kService);
  CHECK(latency_behind_a_deep_queue("&slots=0") == 65 * kService);
  CHECK(latency_behind_a_deep_queue("&slots=4") == 5 * kService);
  CHECK(latency_behind_a_deep_queue("&slots=1") == 2 * kService);
  CHECK(latency_behind_a_deep_queue("&slots=16") == 17 * kService);
}

TEST_CASE("slots: the head moves only as far as there are slots, and the pipe is never short of work") {
  Fixture f(kPipe + "&slots=4", 1);
  f.submit(1, 20);
  std::vector<std::uint16_t> heads;
  for (int i = 0; i < 20; ++i) heads.push_back(f.h.wait(1).sq_head);
  // One completes and the next is fetched a turn later; so the head is four on while there is as much.
  for (int i = 0; i < 20; ++i) CHECK(heads[static_cast<std::size_t>(i)] == std::min(i + 4, 20));
  CHECK(f.h.c.virtual_now_ns() == 20 * kService);
  CHECK(f.h.violation_count() == 0);
}

TEST_CASE("slots: as many commands as slots share a latency, so that it bounds the rate") {
  Fixture f("1MiB?pump=caller&clock=virtual&latency=10us&slots=4", 1);
  f.submit(1, 20);
  f.complete(20, 1);
  CHECK(f.h.c.virtual_now_ns() == 20 / 4 * 10'000);
}

TEST_CASE("arbitration: round-robin goes on with the queue after the one at which the slots ran out") {
  Fixture f(kPipe + "&slots=1", 3);
  for (std::uint16_t id = 1; id <= 3; ++id) f.submit(id, 3);
  CHECK(f.order(9, 3) == std::vector<int>{1, 2, 3, 1, 2, 3, 1, 2, 3});
  f.submit(3, 2);
  f.submit(1, 2);
  CHECK(f.order(4, 3) == std::vector<int>{1, 3, 1, 3});
  CHECK(f.h.violation_count() == 0);
}

TEST_CASE("arbitration: the burst is what one queue may take before the next has its turn") {
  {
    Fixture f(kPipe + "&burst=2");
    f.submit(1, 6);
    f.submit(2, 6);
    CHECK(f.order(12) == std::vector<int>{1, 1, 2, 2, 1, 1, 2, 2, 1, 1, 2, 2});
  }
  {
    Fixture f(kPipe + "&burst=2&slots=5");
    f.submit(1, 6);
    f.submit(2, 6);
    // 1 1 2 2, and 1 has the last slot; after that they come one by one, and the turns alternate.
    CHECK(f.order(12) == std::vector<int>{1, 1, 2, 2, 1, 2, 1, 2, 1, 2, 1, 2});
  }
  {
    Fixture f(kPipe);
    f.submit(1, 70);
    f.submit(2, 2);
    std::vector<int> expected(64, 1);
    expected.insert(expected.end(), {2, 2, 1, 1, 1, 1, 1, 1});
    CHECK(f.order(72) == expected);
  }
}

TEST_CASE("arbitration: queues that come and go have their turns like the others") {
  Fixture f(kPipe + "&slots=1", 3);
  f.submit(1, 2);
  CHECK(f.order(2, 3) == std::vector<int>{1, 1});
  REQUIRE(f.h.admin(nvme::delete_submission_queue(2)).status == 0);
  REQUIRE(f.h.admin(nvme::delete_completion_queue(2)).status == 0);
  f.submit(1, 2);
  f.submit(3, 2);
  CHECK(f.order(4, 3) == std::vector<int>{3, 1, 3, 1});
  REQUIRE(f.h.create_queue(2, 128) == 0);
  for (std::uint16_t id = 1; id <= 3; ++id) f.submit(id, 2);
  std::map<int, int> first_three;
  const std::vector<int> order = f.order(6, 3);
  for (int i = 0; i < 3; ++i) ++first_three[order[static_cast<std::size_t>(i)]];
  CHECK(first_three == std::map<int, int>{{1, 1}, {2, 1}, {3, 1}});
  CHECK(f.h.violation_count() == 0);
}

TEST_CASE("slots: admin commands need none") {
  Fixture f(kPipe + "&slots=2");
  f.h.c.inject({.kind = Fault::Kind::hang, .count = 2});
  f.submit(1, 5);
  CHECK(f.h.quiet(1));
  Dma page(f.h.c, 4096);
  for (int i = 0; i < 100; ++i)
    REQUIRE(f.h.admin(nvme::identify(nvme::Cns::controller, 0, Iova(page.iova))).status == 0);
  CHECK(f.h.quiet(1));
  CHECK(f.h.violation_count() == 0);
}

TEST_CASE("slots: commands that hang keep theirs until they are aborted, and those behind them then go on") {
  Fixture f(kPipe + "&slots=2");
  f.h.c.inject({.kind = Fault::Kind::hang, .count = 2});
  f.submit(1, 5);
  f.submit(2, 1);
  CHECK(f.h.quiet(1));
  CHECK(f.h.quiet(2));
  // The controller has not fetched this one, so that it knows nothing to abort.
  CHECK_FALSE(nvme::was_aborted(f.h.admin(nvme::abort(1, 3)).result));
  CHECK(f.h.quiet(1));
  CHECK(nvme::was_aborted(f.h.admin(nvme::abort(1, 0)).result));
  const Completion aborted = f.h.wait(1);
  CHECK(aborted.cid == 0);
  CHECK(aborted.status == status::abort_requested);
  CHECK(f.h.wait(2).status == 0);
  for (std::uint16_t cid = 2; cid < 5; ++cid) CHECK(f.h.wait(1).cid == cid);
  CHECK(nvme::was_aborted(f.h.admin(nvme::abort(1, 1)).result));
  CHECK(f.h.wait(1).cid == 1);
  f.submit(1, 100);
  f.complete(100, 1);
  CHECK(f.h.violation_count() == 0);
}

TEST_CASE("slots: a reset, a removal or a queue's deletion gives all of them back") {
  Fixture f(kPipe + "&slots=2");
  const auto fill = [&] {
    f.h.c.inject({.kind = Fault::Kind::hang, .count = 2, .abortable = false});
    f.submit(1, 5);
    CHECK(f.h.quiet(1));
  };
  const auto works = [&] {
    const std::uint64_t start = f.h.c.virtual_now_ns();
    f.submit(1, 6);
    f.complete(6, 1);
    CHECK(f.h.c.virtual_now_ns() - start == 6 * kService);
    f.h.c.inject({.kind = Fault::Kind::hang, .count = 2});
    f.submit(1, 6);
    CHECK(f.h.quiet(1));  // there are two of them, and no more
    f.h.c.function_reset();
    f.h.bring_up();
    REQUIRE(f.h.create_queue(1, 128) == 0);
    CHECK(f.h.violation_count() == 0);
  };
  fill();
  f.h.bring_up();  // by CC.EN
  REQUIRE(f.h.create_queue(1, 128) == 0);
  works();
  fill();
  f.h.c.remove();
  CHECK(f.h.reg32(Register::csts) == 0xffff'ffff);
  f.h.c.plug();
  f.h.bring_up();
  REQUIRE(f.h.create_queue(1, 128) == 0);
  works();
  f.h.c.inject({.kind = Fault::Kind::hang, .count = 2});
  f.submit(1, 5);
  CHECK(f.h.quiet(1));
  REQUIRE(f.h.admin(nvme::delete_submission_queue(1)).status == 0);
  for (int i = 0; i < 2; ++i) CHECK(f.h.wait(1).status == status::aborted_sq_deletion);
  CHECK(f.h.quiet(1));  // what was not fetched has gone with its queue
  REQUIRE(f.h.admin(nvme::delete_completion_queue(1)).status == 0);
  REQUIRE(f.h.create_queue(1, 128) == 0);
  works();
}

TEST_CASE("slots: a command that is removed with them full, or breaks the controller, does not keep them") {
  for (const Fault::Kind kind : {Fault::Kind::remove, Fault::Kind::fatal}) {
    Fixture f(kPipe + "&slots=2");
    f.h.c.inject({.kind = kind, .skip = 1});
    f.submit(1, 5);
    CHECK(f.h.quiet(1));
    f.h.c.plug();
    f.h.bring_up();
    REQUIRE(f.h.create_queue(1, 128) == 0);
    const std::uint64_t start = f.h.c.virtual_now_ns();
    f.submit(1, 5);
    f.complete(5, 1);
    CHECK(f.h.c.virtual_now_ns() - start == 5 * kService);
    CHECK(f.h.violation_count() == 0);
  }
}

TEST_CASE("slots: memory of what waits in its queue for a slot is in use") {
  Fixture f(kPipe + "&slots=1");
  f.h.c.inject({.kind = Fault::Kind::hang});
  Dma unrelated(f.h.c, kPage), data(f.h.c, kPage), lists(f.h.c, kPage), listed(f.h.c, 4 * kPage);
  f.submit(1, 1);
  f.h.submit(2, f.h.transfer(Opcode::read, 1, 0, 1, data, 0, kPage), 7);
  f.h.submit(2, f.h.transfer(Opcode::read, 1, 0, 4, listed, 0, 4 * kPage, &lists), 8);
  CHECK(f.h.quiet(2));
  const auto uses = [&](const std::string& what) {
    std::size_t count = 0;
    for (const auto& v : f.h.c.violations())
      count += v.rule == "unmap-in-use" && v.what.find(what) != std::string::npos;
    return count;
  };
  unrelated.unmap();
  CHECK(f.h.violation_count() == 0);
  data.unmap();
  CHECK(uses("data (command 7, queue 2)") == 1);
  CHECK(f.h.violation_count() == 1);
  lists.unmap();
  CHECK(uses("a PRP list (command 8, queue 2)") == 1);
  CHECK(f.h.violation_count() == 2);
  // None of them was taken out of turn.
  CHECK(nvme::was_aborted(f.h.admin(nvme::abort(1, 0)).result));
  CHECK(f.h.wait(2).sq_head == 1);
  CHECK(f.h.violated("unmapped-access"));
}

TEST_CASE("slots: the strict checks hold for what waits in its queue") {
  Fixture f(kPipe + "&slots=1");
  f.submit(1, 3);
  f.h.place(1, f.read(), 2);  // the same identifier as the third's, which is fetched and complete before this is
  f.h.ring(1);
  for (const int cid : {0, 1, 2, 2}) CHECK(f.h.wait(1).cid == cid);
  CHECK(f.h.violated("duplicate-cid"));
  CHECK(f.h.violation_count() == 1);
  // More than the ring holds beyond the head that the host was told.
  for (int i = 0; i < 126; ++i) f.h.place(1, f.read(), static_cast<std::uint16_t>(i));
  f.h.ring(1);
  f.h.turns(1);
  f.h.place(1, f.read(), 126);
  f.h.place(1, f.read(), 127);
  f.h.ring(1);
  f.h.turns(1);
  CHECK(f.h.violated("sq-overflow"));
}

TEST_CASE("slots: with the controller's own thread and real time, what waits for slots is not slept past") {
  for (const std::string shadow : {"", "&doorbells=trapped"}) {
    Fixture f("1MiB?latency=2ms&slots=2&idle=0us" + shadow);
    const std::uint64_t start = monotonic_ns();
    f.submit(1, 10);
    for (int i = 0; i < 10; ++i) CHECK(f.h.wait(1).status == 0);
    const std::uint64_t took = monotonic_ns() - start;
    CHECK(took >= 10'000'000);
    CHECK(took < 2'000'000'000);
    // Slots that hung commands fill leave nothing to poll for: it sleeps, and an abort wakes it.
    f.h.c.inject({.kind = Fault::Kind::hang, .count = 2});
    f.submit(1, 4);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const std::uint64_t before = f.h.c.counters().turns;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(f.h.c.counters().turns - before < 2'000);
    CHECK(nvme::was_aborted(f.h.admin(nvme::abort(1, 0)).result));
    for (int i = 0; i < 3; ++i) f.h.wait(1);
    CHECK(f.h.violation_count() == 0);
  }
}
