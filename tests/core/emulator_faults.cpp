// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include "emulator_host.hpp"

using namespace emulator_test;
using nvme::Opcode;
namespace status = ugds::nvme::status;

namespace {

constexpr std::uint64_t kPage = 4096;

struct Fixture {
  explicit Fixture(const std::string& uri = "1MiB?pump=caller") : host(ready_host(uri)), h(*host), buffer(h.c, 65536) {}
  SubmissionEntry read(std::uint64_t lba = 0) { return h.transfer(Opcode::read, 1, lba, 1, buffer, 0, kPage); }
  SubmissionEntry write(std::uint64_t lba = 0) { return h.transfer(Opcode::write, 1, lba, 1, buffer, 0, kPage); }
  std::unique_ptr<Host> host;
  Host& h;
  Dma buffer;
};

}  // namespace

TEST_CASE("fault status: the nth matching command fails and moves nothing") {
  Fixture f;
  f.h.c.inject({.kind = Fault::Kind::status,
                .opcode = static_cast<int>(Opcode::read),
                .skip = 1,
                .count = 2,
                .status = status::unrecovered_read_error});
  f.buffer.pages.fill(0x11);
  CHECK(f.h.run(1, f.read()).status == 0);
  CHECK(f.buffer.data()[0] == std::byte{0});
  f.buffer.pages.fill(0x11);
  CHECK(f.h.run(1, f.write()).status == 0);
  CHECK(f.h.run(1, f.read()).status == 0x281);
  CHECK(f.buffer.data()[0] == std::byte{0x11});
  CHECK(f.h.run(1, f.read()).status == 0x281);
  CHECK(f.h.run(1, f.read()).status == 0);
}

TEST_CASE("fault filters: a range of blocks, admin commands, and none after clear_faults") {
  Fixture f;
  f.h.c.inject({.kind = Fault::Kind::status, .count = 100, .status = 0x280, .lba = 10, .blocks = 2});
  CHECK(f.h.run(1, f.read(9)).status == 0);
  CHECK(f.h.run(1, f.read(10)).status == 0x280);
  CHECK(f.h.run(1, f.h.transfer(Opcode::read, 1, 9, 2, f.buffer, 0, 2 * kPage)).status == 0x280);
  CHECK(f.h.run(1, f.read(12)).status == 0);
  CHECK(f.h.run(1, nvme::flush(1)).status == 0);
  f.h.c.clear_faults();
  CHECK(f.h.run(1, f.read(10)).status == 0);
  f.h.c.inject({.kind = Fault::Kind::status, .admin = true, .status = status::internal_error});
  CHECK(f.h.run(1, f.read(10)).status == 0);
  CHECK(f.h.admin(nvme::get_features(nvme::Feature::arbitration)).status == status::internal_error);
}

TEST_CASE("fault hang: nothing comes until the command is aborted") {
  Fixture f;
  f.h.c.inject({.kind = Fault::Kind::hang});
  f.h.submit(1, f.read(), 1);
  CHECK(f.h.quiet(1));
  f.h.submit(1, f.read(), 2);
  CHECK(f.h.wait(1).cid == 2);
  CHECK(nvme::was_aborted(f.h.admin(nvme::abort(1, 1)).result));
  CHECK(f.h.wait(1).status == status::abort_requested);
}

TEST_CASE("fault late: the completion comes after its delay, and others overtake it") {
  Fixture f("1MiB?pump=caller&clock=virtual");
  f.h.c.inject({.kind = Fault::Kind::late, .delay_ns = 5'000'000});
  f.h.submit(1, f.read(), 1);
  f.h.submit(1, f.read(), 2);
  CHECK(f.h.wait(1).cid == 2);
  CHECK(f.h.c.virtual_now_ns() == 0);
  CHECK(f.h.wait(1).cid == 1);
  CHECK(f.h.c.virtual_now_ns() == 5'000'000);
}

TEST_CASE("fault late_write: the buffer keeps changing until the controller has stopped, and never after") {
  for (const bool by_abort : {true, false}) {
    Fixture f("1MiB?pump=caller&ready=1ms");
    f.h.c.inject({.kind = Fault::Kind::late_write, .abortable = by_abort});
    f.h.submit(1, f.read(), 1);
    f.h.turns(2);
    const std::byte first = f.buffer.data()[kPage - 1];
    f.h.turn();
    CHECK(f.buffer.data()[kPage - 1] != first);
    const bool aborted = nvme::was_aborted(f.h.admin(nvme::abort(1, 1)).result);
    CHECK(aborted == by_abort);
    if (!aborted) {
      const std::byte before = f.buffer.data()[0];
      f.h.turn();
      CHECK(f.buffer.data()[0] != before);
      // Clearing CC.EN asks it to stop; it has stopped when CSTS.RDY is clear.
      f.h.set32(Register::cc, 0);
      const std::byte asked = f.buffer.data()[0];
      f.h.turn();
      CHECK(f.buffer.data()[0] != asked);
      REQUIRE(f.h.wait_ready(false));
    }
    f.buffer.pages.fill(0xee);
    f.h.turns(20);
    CHECK(f.buffer.data()[0] == std::byte{0xee});
    CHECK(f.h.violation_count() == 0);
  }
}

