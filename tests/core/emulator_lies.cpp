// SPDX-License-Identifier: Apache-2.0
//
// Faults by which a controller says what is not so, or says nothing.
#include <sys/eventfd.h>
#include <unistd.h>

#include "emulator_host.hpp"

using namespace emulator_test;
using nvme::Opcode;

namespace {

constexpr std::uint64_t kPage = 4096;

struct Fixture {
  explicit Fixture(const std::string& uri = "1MiB?pump=caller") : host(ready_host(uri)), h(*host), buffer(h.c, 65536) {}
  SubmissionEntry read(std::uint64_t lba = 0) { return h.transfer(Opcode::read, 1, lba, 1, buffer, 0, kPage); }
  std::unique_ptr<Host> host;
  Host& h;
  Dma buffer;
};

}  // namespace

TEST_CASE("fault lost: the data moves, no completion comes, and an abort does not find the command") {
  Fixture f;
  f.h.c.inject({.kind = Fault::Kind::lost});
  f.buffer.pages.fill(0x11);
  f.h.submit(1, f.read(), 1);
  CHECK(f.h.quiet(1));
  CHECK(f.buffer.data()[0] == std::byte{0});
  CHECK_FALSE(nvme::was_aborted(f.h.admin(nvme::abort(1, 1)).result));
  CHECK(f.h.quiet(1));
  CHECK(f.h.run(1, f.read()).status == 0);
  f.buffer.unmap();  // it is in use by none
  CHECK(f.h.violation_count() == 0);
}

TEST_CASE("fault wrong_phase: the entry is there and does not look new; the next one stands behind it") {
  Fixture f;
  f.h.c.inject({.kind = Fault::Kind::wrong_phase});
  f.h.submit(1, f.read(), 7);
  CHECK(f.h.quiet(1));
  const auto* entries = f.h.queues[1].cq->as<CompletionEntry>();
  CHECK(CompletionWord{entries[0].last}.cid() == 7);
  f.h.submit(1, f.read(), 8);
  CHECK(f.h.quiet(1));
  CHECK(CompletionWord{entries[1].last}.cid() == 8);
  CHECK(CompletionWord{entries[1].last}.phase());
}

TEST_CASE("fault torn: the last dword comes first, and the rest after its delay") {
  Fixture f("1MiB?pump=caller&clock=virtual");
  f.h.c.inject({.kind = Fault::Kind::torn, .delay_ns = 1'000'000});
  f.h.submit(1, f.read(), 3);
  const Completion torn = f.h.wait(1);
  CHECK(torn.cid == 3);
  CHECK(torn.sq_head == 0xffff);
  CHECK(torn.result == ~0u);
  const CompletionEntry& entry = f.h.queues[1].cq->as<CompletionEntry>()[0];
  f.h.turns(5);
  CHECK(f.h.c.virtual_now_ns() == 1'000'000);
  CHECK(entry.sq_head == 1);
  CHECK(entry.sq_id == 1);
}

TEST_CASE("fault result: dword 0 is what was asked for") {
  Fixture f;
  f.h.c.inject({.kind = Fault::Kind::result, .opcode = 0x0a, .admin = true, .value = 0x12345678});
  CHECK(f.h.admin(nvme::get_features(nvme::Feature::arbitration)).result == 0x12345678);
  CHECK(f.h.admin(nvme::get_features(nvme::Feature::arbitration)).result == 0);
}

TEST_CASE("fault identify: bytes of one structure are others") {
  Fixture f;
  f.h.c.inject({.kind = Fault::Kind::identify, .count = 2, .value = 0xabcd, .at = 4094, .width = 8, .cns = 0});
  const auto identify = [&](nvme::Cns cns, std::uint32_t nsid) {
    f.buffer.pages.fill(0xee);
    REQUIRE(f.h.admin(nvme::identify(cns, nsid, Iova(f.buffer.iova))).status == 0);
    return std::to_integer<unsigned>(f.buffer.data()[4094]) | std::to_integer<unsigned>(f.buffer.data()[4095]) << 8;
  };
  CHECK(identify(nvme::Cns::controller, 0) == 0);
  CHECK(identify(nvme::Cns::ns, 1) == 0xabcd);
  CHECK(f.buffer.data()[4096] == std::byte{0xee});  // a page, whatever the width
  CHECK(identify(nvme::Cns::ns, 1) == 0xabcd);
  CHECK(identify(nvme::Cns::ns, 1) == 0);
}

