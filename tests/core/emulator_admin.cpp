// SPDX-License-Identifier: Apache-2.0
#include "emulator_host.hpp"
#include "nvme/identify.hpp"

using namespace emulator_test;
namespace status = ugds::nvme::status;

namespace {

SubmissionEntry with(SubmissionEntry e, void (*change)(SubmissionEntry&)) {
  change(e);
  return e;
}

}  // namespace

TEST_CASE("emulator: Identify describes the controller that was asked for") {
  Host h("64MiB?pump=caller&mdts=3&namespaces=2&serial=S1&model=M%20x&firmware=F2&dsm=0");
  h.bring_up();
  Dma page(h.c, 4096);
  REQUIRE(h.admin(nvme::identify(nvme::Cns::controller, 0, Iova(page.iova))).status == 0);
  const auto& c = *page.as<nvme::IdentifyController>();
  CHECK(nvme::get_text(c.serial, sizeof c.serial) == "S1");
  CHECK(nvme::get_text(c.model, sizeof c.model) == "M x");
  CHECK(nvme::get_text(c.firmware, sizeof c.firmware) == "F2");
  CHECK(c.mdts == 3);
  CHECK(c.nn == 2);
  CHECK((c.oacs & nvme::oacs::doorbell_buffer_config) != 0);
  CHECK((c.oncs & nvme::oncs::dataset_management) == 0);
  CHECK((c.oncs & nvme::oncs::write_zeroes) != 0);
  CHECK((c.vwc & 1) == 1);
  CHECK(c.sqes == 0x66);
  CHECK(c.cqes == 0x44);

  REQUIRE(h.admin(nvme::identify(nvme::Cns::ns, 2, Iova(page.iova))).status == 0);
  CHECK(page.as<nvme::IdentifyNamespace>()->nsze == 16384);
  REQUIRE(h.admin(nvme::identify(nvme::Cns::active_namespaces, 0, Iova(page.iova))).status == 0);
  CHECK(page.as<std::uint32_t>()[0] == 1);
  CHECK(page.as<std::uint32_t>()[1] == 2);
  CHECK(page.as<std::uint32_t>()[2] == 0);
  REQUIRE(h.admin(nvme::identify(nvme::Cns::active_namespaces, 1, Iova(page.iova))).status == 0);
  CHECK(page.as<std::uint32_t>()[0] == 2);
  REQUIRE(h.admin(nvme::identify(nvme::Cns::descriptors, 1, Iova(page.iova))).status == 0);
  CHECK(page.data()[0] == std::byte{3});
  CHECK(page.data()[1] == std::byte{16});
  CHECK(h.violation_count() == 0);

  CHECK(h.admin(nvme::identify(nvme::Cns::ns, 3, Iova(page.iova))).status == status::invalid_namespace);
  CHECK(h.admin(nvme::identify(nvme::Cns::ns, 0, Iova(page.iova))).status == status::invalid_namespace);
  CHECK(h.admin(nvme::identify(static_cast<nvme::Cns>(0x77), 0, Iova(page.iova))).status == status::invalid_field);
}

TEST_CASE("emulator: the format in use is found by all six bits of its index") {
  for (const std::uint32_t lba : {512u, 4096u, 65536u}) {
    for (const std::uint32_t metadata : {0u, 8u, 64u}) {
      for (const bool interleaved : {false, true}) {
        if (interleaved && metadata == 0) continue;
        Options o = parse("64MiB?pump=caller");
        o.lba = lba;
        o.metadata = metadata;
        o.interleaved = interleaved;
        Host h(o);
        h.bring_up();
        Dma page(h.c, 4096);
        REQUIRE(h.admin(nvme::identify(nvme::Cns::ns, 1, Iova(page.iova))).status == 0);
        const auto& n = *page.as<nvme::IdentifyNamespace>();
        const nvme::LbaFormat format = n.formats[nvme::format_index(n.flbas, n.nlbaf)];
        CHECK((1u << format.data_power) == lba);
        CHECK(format.metadata == metadata);
        CHECK(nvme::metadata_interleaved(n.flbas) == interleaved);
        CHECK(n.nsze == (64u << 20) / lba);
      }
    }
  }
}

