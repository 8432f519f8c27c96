// SPDX-License-Identifier: Apache-2.0
#include "emulator_host.hpp"

using namespace emulator_test;

TEST_CASE("emulator: a disabled controller becomes ready and stops again") {
  Host h("1MiB?pump=caller&depth=256&stride=2&timeout=7");
  const nvme::Capabilities cap{h.reg64(Register::cap)};
  CHECK(cap.max_queue_entries() == 256);
  CHECK(cap.doorbell_stride() == 16);
  CHECK(cap.ready_timeout_ms() == 3500);
  CHECK(cap.contiguous_queues_required());
  CHECK(cap.nvm_command_set());
  CHECK(h.reg32(Register::cap) == static_cast<std::uint32_t>(cap.raw));
  CHECK(h.c.read(4, 4) == cap.raw >> 32);
  CHECK(h.reg32(Register::vs) == 0x20000);
  CHECK_FALSE(h.csts().ready());
  h.bring_up();
  CHECK(h.csts().raw == 1);
  CHECK(h.c.counters().resets == 0);
  h.disable();
  CHECK(h.c.counters().resets == 1);
  h.bring_up();
  CHECK(h.violation_count() == 0);
}

TEST_CASE("emulator: a controller left enabled must be stopped first") {
  Host h("1MiB?pump=caller&enabled=1");
  CHECK(nvme::Configuration{h.reg32(Register::cc)}.enabled());
  CHECK(h.csts().ready());
  h.set64(Register::asq, 0x1000);
  CHECK(h.violated("register"));
  h.c.clear_violations();
  h.bring_up();
  CHECK(h.admin(nvme::get_features(nvme::Feature::arbitration)).status == 0);
  CHECK(h.violation_count() == 0);
}

TEST_CASE("emulator: ringing a controller whose admin queue points nowhere is fatal") {
  Host h("1MiB?pump=caller&enabled=1");
  h.c.write(0x1000, 1, 4);
  h.turn();
  CHECK(h.csts().fatal());
  CHECK(h.violated("unmapped-access"));
}

TEST_CASE("emulator: ready= delays CSTS.RDY either way") {
  for (const char* uri : {"1MiB?ready=20ms", "1MiB?ready=20ms&pump=caller"}) {
    Host h(uri);
    h.mps = 4096;
    Dma sq(h.c, 65536), cq(h.c, 65536);
    h.set32(Register::aqa, nvme::AdminQueueAttributes::make(2, 2).raw);
    h.set64(Register::asq, sq.iova);
    h.set64(Register::acq, cq.iova);
    const std::uint64_t begin = monotonic_ns();
    h.set32(Register::cc, nvme::Configuration::make(4096).with_enabled(true).raw);
    CHECK_FALSE(h.csts().ready());
    REQUIRE(h.wait_ready(true));
    CHECK(monotonic_ns() - begin >= 20'000'000);
    h.set32(Register::cc, 0);
    CHECK(h.csts().ready());
    REQUIRE(h.wait_ready(false));
    CHECK(monotonic_ns() - begin >= 40'000'000);
  }
}

