// SPDX-License-Identifier: Apache-2.0
#include <sys/resource.h>

#include <ctime>
#include <random>

#include "emulator_host.hpp"

using namespace emulator_test;
using nvme::Opcode;

namespace {

constexpr std::uint64_t kPage = 4096;

std::unique_ptr<Host> shadowed_host(const std::string& uri, std::uint32_t depth) {
  auto host = std::make_unique<Host>(uri);
  host->bring_up();
  host->configure_shadow();
  REQUIRE(host->create_queue(1, depth) == 0);
  return host;
}

void pause_ns(std::uint64_t ns) {
  const std::uint64_t end = monotonic_ns() + ns;
  if (ns > 100'000) {
    const timespec t{0, static_cast<long>(ns)};
    nanosleep(&t, nullptr);
  }
  while (monotonic_ns() < end) cpu_pause();
}

double process_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

}  // namespace

TEST_CASE("doorbells: the admin queue's are never mapped, nor are any that must wake a sleeper") {
  Host h("1MiB?pump=caller&queues=4");
  CHECK(h.c.doorbell(0x1000) == nullptr);
  CHECK(h.c.doorbell(0x1004) == nullptr);
  CHECK(h.c.doorbell(nvme::submission_doorbell(1, 4)) != nullptr);
  CHECK(h.c.doorbell(nvme::completion_doorbell(4, 4)) != nullptr);
  CHECK(h.c.doorbell(nvme::submission_doorbell(5, 4)) == nullptr);
  CHECK(h.c.doorbell(0x100a) == nullptr);
  h.bring_up();
  h.configure_shadow();
  CHECK(h.c.doorbell(nvme::submission_doorbell(1, 4)) == nullptr);
  Host trapped("1MiB?pump=caller&doorbells=trapped");
  CHECK(trapped.c.doorbell(nvme::submission_doorbell(1, 4)) == nullptr);
}

TEST_CASE("shadow doorbells: any depth works, and an awake controller asks for no ring") {
  for (const std::uint32_t depth : {2u, 3u, 64u, 1000u, 65536u}) {
    CAPTURE(depth);
    auto h = shadowed_host("1MiB?depth=65536&pump=caller", depth);
    const std::uint32_t batch = std::min(depth - 1, 300u);
    std::uint32_t submitted = 0;
    const std::uint32_t total = depth > 1000 ? depth + 1000 : 3 * depth + 5;
    while (submitted < total) {
      for (std::uint32_t i = 0; i < batch; ++i) h->submit(1, nvme::flush(1), static_cast<std::uint16_t>(i));
      for (std::uint32_t i = 0; i < batch; ++i) REQUIRE(h->wait(1).status == 0);
      submitted += batch;
    }
    // The first store of each word may be asked for: until then its event index was never written.
    CHECK(h->rings <= 2);
    CHECK(h->violation_count() == 0);
    CHECK(h->c.counters().flushes == submitted);
  }
}

TEST_CASE("shadow doorbells: every way of dividing a ring into batches is seen") {
  for (const std::uint32_t depth : {2u, 3u, 5u, 7u}) {
    std::mt19937 random(depth);
    auto h = shadowed_host("1MiB?pump=caller", depth);
    for (int round = 0; round < 400; ++round) {
      const std::uint32_t batch = 1 + static_cast<std::uint32_t>(random() % (depth - 1));
      for (std::uint32_t i = 0; i < batch; ++i) h->place(1, nvme::flush(1), static_cast<std::uint16_t>(i));
      h->ring(1);
      for (std::uint32_t i = 0; i < batch; ++i) REQUIRE(h->wait(1).status == 0);
    }
    CHECK(h->rings <= 2);
    CHECK(h->violation_count() == 0);
  }
}

TEST_CASE("shadow doorbells: a queue that is older than they are goes on") {
  auto h = ready_host("1MiB?pump=caller");
  for (int i = 0; i < 10; ++i) REQUIRE(h->run(1, nvme::flush(1)).status == 0);
  h->configure_shadow();
  for (int i = 0; i < 100; ++i) REQUIRE(h->run(1, nvme::flush(1)).status == 0);
  CHECK(h->violation_count() == 0);
}

TEST_CASE("shadow doorbells: a reset drops them") {
  auto h = shadowed_host("1MiB?pump=caller", 8);
  REQUIRE(h->run(1, nvme::flush(1)).status == 0);
  h->disable();
  CHECK(h->c.doorbell(nvme::submission_doorbell(1, 4)) != nullptr);
  h->bring_up();
  REQUIRE(h->create_queue(1, 8) == 0);
  CHECK(h->run(1, nvme::flush(1)).status == 0);
  CHECK(h->violation_count() == 0);
}

TEST_CASE("shadow doorbells: unmapping them while they are in use is noticed, and stops the controller") {
  auto h = shadowed_host("1MiB?pump=caller", 8);
  h->events->unmap();
  CHECK(h->violated("unmap-in-use"));
  CHECK(h->csts().fatal());
  h->turns(3);
}

TEST_CASE("shadow doorbells: with a wide stride, queues beyond the page use their registers") {
  Host h("1MiB?pump=caller&stride=8");  // 1024 bytes apart: queue 1 is in the page, queue 2 is not
  h.bring_up();
  h.configure_shadow();
  REQUIRE(h.create_queue(1, 8) == 0);
  REQUIRE(h.create_queue(2, 8) == 0);
  for (int i = 0; i < 20; ++i) {
    CHECK(h.run(1, nvme::flush(1)).status == 0);
    CHECK(h.run(2, nvme::flush(1)).status == 0);
  }
  CHECK(h.violation_count() == 0);
}

