// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "emulator_host.hpp"

using namespace emulator_test;

namespace {

constexpr std::uint64_t kPage = 4096;

/// What a vector's interrupts go to.
struct Event {
  int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  ~Event() { close(fd); }
  /// Interrupts since the last look.
  std::uint64_t take() {
    std::uint64_t count = 0;
    return read(fd, &count, sizeof count) == sizeof count ? count : 0;
  }
  bool wait(int ms = 5000) {
    pollfd p{fd, POLLIN, 0};
    return poll(&p, 1, ms) == 1;
  }
};

/// Ready, its queue 1 with interrupts on `vector`.
struct Setup {
  explicit Setup(const std::string& uri, std::uint16_t vector = 1) : h(uri), data(h.c, 16 * kPage) {
    h.bring_up();
    REQUIRE(create(1, vector) == 0);
  }
  std::uint16_t create(std::uint16_t id, std::uint16_t vector, std::uint32_t depth = 64) {
    if (h.queues.size() <= id) h.queues.resize(id + 1u);
    Queue q;
    q.id = id;
    q.depth = q.cq_depth = depth;
    q.sq = std::make_unique<Dma>(h.c, 65536);
    q.cq = std::make_unique<Dma>(h.c, 65536);
    const Completion done = h.admin(nvme::create_completion_queue(id, depth, Iova(q.cq->iova), true, vector));
    if (done.status != 0) return done.status;
    const Completion sq = h.admin(nvme::create_submission_queue(id, depth, Iova(q.sq->iova), id));
    h.queues[id] = std::move(q);
    return sq.status;
  }
  void submit(std::uint16_t queue, std::uint16_t count) {
    for (std::uint16_t i = 0; i < count; ++i)
      h.place(queue, h.transfer(nvme::Opcode::read, 1, i, 1, data, i * kPage, kPage), i);
    h.ring(queue);
  }
  void reap(std::uint16_t queue, int count) {
    for (; count > 0; --count) CHECK(h.wait(queue).status == 0);
  }
  Host h;
  Dma data;
};

constexpr const char* kManual = "1MiB?pump=caller&clock=virtual";

}  // namespace

TEST_CASE("interrupts: entries that were posted are told of, and can be seen by then") {
  Setup s("1MiB?doorbells=trapped");
  Event event;
  s.h.c.set_interrupt(1, event.fd);
  for (int round = 0; round < 200; ++round) {
    s.submit(1, 1);
    REQUIRE(event.wait());
    CHECK(event.take() >= 1);
    REQUIRE(s.h.poll(1).has_value());
  }
  CHECK(s.h.c.counters().interrupts == 200);
  s.h.c.set_interrupt(1, -1);
}

TEST_CASE("interrupts: a turn sends one, however many entries it posted") {
  Setup s(kManual);
  Event event;
  s.h.c.set_interrupt(1, event.fd);
  s.submit(1, 8);
  CHECK(event.take() == 0);
  s.h.turn();
  CHECK(event.take() == 1);
  s.reap(1, 8);
  s.h.turns(5);
  CHECK(event.take() == 0);
  CHECK(s.h.c.counters().interrupts == 1);
}

TEST_CASE("interrupts: each queue has its vector, queues may share one, and the admin queue has vector 0") {
  Setup s(kManual, 2);
  REQUIRE(s.create(2, 2) == 0);
  REQUIRE(s.create(3, 3) == 0);
  Event zero, two, three;
  s.h.c.set_interrupt(0, zero.fd);
  s.h.c.set_interrupt(2, two.fd);
  s.h.c.set_interrupt(3, three.fd);
  s.submit(1, 1);
  s.submit(2, 1);
  s.h.turn();
  CHECK(two.take() == 1);
  CHECK(three.take() == 0);
  CHECK(zero.take() == 0);
  s.submit(3, 1);
  s.h.turn();
  CHECK(three.take() == 1);
  CHECK(s.h.admin(nvme::get_features(nvme::Feature::number_of_queues)).status == 0);
  CHECK(zero.take() == 1);
}

TEST_CASE("interrupts: a queue that did not ask for them sends none") {
  auto h = ready_host(kManual);
  Event event;
  for (std::uint16_t v = 1; v < 9; ++v) h->c.set_interrupt(v, event.fd);
  CHECK(h->run(1, nvme::flush(1)).status == 0);
  CHECK(event.take() == 0);
}

TEST_CASE("interrupts: a vector beyond those that there are is refused") {
  {
    Setup s("1MiB?pump=caller&vectors=3", 2);
    CHECK(s.create(2, 3) == nvme::status::invalid_interrupt_vector);
    CHECK(s.create(2, 0) == 0);
    CHECK_THROWS_AS(s.h.c.set_interrupt(3, -1), Failure);
    s.h.c.set_interrupt(2, -1);
  }
  Host none("1MiB?pump=caller&vectors=0");
  none.bring_up();
  Dma ring(none.c, 65536);
  CHECK(none.admin(nvme::create_completion_queue(1, 16, Iova(ring.iova), true, 0)).status ==
        nvme::status::invalid_interrupt_vector);
  CHECK(none.admin(nvme::create_completion_queue(1, 16, Iova(ring.iova), false, 0)).status == 0);
  CHECK_THROWS_AS(none.c.set_interrupt(0, -1), Failure);
  CHECK(none.violation_count() == 0);
}