TEST_CASE("fault late_write: a buffer that is unmapped too early is noticed, and not touched") {
  Fixture f;
  f.h.c.inject({.kind = Fault::Kind::late_write});
  f.h.submit(1, f.read(), 1);
  f.h.turns(2);
  f.buffer.unmap();
  CHECK(f.h.violated("unmap-in-use"));
  f.buffer.pages.fill(0xee);
  f.h.turns(2);
  CHECK(f.h.violated("unmapped-access"));
  CHECK(f.buffer.data()[0] == std::byte{0xee});
}

TEST_CASE("fault duplicate: the same completion twice") {
  Fixture f;
  f.h.c.inject({.kind = Fault::Kind::duplicate});
  f.h.submit(1, f.read(), 6);
  CHECK(f.h.wait(1).cid == 6);
  CHECK(f.h.wait(1).cid == 6);
  CHECK(f.h.quiet(1));
  CHECK(f.h.violation_count() == 0);
}

TEST_CASE("fault unknown_id: a completion that nobody waits for comes first") {
  Fixture f;
  f.h.c.inject({.kind = Fault::Kind::unknown_id});
  f.h.submit(1, f.read(), 6);
  CHECK(f.h.wait(1).cid != 6);
  CHECK(f.h.wait(1).cid == 6);
}

TEST_CASE("fault corrupt: success, and one bit is different, of a read and of a write") {
  Fixture f;
  pattern(f.buffer.data(), kPage, 1);
  f.h.c.inject({.kind = Fault::Kind::corrupt, .opcode = static_cast<int>(Opcode::read)});
  REQUIRE(f.h.run(1, f.write()).status == 0);
  std::vector<std::byte> written(f.buffer.data(), f.buffer.data() + kPage);
  auto differing_bits = [&](const std::byte* other) {
    int bits = 0;
    for (std::uint64_t i = 0; i < kPage; ++i) bits += std::popcount(std::to_integer<unsigned>(written[i] ^ other[i]));
    return bits;
  };
  CHECK(f.h.run(1, f.read()).status == 0);
  CHECK(differing_bits(f.buffer.data()) == 1);
  CHECK(f.h.run(1, f.read()).status == 0);
  CHECK(differing_bits(f.buffer.data()) == 0);
  f.h.c.inject({.kind = Fault::Kind::corrupt});
  CHECK(f.h.run(1, f.write()).status == 0);
  CHECK(f.h.run(1, f.read()).status == 0);
  CHECK(differing_bits(f.buffer.data()) == 1);
}

TEST_CASE("fault ignored: success, and nothing was done, of a read, of a write and of a Flush") {
  Fixture f;
  pattern(f.buffer.data(), kPage, 1);
  const std::vector<std::byte> first(f.buffer.data(), f.buffer.data() + kPage);
  REQUIRE(f.h.run(1, f.write()).status == 0);
  REQUIRE(f.h.run(1, nvme::flush(1)).status == 0);
  pattern(f.buffer.data(), kPage, 2);
  f.h.c.inject({.kind = Fault::Kind::ignored, .opcode = static_cast<int>(Opcode::write)});
  CHECK(f.h.run(1, f.write()).status == 0);
  f.h.c.inject({.kind = Fault::Kind::ignored, .opcode = static_cast<int>(Opcode::read)});
  CHECK(f.h.run(1, f.read()).status == 0);
  CHECK(std::memcmp(f.buffer.data(), first.data(), kPage) != 0);
  CHECK(f.h.run(1, f.read()).status == 0);
  CHECK(std::memcmp(f.buffer.data(), first.data(), kPage) == 0);
  pattern(f.buffer.data(), kPage, 2);
  REQUIRE(f.h.run(1, f.write()).status == 0);
  f.h.c.inject({.kind = Fault::Kind::ignored, .opcode = static_cast<int>(Opcode::flush)});
  CHECK(f.h.run(1, nvme::flush(1)).status == 0);
  f.h.c.power_cut(0.0, 1);
  f.h.bring_up();
  REQUIRE(f.h.create_queue(1, 8) == 0);
  CHECK(f.h.run(1, f.read()).status == 0);
  CHECK(std::memcmp(f.buffer.data(), first.data(), kPage) == 0);
}

TEST_CASE("fault wrong_sq_head: a head that the queue does not have") {
  Fixture f;
  f.h.c.inject({.kind = Fault::Kind::wrong_sq_head});
  CHECK(f.h.run(1, f.read()).sq_head >= 64);
  CHECK(f.h.run(1, f.read()).sq_head == 2);
}