TEST_CASE("sleeping: ten thousand commands with pauses around the time of falling asleep lose no wake-up") {
  for (const char* uri : {"1MiB?idle=20us", "1MiB?idle=20us&doorbells=trapped&shadow=0"}) {
    CAPTURE(uri);
    Host h(uri);
    h.bring_up();
    if (h.c.options().shadow) h.configure_shadow();
    REQUIRE(h.create_queue(1, 7) == 0);
    std::mt19937_64 random(7);
    std::uint64_t slowest = 0;
    for (int i = 0; i < 10'000; ++i) {
      // Around the idle time; and now and then a real sleep, which gives the controller's thread a core on a busy
      // machine, so that it does fall asleep.
      pause_ns(random() % 8 == 0 ? 100'001 : random() % 60'000);
      const std::uint64_t begin = monotonic_ns();
      REQUIRE(h.run(1, nvme::flush(1)).status == 0);
      slowest = std::max(slowest, monotonic_ns() - begin);
    }
    const auto counters = h.c.counters();
    CHECK(counters.flushes == 10'000);
    CHECK(counters.rescues == 0);
    CHECK(counters.wakeups > 100);
    CHECK(h.violation_count() == 0);
    MESSAGE(std::string(uri) << ": " << counters.wakeups << " wake-ups, " << counters.turns << " turns, slowest "
                             << slowest / 1000 << " us");
  }
}

TEST_CASE("sleeping: a host that does not ring when asked is rescued late, and told") {
  Host h("1MiB?idle=20us");
  h.bring_up();
  h.configure_shadow();
  REQUIRE(h.create_queue(1, 8) == 0);
  pause_ns(20'000'000);
  h.place(1, nvme::flush(1), 1);
  std::atomic_ref<std::uint32_t>(h.shadow->as<std::uint32_t>()[2]).store(1, std::memory_order_seq_cst);
  h.queues[1].rung_tail = 1;
  CHECK(h.wait(1).cid == 1);
  CHECK(h.violated("lost-wakeup"));
  CHECK(h.c.counters().rescues == 1);
}

TEST_CASE("sleeping: an idle controller uses less than a hundredth of a core") {
  for (const char* uri : {"1MiB", "1MiB?doorbells=trapped", "1MiB?shadow=0"}) {
    CAPTURE(uri);
    Host h(uri);
    h.bring_up();
    if (std::string(uri) == "1MiB") h.configure_shadow();
    REQUIRE(h.create_queue(1, 8) == 0);
    REQUIRE(h.run(1, nvme::flush(1)).status == 0);
    pause_ns(50'000'000);
    const double before = process_seconds();
    const timespec second{1, 0};
    nanosleep(&second, nullptr);
    const double used = process_seconds() - before;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    CHECK(used < 0.05);
#else
    CHECK(used < 0.01);
#endif
    MESSAGE(std::string(uri) << ": " << used * 100 << "% of a core");
  }
}

TEST_CASE("sleeping: commands that are due later let the thread rest, and come in time") {
  auto h = ready_host("1MiB?latency=2ms&idle=10us");
  Dma buffer(h->c, kPage);
  const double before = process_seconds();
  for (int i = 0; i < 50; ++i) {
    const std::uint64_t begin = monotonic_ns();
    h->submit(1, h->transfer(Opcode::read, 1, 0, 1, buffer, 0, kPage), 1);
    pause_ns(1'000'000);
    const timespec nap{0, 1'000'000};
    nanosleep(&nap, nullptr);
    REQUIRE(h->wait(1).status == 0);
    CHECK(monotonic_ns() - begin >= 2'000'000);
  }
  MESSAGE("50 commands of 2 ms used " << (process_seconds() - before) * 1000 << " ms of processor time");
}

TEST_CASE("threads: several hosts' queues at depth, with registers read meanwhile") {
  Host h("4MiB?queues=3&idle=50us");
  h.bring_up();
  h.configure_shadow();
  for (std::uint16_t id = 1; id <= 3; ++id) REQUIRE(h.create_queue(id, 33) == 0);
  std::atomic<std::uint64_t> done{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (std::uint16_t id = 1; id <= 2; ++id)
    threads.emplace_back([&, id] {
      Dma buffer(h.c, 32 * kPage);
      std::uint16_t cid = 0;
      for (int round = 0; round < 100; ++round) {
        for (int i = 0; i < 32; ++i)
          h.place(id,
                  h.transfer(i % 2 != 0 ? Opcode::read : Opcode::write, 1, id * 100u + static_cast<unsigned>(i), 1,
                             buffer, static_cast<std::uint64_t>(i) * kPage, kPage),
                  cid++);
        h.ring(id);
        for (int i = 0; i < 32;) {
          if (auto c = h.poll(id)) {
            ++i;
            if (c->status == 0) ++done;
          } else {
            std::this_thread::yield();
          }
        }
      }
    });
  std::thread reader([&] {
    while (!stop) {
      h.csts();
      h.c.counters();
      Dma churn(h.c, kPage);
    }
  });
  for (auto& thread : threads) thread.join();
  stop = true;
  reader.join();
  CHECK(done == 2 * 100 * 32);
  CHECK(h.violation_count() == 0);
}
