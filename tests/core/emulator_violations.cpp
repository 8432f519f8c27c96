// SPDX-License-Identifier: Apache-2.0
//
// Each rule is broken once, and recorded.
#include "emulator_host.hpp"

using namespace emulator_test;
using nvme::Opcode;
namespace status = ugds::nvme::status;

namespace {

constexpr std::uint64_t kPage = 4096;

struct Fixture {
  explicit Fixture(const std::string& uri = "16MiB?pump=caller", std::uint32_t depth = 64)
      : host(ready_host(uri, depth)), h(*host), buffer(h.c, 1 << 20), lists(h.c, 65536) {}
  SubmissionEntry read(std::uint32_t blocks, std::uint64_t offset = 0, std::uint64_t lba = 0) {
    return h.transfer(Opcode::read, 1, lba, blocks, buffer, offset, blocks * kPage, &lists);
  }
  std::unique_ptr<Host> host;
  Host& h;
  Dma buffer, lists;
};

}  // namespace

TEST_CASE("violation unmapped-access: no byte is moved to where nothing is mapped") {
  Fixture f;
  SubmissionEntry e = f.read(1);
  e.prp1 = f.buffer.iova + f.buffer.pages.size();
  CHECK(f.h.run(1, e).status == status::data_transfer_error);
  CHECK(f.h.violated("unmapped-access"));
  f.h.c.clear_violations();
  CHECK(f.h.violation_count() == 0);
  e.prp1 = reinterpret_cast<std::uintptr_t>(f.buffer.data());
  CHECK(f.h.run(1, e).status == status::data_transfer_error);
  CHECK(f.h.violated("unmapped-access"));
  e.prp1 = 0;
  CHECK(f.h.run(1, e).status == status::data_transfer_error);
}

TEST_CASE("violation unmapped-access: of two pages of which one is missing, neither is written") {
  Fixture f;
  SubmissionEntry e = f.read(2);
  e.prp2 = 0x1000;
  f.buffer.pages.fill(0x77);
  CHECK(f.h.run(1, e).status == status::data_transfer_error);
  CHECK(f.buffer.data()[0] == std::byte{0x77});
}

TEST_CASE("violation read-only-access: a read into memory that was mapped for writing only") {
  Fixture f;
  Dma constant(f.h.c, kPage, false);
  CHECK(f.h.run(1, f.h.transfer(Opcode::write, 1, 0, 1, constant, 0, kPage)).status == 0);
  CHECK(f.h.violation_count() == 0);
  CHECK(f.h.run(1, f.h.transfer(Opcode::read, 1, 0, 1, constant, 0, kPage)).status == status::data_transfer_error);
  CHECK(f.h.violated("read-only-access"));
}

TEST_CASE("violation unmap-in-use: data of a queued command, which then fails") {
  Fixture f;
  Dma gone(f.h.c, kPage);
  f.h.submit(1, f.h.transfer(Opcode::read, 1, 0, 1, gone, 0, kPage), 9);
  gone.unmap();
  CHECK(f.h.violated("unmap-in-use"));
  CHECK(f.h.wait(1).status == status::data_transfer_error);
  CHECK(f.h.violated("unmapped-access"));
}

TEST_CASE("violation unmap-in-use: data, lists and rings of what is executing") {
  Fixture f("16MiB?pump=caller&clock=virtual&latency=1ms");
  f.h.c.inject({.kind = Fault::Kind::hang});
  auto gone = std::make_unique<Dma>(f.h.c, 1 << 16);
  auto list = std::make_unique<Dma>(f.h.c, kPage);
  f.h.submit(1, f.h.transfer(Opcode::read, 1, 0, 4, *gone, 0, 4 * kPage, list.get()), 1);
  f.h.turns(3);
  CHECK(f.h.violation_count() == 0);
  list->unmap();
  CHECK(f.h.violation_count() == 1);
  gone->unmap();
  CHECK(f.h.violation_count() == 2);
  f.h.queues[1].cq->unmap();
  CHECK(f.h.violation_count() == 3);
  for (const auto& v : f.h.c.violations()) CHECK(v.rule == "unmap-in-use");
}

TEST_CASE("violation unmap-unknown: what was never mapped cannot be unmapped") {
  Fixture f;
  f.h.c.unmap(f.buffer.iova + kPage);
  CHECK(f.h.violated("unmap-unknown"));
}

TEST_CASE("unmapping what no command names is no violation") {
  Fixture f;
  CHECK(f.h.run(1, f.read(8)).status == 0);
  f.buffer.unmap();
  f.lists.unmap();
  CHECK(f.h.violation_count() == 0);
}