TEST_CASE("fault never_ready and never_stopped: CSTS.RDY does not follow, once") {
  Host h("1MiB?pump=caller");
  h.c.inject({.kind = Fault::Kind::never_ready});
  Dma sq(h.c, 65536), cq(h.c, 65536);
  h.set32(Register::aqa, nvme::AdminQueueAttributes::make(2, 2).raw);
  h.set64(Register::asq, sq.iova);
  h.set64(Register::acq, cq.iova);
  const std::uint32_t enabled = nvme::Configuration::make(4096).with_enabled(true).raw;
  h.set32(Register::cc, enabled);
  CHECK_FALSE(h.wait_ready(true, 20'000'000));
  h.set32(Register::cc, 0);
  h.set32(Register::cc, enabled);
  CHECK(h.wait_ready(true));
  h.c.inject({.kind = Fault::Kind::never_stopped});
  h.set32(Register::cc, 0);
  CHECK_FALSE(h.wait_ready(false, 20'000'000));
  CHECK(h.c.function_reset());
  CHECK(h.csts().raw == 0);
}

TEST_CASE("fault fatal: CSTS.CFS at the fetch, and nothing completes until a reset") {
  Fixture f;
  f.h.c.inject({.kind = Fault::Kind::fatal});
  f.h.submit(1, f.read(), 1);
  CHECK(f.h.quiet(1));
  CHECK(f.h.csts().fatal());
  f.h.submit(1, f.read(), 2);
  CHECK(f.h.quiet(1));
  f.h.bring_up();
  CHECK_FALSE(f.h.csts().fatal());
}

TEST_CASE("fault remove, and removal: registers read as all ones until it is plugged in again") {
  for (const bool by_fault : {true, false}) {
    Fixture f;
    if (by_fault) f.h.c.inject({.kind = Fault::Kind::remove});
    if (!by_fault) f.h.c.remove();
    f.h.submit(1, f.read(), 1);
    CHECK(f.h.quiet(1));
    CHECK(f.h.csts().gone());
    CHECK(f.h.reg64(Register::cap) == nvme::kAllOnes64);
    f.h.set32(Register::cc, 0);
    f.h.queues.clear();
    CHECK(f.h.violation_count() == 0);
    f.h.c.plug();
    CHECK(f.h.reg32(Register::cc) == 0);
    f.h.bring_up();
    REQUIRE(f.h.create_queue(1, 8) == 0);
    CHECK(f.h.run(1, f.read()).status == 0);
    CHECK(f.h.violation_count() == 0);
  }
}

TEST_CASE("fault remove: what left the bus while memory was unmapped reads and writes nothing any more") {
  Fixture f;
  f.h.c.inject({.kind = Fault::Kind::remove});
  for (std::uint16_t i = 0; i < 4; ++i) f.h.place(1, f.read(), i);
  f.h.ring(1);
  { const Dma other(f.h.c, 4096); }  // looks at what is queued, and so at the first of them
  CHECK(f.h.csts().gone());
  f.buffer.pages.fill(0x33);
  const auto before = f.h.c.counters();
  f.h.turns(10);
  CHECK(f.h.c.counters().commands == before.commands);
  CHECK(f.buffer.data()[0] == std::byte{0x33});
  f.h.queues.clear();
  CHECK(f.h.violation_count() == 0);
}

TEST_CASE("timing: a virtual clock shows the model exactly") {
  Fixture f("1MiB?pump=caller&clock=virtual&latency=10us&iops=1000000&bandwidth=4096000000");
  for (std::uint16_t i = 0; i < 4; ++i) f.h.place(1, f.read(), i);
  f.h.ring(1);
  for (std::uint16_t i = 0; i < 4; ++i) {
    CHECK(f.h.wait(1).cid == i);
    CHECK(f.h.c.virtual_now_ns() == 10'000 + 1000u * (i + 1u));
  }
  f.h.c.advance_ns(500);
  CHECK(f.h.c.virtual_now_ns() == 14'500);
}

TEST_CASE("timing: completions come in the order that was asked for") {
  for (const char* order : {"fifo", "reverse", "random"}) {
    Fixture f(std::string("1MiB?pump=caller&order=") + order);
    for (std::uint16_t i = 0; i < 32; ++i) f.h.place(1, f.read(), i);
    f.h.ring(1);
    std::vector<std::uint16_t> got;
    for (int i = 0; i < 32; ++i) got.push_back(f.h.wait(1).cid);
    const bool rising = std::is_sorted(got.begin(), got.end());
    const bool falling = std::is_sorted(got.rbegin(), got.rend());
    CHECK(rising == (std::string(order) == "fifo"));
    CHECK(falling == (std::string(order) == "reverse"));
    std::sort(got.begin(), got.end());
    for (std::uint16_t i = 0; i < 32; ++i) CHECK(got[i] == i);
  }
}

TEST_CASE("timing: real time passes at least") {
  Fixture f("1MiB?latency=3ms");
  const std::uint64_t begin = monotonic_ns();
  CHECK(f.h.run(1, f.read()).status == 0);
  CHECK(monotonic_ns() - begin >= 3'000'000);
}

TEST_CASE("emulator: turns without work are counted and cost no commands") {
  Fixture f;
  const auto before = f.h.c.counters();
  f.h.turns(100);
  const auto after = f.h.c.counters();
  CHECK(after.turns == before.turns + 100);
  CHECK(after.commands == before.commands);
  CHECK(f.h.run(1, f.read()).status == 0);
  CHECK(f.h.c.counters().reads == before.reads + 1);
  CHECK(f.h.c.counters().bytes_read == before.bytes_read + kPage);
}
