// SPDX-License-Identifier: Apache-2.0
//
// What a host in another process needs: IOVAs of its own choice, and doorbells in memory that it can map.
#include <fcntl.h>
#include <unistd.h>

#include "emulator_host.hpp"

using namespace emulator_test;

namespace {

constexpr std::uint64_t kPage = 4096;

int map_at_error(Controller& c, std::uint64_t iova, void* at, std::uint64_t bytes) {
  try {
    c.map_at(iova, at, bytes, true);
  } catch (const Failure& f) {
    return f.error().code;
  }
  return 0;
}

/// Reads block 0 of namespace 1 to `iova`.
std::uint16_t read_to(Host& h, std::uint64_t iova, std::uint32_t blocks = 1, std::uint64_t prp2 = 0) {
  SubmissionEntry e = nvme::block_command(nvme::Opcode::read, 1, Lba(0), blocks);
  e.prp1 = iova;
  e.prp2 = prp2;
  return h.run(1, e).status;
}

/// The doorbells' memory, mapped once more as another process would.
struct Mapped {
  Mapped(Controller& controller, int fd) : c(controller), size(controller.doorbell_bytes()) {
    at = static_cast<std::byte*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0x1000));
    REQUIRE(static_cast<void*>(at) != MAP_FAILED);
  }
  ~Mapped() { munmap(at, size); }
  void store(std::uint32_t offset, std::uint32_t value) const {
    // The thread sanitizer does not know that both addresses are one word. A lock that both sides take tells it.
    static_cast<void>(c.counters());
    std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(at + offset - 0x1000))
        .store(value, std::memory_order_release);
  }
  Controller& c;
  std::uint64_t size;
  std::byte* at;
};

}  // namespace

TEST_CASE("map_at: data goes to the IOVAs that the host chose, and only there") {
  auto h = ready_host("1MiB?pump=caller");
  std::vector<std::byte> stored(2 * kPage);
  pattern(stored.data(), stored.size(), 7);
  h->c.poke(1, 0, stored.data(), stored.size());
  Pages low(2 * kPage), high(2 * kPage);
  h->c.map_at(0, low.data(), 2 * kPage, true);
  const std::uint64_t top = (std::uint64_t{1} << 48) - 2 * kPage;
  h->c.map_at(top, high.data(), 2 * kPage, true);
  CHECK(h->c.counters().mapped_bytes >= 4 * kPage);
  CHECK(read_to(*h, kPage, 2, top) == 0);
  CHECK(std::memcmp(low.data() + kPage, stored.data(), kPage) == 0);
  CHECK(std::memcmp(high.data(), stored.data() + kPage, kPage) == 0);
  CHECK(low.data()[0] == std::byte{0});
  CHECK(high.data()[kPage] == std::byte{0});
  CHECK(h->violation_count() == 0);
  CHECK(read_to(*h, 2 * kPage) == nvme::status::data_transfer_error);
  CHECK(read_to(*h, top - kPage) == nvme::status::data_transfer_error);
  CHECK(h->violated("unmapped-access"));
}

TEST_CASE("map_at: an access may run from one range into its neighbour, though the memory is elsewhere") {
  auto h = ready_host("1MiB?pump=caller");
  std::vector<std::byte> stored(2 * kPage);
  pattern(stored.data(), stored.size(), 9);
  h->c.poke(1, 0, stored.data(), stored.size());
  Pages a(kPage), gap(kPage), b(kPage);
  h->c.map_at(0x10000, a.data(), kPage, true);
  h->c.map_at(0x11000, b.data(), kPage, true);
  CHECK(read_to(*h, 0x10000, 2, 0x11000) == 0);
  CHECK(std::memcmp(a.data(), stored.data(), kPage) == 0);
  CHECK(std::memcmp(b.data(), stored.data() + kPage, kPage) == 0);
  CHECK(gap.data()[0] == std::byte{0});
}

TEST_CASE("map_at: overlap, IOVAs beyond 2^48 and parts of pages are refused") {
  Host h("1MiB?pump=caller");
  Pages pages(16 * kPage);
  CHECK(map_at_error(h.c, 0x10000, pages.data(), 4 * kPage) == 0);
  CHECK(map_at_error(h.c, 0x10000, pages.data(), kPage) == EEXIST);
  CHECK(map_at_error(h.c, 0x13000, pages.data(), kPage) == EEXIST);
  CHECK(map_at_error(h.c, 0xf000, pages.data(), 2 * kPage) == EEXIST);
  CHECK(map_at_error(h.c, 0xf000, pages.data(), 16 * kPage) == EEXIST);
  CHECK(map_at_error(h.c, 0xf000, pages.data(), kPage) == 0);
  CHECK(map_at_error(h.c, 0x14000, pages.data(), kPage) == 0);
  const std::uint64_t end = std::uint64_t{1} << 48;
  CHECK(map_at_error(h.c, end - kPage, pages.data(), 2 * kPage) == EINVAL);
  CHECK(map_at_error(h.c, end, pages.data(), kPage) == EINVAL);
  CHECK(map_at_error(h.c, ~std::uint64_t{0xfff}, pages.data(), kPage) == EINVAL);
  CHECK(map_at_error(h.c, 0, pages.data(), ~std::uint64_t{0xfff}) == EINVAL);
  CHECK(map_at_error(h.c, 0x20800, pages.data(), kPage) == EINVAL);
  CHECK(map_at_error(h.c, 0x20000, pages.data() + 8, kPage) == EINVAL);
  CHECK(map_at_error(h.c, 0x20000, pages.data(), 100) == EINVAL);
  CHECK(map_at_error(h.c, 0x20000, pages.data(), 0) == EINVAL);
  CHECK(h.c.counters().mapped_ranges == 3);
}