TEST_CASE("emulator: the number of queues is 0-based and clamped, and FFFFh is refused") {
  Host h("1MiB?pump=caller&queues=5");
  h.bring_up();
  auto done = h.admin(nvme::set_number_of_queues(100));
  CHECK(done.status == 0);
  CHECK(nvme::granted_queue_pairs(done.result) == 5);
  done = h.admin(nvme::set_number_of_queues(2));
  CHECK(done.result == 0x0001'0001);
  CHECK(h.admin(nvme::get_features(nvme::Feature::number_of_queues)).result == 0x0001'0001);
  CHECK(h.create_queue(3, 8) == status::invalid_queue_id);
  CHECK(h.admin(nvme::set_features(nvme::Feature::number_of_queues, 0x0000ffff)).status == status::invalid_field);
  CHECK(h.admin(nvme::set_features(nvme::Feature::number_of_queues, 0xffff0000)).status == status::invalid_field);
  CHECK(h.create_queue(2, 8) == 0);
  CHECK(h.admin(nvme::set_number_of_queues(2)).status == status::command_sequence_error);
  Host none("1MiB?pump=caller&queues=0");
  none.bring_up();
  CHECK(none.admin(nvme::set_number_of_queues(1)).status == status::internal_error);
  CHECK(none.create_queue(1, 8) == status::invalid_queue_id);
}

TEST_CASE("emulator: features are stored, and unknown ones refused") {
  Host h("1MiB?pump=caller");
  h.bring_up();
  CHECK(h.admin(nvme::set_features(nvme::Feature::arbitration, 0x01020304)).status == 0);
  CHECK(h.admin(nvme::get_features(nvme::Feature::arbitration)).result == 0x01020304);
  CHECK(h.admin(nvme::get_features(nvme::Feature::volatile_write_cache)).result == 1);
  CHECK(h.admin(nvme::set_features(nvme::Feature::volatile_write_cache, 0)).status == 0);
  CHECK(h.admin(nvme::get_features(nvme::Feature::volatile_write_cache)).result == 0);
  CHECK(h.admin(nvme::set_features(static_cast<nvme::Feature>(0x60), 0)).status == status::invalid_field);
  CHECK(h.admin(with(nvme::set_features(nvme::Feature::arbitration, 0), [](SubmissionEntry& e) {
           e.cdw10 |= 1u << 31;
         })).status == status::feature_not_saveable);
  Host without("1MiB?pump=caller&vwc=0");
  without.bring_up();
  CHECK(without.admin(nvme::get_features(nvme::Feature::volatile_write_cache)).status == status::invalid_field);
}

TEST_CASE("emulator: queue creation refuses what the specification says") {
  Host h("1MiB?pump=caller&queues=4&depth=64");
  h.bring_up();
  Dma ring(h.c, 65536);
  const Iova at(ring.iova);
  auto cq = [&](std::uint16_t id, std::uint32_t entries) {
    return nvme::create_completion_queue(id, entries, at, false, 0);
  };
  auto sq = [&](std::uint16_t id, std::uint32_t entries, std::uint16_t target) {
    return nvme::create_submission_queue(id, entries, at, target);
  };
  CHECK(h.admin(cq(0, 8)).status == status::invalid_queue_id);
  CHECK(h.admin(cq(5, 8)).status == status::invalid_queue_id);
  CHECK(h.admin(cq(1, 1)).status == status::invalid_queue_size);
  CHECK(h.admin(cq(1, 65)).status == status::invalid_queue_size);
  CHECK(h.admin(with(cq(1, 8), [](SubmissionEntry& e) { e.cdw11 = 0; })).status == status::invalid_field);
  CHECK(h.admin(with(cq(1, 8), [](SubmissionEntry& e) { e.cdw11 |= 2 | 0x7ff << 16; })).status ==
        status::invalid_interrupt_vector);
  CHECK(h.violation_count() == 0);
  CHECK(h.admin(with(cq(1, 8), [](SubmissionEntry& e) { e.prp1 += 64; })).status == status::invalid_prp_offset);
  CHECK(h.violated("prp-alignment"));
  h.c.clear_violations();
  REQUIRE(h.admin(cq(1, 64)).status == 0);
  CHECK(h.admin(cq(1, 8)).status == status::invalid_queue_id);
  CHECK(h.admin(sq(0, 8, 1)).status == status::invalid_queue_id);
  CHECK(h.admin(sq(2, 8, 0)).status == status::invalid_queue_id);
  CHECK(h.admin(sq(2, 8, 9)).status == status::invalid_queue_id);
  CHECK(h.admin(sq(2, 8, 2)).status == status::invalid_completion_queue);
  CHECK(h.admin(sq(2, 1, 1)).status == status::invalid_queue_size);
  REQUIRE(h.admin(sq(2, 2, 1)).status == 0);
  CHECK(h.admin(sq(2, 8, 1)).status == status::invalid_queue_id);
  CHECK(h.admin(nvme::delete_completion_queue(1)).status == status::invalid_queue_deletion);
  CHECK(h.admin(nvme::delete_submission_queue(3)).status == status::invalid_queue_id);
  CHECK(h.admin(nvme::delete_submission_queue(0)).status == status::invalid_queue_id);
  CHECK(h.admin(nvme::delete_submission_queue(2)).status == 0);
  CHECK(h.admin(nvme::delete_completion_queue(1)).status == 0);
  CHECK(h.admin(nvme::delete_completion_queue(1)).status == status::invalid_queue_id);
  CHECK(h.violation_count() == 0);
  CHECK(h.admin(with(cq(1, 8), [](SubmissionEntry& e) { e.prp1 = 0x4000; })).status == status::data_transfer_error);
  CHECK(h.violated("unmapped-access"));
}

TEST_CASE("emulator: where CAP.CQR is 0 a queue can lie in scattered pages") {
  Host h("1MiB?pump=caller&contiguous=0&depth=1024");
  h.bring_up();
  Dma a(h.c, 4096), b(h.c, 4096), c(h.c, 4096), list(h.c, 4096), cq(h.c, 65536);
  const std::uint64_t pages[] = {c.iova, a.iova, b.iova};
  std::memcpy(list.data(), pages, sizeof pages);
  REQUIRE(h.admin(nvme::create_completion_queue(1, 256, Iova(cq.iova), false, 0)).status == 0);
  SubmissionEntry create = nvme::create_submission_queue(1, 192, Iova(list.iova), 1);
  create.cdw11 &= ~1u;
  REQUIRE(h.admin(create).status == 0);
  Dma* rings[] = {&c, &a, &b};
  for (std::uint32_t i = 0; i < 150; ++i) {
    SubmissionEntry e = nvme::flush(1);
    e.cid = static_cast<std::uint16_t>(i);
    rings[i / 64]->as<SubmissionEntry>()[i % 64] = e;
  }
  *h.c.doorbell(nvme::submission_doorbell(1, 4)) = 150;
  h.turns(10);
  for (std::uint32_t i = 0; i < 150; ++i) CHECK(CompletionWord{cq.as<CompletionEntry>()[i].last}.cid() == i);
  CHECK(h.c.counters().flushes == 150);
  CHECK(h.violation_count() == 0);
}

TEST_CASE("emulator: Abort ends a held command, a queued one, and says when there is none") {
  auto h = ready_host("1MiB?pump=caller&clock=virtual&latency=1s");
  Dma buffer(h->c, 4096);
  const SubmissionEntry read = h->transfer(nvme::Opcode::read, 1, 0, 1, buffer, 0, 4096);
  h->c.inject({.kind = Fault::Kind::hang});
  h->submit(1, read, 7);
  h->turn();
  CHECK(nvme::was_aborted(h->admin(nvme::abort(1, 7)).result));
  auto done = h->wait(1);
  CHECK(done.cid == 7);
  CHECK(done.status == status::abort_requested);
  h->place(1, read, 8);
  h->ring(1);
  CHECK(nvme::was_aborted(h->admin(nvme::abort(1, 8)).result));
  CHECK(h->wait(1).status == status::abort_requested);
  CHECK_FALSE(nvme::was_aborted(h->admin(nvme::abort(1, 9)).result));
  CHECK_FALSE(nvme::was_aborted(h->admin(nvme::abort(5, 9)).result));
  CHECK(h->c.counters().aborts == 2);
  h->c.inject({.kind = Fault::Kind::hang, .abortable = false});
  h->submit(1, read, 10);
  h->turn();
  CHECK_FALSE(nvme::was_aborted(h->admin(nvme::abort(1, 10)).result));
  CHECK(h->quiet(1));
}

TEST_CASE("emulator: Abort finds a command far back in the queue, before the controller has come to it") {
  auto h = ready_host("1MiB?pump=caller&clock=virtual&latency=1s", 128);
  Dma buffer(h->c, 4096);
  for (std::uint16_t cid = 0; cid < 100; ++cid)
    h->place(1, h->transfer(nvme::Opcode::read, 1, 0, 1, buffer, 0, 4096), cid);
  h->ring(1);
  h->submit(0, nvme::abort(1, 99), 500);
  h->turn();
  CHECK(nvme::was_aborted(h->wait(0).result));
  CHECK(h->wait(1).cid == 99);
  for (std::uint16_t cid = 0; cid < 99; ++cid) CHECK(h->wait(1).status == 0);
  CHECK(h->quiet(1));
}

TEST_CASE("emulator: deleting a queue ends its commands, unless nothing ends them") {
  auto h = ready_host("1MiB?pump=caller");
  h->c.inject({.kind = Fault::Kind::hang});
  h->submit(1, nvme::flush(1), 3);
  h->turn();
  CHECK(h->admin(nvme::delete_submission_queue(1)).status == 0);
  auto done = h->wait(1);
  CHECK(done.cid == 3);
  CHECK(done.status == status::aborted_sq_deletion);
  CHECK(h->admin(nvme::delete_completion_queue(1)).status == 0);
  REQUIRE(h->create_queue(1, 8) == 0);
  h->c.inject({.kind = Fault::Kind::hang, .abortable = false});
  h->submit(1, nvme::flush(1), 4);
  h->turn();
  h->submit(0, nvme::delete_submission_queue(1), 99);
  CHECK(h->quiet(0));
  h->disable();
  h->queues.clear();
  CHECK(h->violation_count() == 0);
}

TEST_CASE("emulator: event requests are held, up to a limit, and can be aborted") {
  Host h("1MiB?pump=caller");
  h.bring_up();
  SubmissionEntry request;
  request.opcode = static_cast<std::uint8_t>(nvme::AdminOpcode::async_event);
  for (std::uint16_t i = 0; i < 4; ++i) h.submit(0, request, 100 + i);
  CHECK(h.quiet(0));
  h.submit(0, request, 200);
  auto done = h.wait(0);
  CHECK(done.cid == 200);
  CHECK(done.status == 0x105);
  h.submit(0, nvme::abort(0, 101), 201);
  CHECK(h.wait(0).cid == 101);
  CHECK(nvme::was_aborted(h.wait(0).result));
}

TEST_CASE("emulator: log pages read as zeros, unknown pages and opcodes are refused") {
  Host h("1MiB?pump=caller&shadow=0");
  h.bring_up();
  Dma page(h.c, 4096);
  SubmissionEntry log;
  log.opcode = static_cast<std::uint8_t>(nvme::AdminOpcode::get_log_page);
  log.nsid = nvme::kAllNamespaces;
  log.prp1 = page.iova;
  log.cdw10 = 2 | 127u << 16;
  page.pages.fill(0x11);
  CHECK(h.admin(log).status == 0);
  CHECK(page.data()[0] == std::byte{0});
  CHECK(page.data()[511] == std::byte{0});
  CHECK(page.data()[512] == std::byte{0x11});
  log.cdw10 = 0x66;
  CHECK(h.admin(log).status == 0x109);
  SubmissionEntry unknown;
  unknown.opcode = 0x99;
  CHECK(h.admin(unknown).status == status::invalid_opcode);
  CHECK(h.admin(nvme::doorbell_buffer_config(Iova(page.iova), Iova(page.iova))).status == status::invalid_opcode);
}