TEST_CASE("emulator: ready= passes in virtual time without waiting") {
  Host h("1MiB?ready=100s&clock=virtual&pump=caller");
  h.bring_up();
  CHECK(h.c.virtual_now_ns() >= 100'000'000'000);
  Host threaded("1MiB?ready=100s&clock=virtual");
  threaded.bring_up();
}

TEST_CASE("emulator: a wrong configuration sets CSTS.CFS, and disabling clears it") {
  struct {
    const char* what;
    std::uint32_t cc, aqa;
    bool rings;
  } cases[] = {
      {"page size above CAP.MPSMAX", nvme::Configuration::make(65536).with_enabled(true).raw, 0x001f001f, true},
      {"entry sizes not set", 1, 0x001f001f, true},
      {"another command set", nvme::Configuration::make(4096).with_enabled(true).raw | 1u << 4, 0x001f001f, true},
      {"an admin queue of one entry", nvme::Configuration::make(4096).with_enabled(true).raw, 0, true},
      {"no admin queue", nvme::Configuration::make(4096).with_enabled(true).raw, 0x001f001f, false},
  };
  for (const auto& wrong : cases) {
    CAPTURE(wrong.what);
    Host h("1MiB?pump=caller");
    Dma sq(h.c, 65536), cq(h.c, 65536);
    h.set32(Register::aqa, wrong.aqa);
    if (wrong.rings) {
      h.set64(Register::asq, sq.iova);
      h.set64(Register::acq, cq.iova);
    }
    h.set32(Register::cc, wrong.cc);
    CHECK(h.csts().fatal());
    CHECK_FALSE(h.csts().ready());
    h.set32(Register::cc, 0);
    CHECK(h.csts().raw == 0);
    h.bring_up();
  }
}

TEST_CASE("emulator: shutdown completes, flushes and fetches no more") {
  auto h = ready_host("1MiB?pump=caller");
  Dma buffer(h->c, 4096);
  buffer.pages.fill(0x5a);
  REQUIRE(h->run(1, h->transfer(nvme::Opcode::write, 1, 3, 1, buffer, 0, 4096)).status == 0);
  h->set32(Register::cc, nvme::Configuration{h->reg32(Register::cc)}.with_shutdown(1).raw);
  CHECK(h->csts().shutdown_status() == 2);
  h->c.power_cut(0.0, 1);
  std::byte byte{};
  h->c.peek(1, 3 * 4096, &byte, 1);
  CHECK(byte == std::byte{0x5a});
  CHECK_FALSE(h->csts().ready());
  h->bring_up();
  CHECK(h->csts().shutdown_status() == 0);
}

TEST_CASE("emulator: page sizes from 4 KiB to 64 KiB, and strides, work") {
  for (const std::uint32_t power : {0u, 1u, 4u}) {
    for (const std::uint32_t stride : {0u, 3u, 10u}) {
      CAPTURE(power);
      CAPTURE(stride);
      Host h("16MiB?pump=caller&mpsmax=4&queues=3&shadow=0&stride=" + std::to_string(stride));
      // A mapping keeps the pointer's offset in 64 KiB, so the memory has to be found at such a boundary.
      Pages pages(std::uint64_t{2} << 20);
      auto* at = reinterpret_cast<std::byte*>(align_up(reinterpret_cast<std::uintptr_t>(pages.data()), 65536));
      const std::uint64_t base = h.c.map(at, 1 << 20, true);
      CHECK(base % 65536 == 0);
      const std::uint64_t page = std::uint64_t{4096} << power;
      h.set32(Register::aqa, nvme::AdminQueueAttributes::make(8, 8).raw);
      h.set64(Register::asq, base);
      h.set64(Register::acq, base + 65536);
      h.set32(Register::cc, nvme::Configuration::make(page).with_enabled(true).raw);
      REQUIRE(h.wait_ready(true));
      SubmissionEntry e = nvme::create_completion_queue(3, 4, Iova(base + 2 * 65536), false, 0);
      auto* sq = reinterpret_cast<SubmissionEntry*>(at);
      auto* cq = reinterpret_cast<CompletionEntry*>(at + 65536);
      sq[0] = e;
      sq[1] = nvme::create_submission_queue(3, 4, Iova(base + 3 * 65536), 3);
      sq[1].cid = 1;
      h.c.write(nvme::submission_doorbell(0, h.stride), 2, 4);
      h.turns(3);
      CHECK(CompletionWord{cq[1].last}.status() == 0);
      auto* io = reinterpret_cast<SubmissionEntry*>(at + 3 * 65536);
      pattern(at + 4 * 65536, 65536, power);
      io[0] = nvme::block_command(nvme::Opcode::write, 1, Lba(2), 16);
      io[0].prp1 = base + 4 * 65536 + 512;
      // 64 KiB from an offset of 512: 1, 2 or more pages by page size.
      std::vector<std::uint64_t> addresses;
      for (std::uint64_t i = 0; i < 64; ++i) addresses.push_back(base + 4 * 65536 + i * 4096);
      nvme::build_prps(io[0], {addresses.data(), 512}, 65536, page, [&](std::uint32_t) {
        return nvme::ListPage{reinterpret_cast<std::uint64_t*>(at + 8 * 65536), base + 8 * 65536};
      });
      std::uint32_t* word = h.c.doorbell(nvme::submission_doorbell(3, h.stride));
      REQUIRE(word != nullptr);
      *word = 1;
      h.turns(3);
      auto* io_cq = reinterpret_cast<CompletionEntry*>(at + 2 * 65536);
      CHECK(CompletionWord{io_cq[0].last}.phase());
      CHECK(CompletionWord{io_cq[0].last}.status() == 0);
      std::vector<std::byte> stored(65536);
      h.c.peek(1, 2 * 4096, stored.data(), stored.size());
      CHECK(std::memcmp(stored.data(), at + 4 * 65536 + 512, 65536) == 0);
      CHECK(h.violation_count() == 0);
      h.c.function_reset();
      h.c.unmap(base);
      CHECK(h.violation_count() == 0);
    }
  }
}

TEST_CASE("emulator: set-up is undone at whatever step it fails") {
  testing::record_steps();
  { Host h("1MiB?name=steps"); }
  CHECK(emulator::forget_subsystem("steps"));
  const auto steps = testing::recorded_steps();
  REQUIRE(steps.size() >= 4);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    CAPTURE(steps[i]);
    testing::arm_step(i);
    CHECK_THROWS_AS(Host("1MiB?name=steps"), Failure);
    CHECK(testing::disarm_steps());
    CHECK_FALSE(emulator::forget_subsystem("steps"));
    {
      Host again("1MiB?name=steps");
      again.bring_up();
    }
    CHECK(emulator::forget_subsystem("steps"));
  }
}

TEST_CASE("emulator: function_reset returns everything to its initial state") {
  auto h = ready_host("1MiB?pump=caller");
  h->c.inject({.kind = Fault::Kind::hang});
  Dma buffer(h->c, 4096);
  h->submit(1, h->transfer(nvme::Opcode::read, 1, 0, 1, buffer, 0, 4096), 1);
  h->turns(5);
  CHECK(h->c.function_reset());
  CHECK(h->reg32(Register::cc) == 0);
  CHECK(h->reg32(Register::csts) == 0);
  CHECK(h->reg64(Register::asq) == 0);
  h->queues.clear();
  buffer.unmap();
  CHECK(h->violation_count() == 0);
  CHECK(h->c.counters().mapped_ranges == 0);
  h->bring_up();
  h->c.inject({.kind = Fault::Kind::reset_fails});
  CHECK_FALSE(h->c.function_reset());
  CHECK(h->csts().ready());
}