TEST_CASE("interrupts: by itself there is one vector a queue, one for the admin queue, and no more than MSI-X has") {
  CHECK(parse("1MiB").vector_count() == 9);
  CHECK(parse("1MiB?queues=0").vector_count() == 1);
  CHECK(parse("1MiB?queues=65534").vector_count() == 2048);
  CHECK(parse("1MiB?queues=65534&vectors=7").vector_count() == 7);
  CHECK_THROWS_AS(parse("1MiB?vectors=2049"), Failure);
  CHECK_THROWS_AS(parse("1MiB?notify=never"), Failure);
}

TEST_CASE("interrupts: adaptive ones come only to a queue that was empty by its doorbell") {
  for (const bool adaptive : {false, true}) {
    CAPTURE(adaptive);
    Setup s(adaptive ? "1MiB?pump=caller&notify=adaptive" : "1MiB?pump=caller");
    Event event;
    s.h.c.set_interrupt(1, event.fd);
    s.submit(1, 1);
    s.h.turn();
    CHECK(event.take() == 1);
    s.submit(1, 1);  // the first completion is not consumed
    s.h.turn();
    CHECK(event.take() == (adaptive ? 0 : 1));
    REQUIRE(s.h.poll(1, false).has_value());  // consumed, and the doorbell says nothing of it
    REQUIRE(s.h.poll(1, false).has_value());
    s.submit(1, 1);
    s.h.turn();
    CHECK(event.take() == (adaptive ? 0 : 1));
    REQUIRE(s.h.poll(1).has_value());  // now it does
    s.submit(1, 1);
    s.h.turn();
    CHECK(event.take() == 1);
    CHECK(s.h.violation_count() == 0);
  }
}

TEST_CASE("interrupts: a lost one is of the command that matches, and not of another in the same turn") {
  Setup s(kManual);
  Event event;
  s.h.c.set_interrupt(1, event.fd);
  s.h.c.inject({.kind = Fault::Kind::lost_interrupt});
  s.submit(1, 1);
  s.h.turns(3);
  CHECK(event.take() == 0);
  s.reap(1, 1);
  s.h.c.inject({.kind = Fault::Kind::lost_interrupt});
  s.submit(1, 2);
  s.h.turn();
  CHECK(event.take() == 1);
  s.reap(1, 2);
  CHECK(s.h.c.counters().interrupts == 1);
}

TEST_CASE("interrupts: delivery stays over a reset, and ends when it is turned off") {
  Setup s(kManual);
  Event event;
  s.h.c.set_interrupt(1, event.fd);
  REQUIRE(s.h.c.function_reset());
  s.h.bring_up();
  REQUIRE(s.create(1, 1) == 0);
  s.submit(1, 1);
  s.h.turn();
  CHECK(event.take() == 1);
  s.reap(1, 1);
  s.h.c.set_interrupt(1, -1);
  s.submit(1, 1);
  s.h.turn();
  CHECK(event.take() == 0);
  s.reap(1, 1);
  CHECK(s.h.c.counters().interrupts == 1);
}

TEST_CASE("interrupts: one that finds its counter full is dropped, and the controller goes on") {
  Setup s(kManual);
  Event event;
  const std::uint64_t full = ~std::uint64_t{0} - 1;
  REQUIRE(write(event.fd, &full, sizeof full) == sizeof full);
  s.h.c.set_interrupt(1, event.fd);
  s.submit(1, 1);
  s.h.turn();
  s.reap(1, 1);
  CHECK(event.take() == full);
  CHECK(s.h.c.counters().interrupts == 0);
}

TEST_CASE("interrupts: a descriptor can be closed as soon as it was turned off, while the controller runs") {
  Setup s("1MiB");
  std::atomic<bool> stop{false};
  std::thread load([&] {
    while (!stop.load()) CHECK(s.h.run(1, nvme::flush(1)).status == 0);
  });
  for (int i = 0; i < 300; ++i) {
    const int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    s.h.c.set_interrupt(1, fd);
    if (i % 8 == 0) std::this_thread::yield();
    s.h.c.set_interrupt(1, -1);
    // A pipe under the same number would hold whatever is written late.
    int ends[2];
    REQUIRE(pipe2(ends, O_NONBLOCK | O_CLOEXEC) == 0);
    REQUIRE(dup3(ends[1], fd, O_CLOEXEC) == fd);
    std::this_thread::yield();
    char byte;
    CHECK(read(ends[0], &byte, 1) == -1);
    close(ends[0]);
    close(ends[1]);
    close(fd);
  }
  stop.store(true);
  load.join();
}