TEST_CASE("faults abort_lies and abort_denies: the answer is the opposite of what was done") {
  Fixture f;
  f.h.c.inject({.kind = Fault::Kind::hang, .count = 2});
  f.h.submit(1, f.read(), 1);
  f.h.submit(1, f.read(), 2);
  CHECK(f.h.quiet(1));
  f.h.c.inject({.kind = Fault::Kind::abort_lies});
  CHECK(nvme::was_aborted(f.h.admin(nvme::abort(1, 1)).result));
  CHECK(f.h.quiet(1));
  f.h.c.inject({.kind = Fault::Kind::abort_denies});
  CHECK_FALSE(nvme::was_aborted(f.h.admin(nvme::abort(1, 2)).result));
  CHECK(f.h.wait(1).cid == 2);
  CHECK(nvme::was_aborted(f.h.admin(nvme::abort(1, 1)).result));
  CHECK(f.h.wait(1).cid == 1);
}

TEST_CASE("faults all_ones and reads_as: reads of a register are counted, the others and writes are as ever") {
  Fixture f;
  constexpr std::uint32_t kCsts = static_cast<std::uint32_t>(Register::csts);
  f.h.c.inject({.kind = Fault::Kind::all_ones, .skip = 1, .count = 2, .at = kCsts});
  CHECK(f.h.reg32(Register::vs) == 0x20000);
  CHECK(f.h.csts().raw == 1);
  CHECK(f.h.csts().gone());
  CHECK(f.h.csts().gone());
  CHECK(f.h.csts().raw == 1);
  f.h.c.inject({.kind = Fault::Kind::all_ones});
  CHECK(f.h.reg64(Register::cap) == nvme::kAllOnes64);
  const std::uint64_t real = f.h.reg64(Register::cap);
  CHECK(real != nvme::kAllOnes64);
  f.h.c.inject({.kind = Fault::Kind::reads_as, .count = 100, .value = 0x1234'5678'9abc, .at = 0});
  CHECK(f.h.reg64(Register::cap) == 0x1234'5678'9abc);
  CHECK(f.h.reg32(Register::cap) == 0x5678'9abc);
  CHECK(f.h.run(1, f.read()).status == 0);
  f.h.c.clear_faults();
  CHECK(f.h.reg64(Register::cap) == real);
}

TEST_CASE("faults double_interrupt and spurious_interrupt: more are sent than there is to tell") {
  Host h("1MiB?pump=caller&vectors=2");
  h.bring_up();
  const int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  h.c.set_interrupt(1, fd);
  const auto sent = [&]() -> std::uint64_t {
    std::uint64_t count = 0;
    return ::read(fd, &count, sizeof count) == sizeof count ? count : 0;
  };
  h.queues.resize(2);
  Queue q;
  q.id = 1;
  q.depth = q.cq_depth = 16;
  q.sq = std::make_unique<Dma>(h.c, 65536);
  q.cq = std::make_unique<Dma>(h.c, 65536);
  REQUIRE(h.admin(nvme::create_completion_queue(1, 16, Iova(q.cq->iova), true, 1)).status == 0);
  REQUIRE(h.admin(nvme::create_submission_queue(1, 16, Iova(q.sq->iova), 1)).status == 0);
  h.queues[1] = std::move(q);
  CHECK(h.run(1, nvme::flush(1)).status == 0);
  CHECK(sent() == 1);
  h.c.inject({.kind = Fault::Kind::double_interrupt});
  CHECK(h.run(1, nvme::flush(1)).status == 0);
  CHECK(sent() == 2);
  h.c.inject({.kind = Fault::Kind::spurious_interrupt});
  h.submit(1, nvme::flush(1), 9);
  CHECK(h.wait(1).cid == 9);
  CHECK(sent() == 2);
  close(fd);
}

TEST_CASE("faults at open are planted in every controller from then on, until that ends") {
  emulator::inject_at_open({.kind = Fault::Kind::all_ones, .at = 0});
  Host first("1MiB?pump=caller"), second("1MiB?pump=caller");
  emulator::clear_faults_at_open();
  Host third("1MiB?pump=caller");
  CHECK(first.reg64(Register::cap) == nvme::kAllOnes64);
  CHECK(first.reg64(Register::cap) != nvme::kAllOnes64);
  CHECK(second.reg64(Register::cap) == nvme::kAllOnes64);
  CHECK(third.reg64(Register::cap) != nvme::kAllOnes64);
}