TEST_CASE("violation prp-alignment: PRP1 at an odd byte, PRP2 and list entries inside a page") {
  Fixture f;
  SubmissionEntry e = f.read(1);
  e.prp1 += 2;
  CHECK(f.h.run(1, e).status == status::invalid_prp_offset);
  CHECK(f.h.violation_count() == 1);
  e = f.read(2);
  e.prp2 += 512;
  CHECK(f.h.run(1, e).status == status::invalid_prp_offset);
  CHECK(f.h.violation_count() == 2);
  e = f.read(3);
  f.lists.as<std::uint64_t>()[1] += 4;
  CHECK(f.h.run(1, e).status == status::invalid_prp_offset);
  CHECK(f.h.violation_count() == 3);
  for (const auto& v : f.h.c.violations()) CHECK(v.rule == "prp-alignment");
}

TEST_CASE("violation prp-list: a list pointer that is not qword-aligned, a chain into the middle of a page") {
  Fixture f("64MiB?pump=caller&mdts=12");
  SubmissionEntry e = f.read(3);
  e.prp2 += 4;
  CHECK(f.h.run(1, e).status == status::invalid_prp_offset);
  CHECK(f.h.violated("prp-list"));
  f.h.c.clear_violations();
  Dma large(f.h.c, 4 << 20);
  e = f.h.transfer(Opcode::read, 1, 0, 600, large, 0, 600 * kPage, &f.lists);
  f.lists.as<std::uint64_t>()[511] += 8;
  CHECK(f.h.run(1, e).status == status::invalid_prp_offset);
  CHECK(f.h.violated("prp-list"));
}

TEST_CASE("violation mdts: one block more than the device takes") {
  Fixture f("16MiB?pump=caller&mdts=5");
  CHECK(f.h.run(1, f.read(32)).status == 0);
  CHECK(f.h.violation_count() == 0);
  CHECK(f.h.run(1, f.read(33)).status == status::invalid_field);
  CHECK(f.h.violated("mdts"));
}

TEST_CASE("violation duplicate-cid: an identifier that is in flight") {
  Fixture f;
  f.h.c.inject({.kind = Fault::Kind::hang});
  f.h.submit(1, f.read(1), 5);
  f.h.turn();
  f.h.submit(1, f.read(1), 5);
  CHECK(f.h.wait(1).status == status::command_id_conflict);
  CHECK(f.h.violated("duplicate-cid"));
}

TEST_CASE("violation doorbell-range: a tail or head of the depth or above") {
  Fixture f("16MiB?pump=caller", 8);
  *f.h.c.doorbell(nvme::submission_doorbell(1, 4)) = 8;
  f.h.turn();
  CHECK(f.h.violation_count() == 1);
  CHECK(f.h.violated("doorbell-range"));
  *f.h.c.doorbell(nvme::completion_doorbell(1, 4)) = 9;
  f.h.turn();
  CHECK(f.h.violation_count() == 2);
}

TEST_CASE("violation sq-overflow: the tail passes the head that the host was told") {
  Fixture f("16MiB?pump=caller", 4);
  f.h.c.inject({.kind = Fault::Kind::hang, .count = 10});
  for (std::uint16_t cid = 0; cid < 3; ++cid) f.h.submit(1, f.read(1), cid);
  f.h.turn();
  CHECK(f.h.violation_count() == 0);
  f.h.submit(1, f.read(1), 3);
  f.h.turn();
  CHECK(f.h.violated("sq-overflow"));
}

TEST_CASE("violation cq-doorbell: a head beyond what was posted") {
  Fixture f;
  f.h.doorbell(1, true, 1, 0);
  f.h.turn();
  CHECK(f.h.violated("cq-doorbell"));
}

TEST_CASE("violation cq-overrun: a full completion queue is waited for, never overwritten") {
  auto host = std::make_unique<Host>("16MiB?pump=caller");
  Host& h = *host;
  h.bring_up();
  REQUIRE(h.create_queue(1, 16, 4) == 0);
  for (std::uint16_t cid = 0; cid < 8; ++cid) h.place(1, nvme::flush(1), cid);
  h.ring(1);
  h.turns(5);
  CHECK(h.violated("cq-overrun"));
  for (std::uint16_t cid = 0; cid < 8; ++cid) CHECK(h.wait(1).cid == cid);
  CHECK(h.quiet(1));
}