TEST_CASE("map_at: what was unmapped is never reached again, not even through the range that was hit last") {
  auto h = ready_host("1MiB?pump=caller");
  Pages pages(kPage);
  h->c.map_at(0x10000, pages.data(), kPage, true);
  CHECK(read_to(*h, 0x10000) == 0);
  h->c.unmap(0x10000);
  CHECK(h->violation_count() == 0);
  pages.fill(0x55);
  CHECK(read_to(*h, 0x10000) == nvme::status::data_transfer_error);
  CHECK(pages.data()[0] == std::byte{0x55});
  h->c.unmap(0x10000);
  CHECK(h->violated("unmap-unknown"));
  CHECK(map_at_error(h->c, 0x10000, pages.data(), kPage) == 0);  // these may be used again
  CHECK(read_to(*h, 0x10000) == 0);
  CHECK(pages.data()[0] == std::byte{0});
}

TEST_CASE("map_at: unmapping under a command, and writing to what may only be read, are violations") {
  auto h = ready_host("1MiB?pump=caller");
  Pages pages(kPage);
  h->c.map_at(0x10000, pages.data(), kPage, true);
  h->c.inject({.kind = Fault::Kind::hang});
  SubmissionEntry e = nvme::block_command(nvme::Opcode::read, 1, Lba(0), 1);
  e.prp1 = 0x10000;
  h->submit(1, e, 900);
  h->turns(3);
  h->c.unmap(0x10000);
  CHECK(h->violated("unmap-in-use"));
  h->c.map_at(0x10000, pages.data(), kPage, false);
  CHECK(read_to(*h, 0x10000) == nvme::status::data_transfer_error);
  CHECK(h->violated("read-only-access"));
}

TEST_CASE("share_doorbells: every doorbell can be rung through the shared memory, the admin queue's too") {
  for (const char* uri : {"1MiB", "1MiB?stride=3", "1MiB?idle=10us"}) {
    CAPTURE(uri);
    Host h(uri);
    const int fd = h.c.share_doorbells();
    Mapped words(h.c, fd);
    h.bring_up();
    Queue& admin = h.queues[0];
    for (std::uint16_t i = 0; i < 50; ++i) {
      h.place(0, nvme::get_features(nvme::Feature::number_of_queues), i);
      words.store(nvme::submission_doorbell(0, h.stride), admin.tail);
      std::optional<Completion> done;
      const std::uint64_t end = monotonic_ns() + 5'000'000'000;
      while (!(done = h.poll(0, false)) && monotonic_ns() < end) std::this_thread::yield();
      REQUIRE(done.has_value());
      CHECK(done->cid == i);
      words.store(nvme::completion_doorbell(0, h.stride), admin.head);
    }
    admin.rung_tail = admin.tail;
    REQUIRE(h.create_queue(1, 16) == 0);
    h.place(1, nvme::flush(1), 1);
    words.store(nvme::submission_doorbell(1, h.stride), h.queues[1].tail);
    CHECK(h.wait(1).cid == 1);
    CHECK(h.violation_count() == 0);
  }
}

TEST_CASE("share_doorbells: who has the memory of before rings nothing, and nobody can cut the memory") {
  Host h("1MiB");
  const int first = h.c.share_doorbells();
  CHECK(ftruncate(first, 0) == -1);
  Mapped old(h.c, first);
  const int second = h.c.share_doorbells();
  Mapped now(h.c, second);
  h.bring_up();
  REQUIRE(h.create_queue(1, 16) == 0);
  old.store(nvme::submission_doorbell(1, 4), 9);
  old.store(nvme::submission_doorbell(0, 4), 9);
  CHECK(h.quiet(1));
  h.place(1, nvme::flush(1), 1);
  now.store(nvme::submission_doorbell(1, 4), h.queues[1].tail);
  CHECK(h.wait(1).cid == 1);
  CHECK(h.violation_count() == 0);
}

TEST_CASE("interrupts: another process's counter that would block is passed over") {
  // Here beside what else a host in another process may do: it owns the flags of its descriptor.
  int ends[2];
  REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
  std::vector<char> fill(1 << 20);
  REQUIRE(fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0);
  while (write(ends[1], fill.data(), fill.size()) > 0) continue;
  REQUIRE(fcntl(ends[1], F_SETFL, 0) == 0);
  Host h("1MiB?pump=caller");
  h.c.set_interrupt(0, ends[1]);
  h.bring_up();
  CHECK(h.admin(nvme::get_features(nvme::Feature::number_of_queues)).status == 0);
  CHECK(h.c.counters().interrupts == 0);
  h.c.set_interrupt(0, -1);
  close(ends[0]);
  close(ends[1]);
}

TEST_CASE("share_doorbells: a controller that was about to sleep when it was enabled looks at them in time") {
  Host h("1MiB?idle=0");
  std::atomic<bool> stop{false};
  // The controller's thread lets others have the lock before it goes to sleep, which is when it happens.
  std::thread others([&] {
    while (!stop.load()) static_cast<void>(h.c.counters());
  });
  int late = 0;
  for (int i = 0; i < 300; ++i) {
    const Mapped words(h.c, h.c.share_doorbells());
    h.bring_up();
    std::this_thread::sleep_for(std::chrono::microseconds(i % 20 * 10));
    h.place(0, nvme::get_features(nvme::Feature::number_of_queues), 1);
    const std::uint64_t start = monotonic_ns();
    words.store(nvme::submission_doorbell(0, h.stride), h.queues[0].tail);
    while (!h.poll(0, false)) std::this_thread::yield();
    late += monotonic_ns() - start > 90'000'000;
    h.queues[0].rung_tail = h.queues[0].tail;
    h.disable();
  }
  stop.store(true);
  others.join();
  CHECK(late <= 2);
  CHECK(h.violation_count() == 0);
}