TEST_CASE("violation register: offsets, widths and writes that no register takes") {
  Host h("1MiB?pump=caller");
  std::size_t expected = 0;
  h.c.read(0x02, 2);
  CHECK(h.violation_count() == ++expected);
  h.c.read(0x0c, 8);
  CHECK(h.violation_count() == ++expected);
  h.c.read(0x18, 4);
  CHECK(h.violation_count() == ++expected);
  h.c.read(0x1000, 4);
  CHECK(h.violation_count() == ++expected);
  h.c.write(0x00, 1, 8);
  CHECK(h.violation_count() == ++expected);
  h.c.write(0x1c, 0, 4);
  CHECK(h.violation_count() == ++expected);
  h.bring_up();
  h.c.write(0x1002, 0, 4);
  CHECK(h.violation_count() == ++expected);
  h.c.write(0x1000, 0, 8);
  CHECK(h.violation_count() == ++expected);
  h.c.write(nvme::submission_doorbell(9, 4), 0, 4);  // eight queues are granted
  CHECK(h.violation_count() == ++expected);
  h.set32(Register::aqa, 0);
  CHECK(h.violation_count() == ++expected);
  for (const auto& v : h.c.violations()) CHECK(v.rule == "register");
}

TEST_CASE("violation reserved-field: fused operations and SGLs are refused, reserved bits are noticed") {
  Fixture f;
  SubmissionEntry e = f.read(1);
  e.flags = 1;
  CHECK(f.h.run(1, e).status == status::invalid_field);
  e.flags = 0x40;
  CHECK(f.h.run(1, e).status == status::invalid_field);
  CHECK(f.h.violation_count() == 2);
  e.flags = 0;
  e.cdw3 = 1;
  CHECK(f.h.run(1, e).status == 0);
  e.cdw3 = 0;
  e.cdw15 = 7;
  CHECK(f.h.run(1, e).status == 0);
  CHECK(f.h.violation_count() == 4);
  for (const auto& v : f.h.c.violations()) CHECK(v.rule == "reserved-field");
}

TEST_CASE("violation list-overlap: two live commands whose lists share memory") {
  Fixture f;
  f.h.c.inject({.kind = Fault::Kind::hang, .count = 2});
  f.h.submit(1, f.read(4), 1);
  f.h.submit(1, f.read(4, 65536), 2);
  f.h.turn();
  CHECK(f.h.violated("list-overlap"));
}

TEST_CASE("lists at different places of one page do not overlap") {
  Fixture f;
  f.h.c.inject({.kind = Fault::Kind::hang, .count = 2});
  SubmissionEntry e = f.read(4);
  f.h.submit(1, e, 1);
  for (int i = 0; i < 3; ++i) f.lists.as<std::uint64_t>()[3 + i] = f.buffer.iova + 65536 + i * kPage;
  e.prp2 = f.lists.iova + 3 * 8;  // right behind the first
  f.h.submit(1, e, 2);
  f.h.turn();
  CHECK(f.h.violation_count() == 0);
}

TEST_CASE("violation list-changed: a list that is rewritten while its command is in flight") {
  Fixture f("16MiB?pump=caller&clock=virtual&latency=10us");
  f.h.submit(1, f.read(4), 1);
  f.h.turn();
  CHECK(f.h.violation_count() == 0);
  f.lists.as<std::uint64_t>()[1] += kPage;
  CHECK(f.h.wait(1).status == 0);
  CHECK(f.h.violated("list-changed"));
}

TEST_CASE("violation nsid: namespaces that do not exist") {
  Fixture f("16MiB?pump=caller&namespaces=2");
  for (const std::uint32_t nsid : {0u, 3u, nvme::kAllNamespaces}) {
    SubmissionEntry e = f.read(1);
    e.nsid = nsid;
    CHECK(f.h.run(1, e).status == status::invalid_namespace);
  }
  CHECK(f.h.violation_count() == 3);
  CHECK(f.h.run(1, nvme::flush(nvme::kAllNamespaces)).status == 0);
  CHECK(f.h.violation_count() == 3);
  CHECK(f.h.violated("nsid"));
}

TEST_CASE("violation queue-while-disabled: doorbells of a controller that is not ready, or of no queue") {
  Host h("1MiB?pump=caller");
  h.c.write(0x1000, 1, 4);
  CHECK(h.violation_count() == 1);
  CHECK(h.violated("queue-while-disabled"));
  *h.c.doorbell(nvme::submission_doorbell(1, 4)) = 1;
  h.bring_up();
  REQUIRE(h.create_queue(1, 8) == 0);
  CHECK(h.violation_count() == 2);
  CHECK(h.quiet(1));
}
