// SPDX-License-Identifier: Apache-2.0
//
// Memory that the controller reaches through a copier alone, and never by its address.
#include <atomic>
#include <mutex>

#include "base/copier.hpp"
#include "device/emulated.hpp"
#include "emulator_host.hpp"
#include "foreign_memory.hpp"

using namespace emulator_test;

namespace {

constexpr std::uint64_t kPage = 4096;

/// Pages by number, in the order in which a command is to name them.
struct Scattered {
  std::vector<std::uint64_t> pages;
  void add(std::uint64_t iova, std::uint64_t bytes) {
    for (std::uint64_t at = 0; at < bytes; at += kPage) pages.push_back(iova + at);
  }
  SubmissionEntry command(nvme::Opcode opcode, std::uint64_t lba, std::uint64_t offset, std::uint64_t bytes,
                          const Dma& lists) const {
    SubmissionEntry e = nvme::block_command(opcode, 1, Lba(lba), static_cast<std::uint32_t>(bytes / kPage), 0);
    nvme::build_prps(e, {pages.data(), offset}, bytes, kPage, [&](std::uint32_t i) {
      return nvme::ListPage{reinterpret_cast<std::uint64_t*>(lists.data() + i * kPage), lists.iova + i * kPage};
    });
    return e;
  }
};

std::vector<std::byte> patterned(std::uint64_t bytes, std::uint64_t seed) {
  std::vector<std::byte> data(bytes);
  pattern(data.data(), bytes, seed);
  return data;
}

std::vector<std::byte> on_medium(Host& h, std::uint64_t offset, std::uint64_t bytes) {
  std::vector<std::byte> data(bytes);
  h.c.peek(1, offset, data.data(), bytes);
  return data;
}

int map_error(Controller& c, const ForeignRange& range) {
  try {
    c.map(range, true);
  } catch (const Failure& f) {
    return f.error().code;
  }
  return 0;
}

}  // namespace

TEST_CASE("foreign memory: reads and writes of all sizes go through the copier, at any offset") {
  auto h = ready_host("16MiB?pump=caller&mdts=10");
  ForeignMemory gpu(4 << 20);
  Dma lists(h->c, 65536);
  Scattered all;
  all.add(h->c.map(gpu.range(), true), gpu.size());
  CHECK(all.pages[0] % 65536 == gpu.address() % 65536);
  for (const std::uint64_t bytes : {kPage, 2 * kPage, 3 * kPage, 64 * kPage, 257 * kPage, 700 * kPage}) {
    for (const std::uint64_t offset : {std::uint64_t{0}, std::uint64_t{512}}) {
      CAPTURE(bytes);
      CAPTURE(offset);
      const auto data = patterned(bytes, bytes + offset);
      std::memcpy(gpu.own() + offset, data.data(), bytes);
      CHECK(h->run(1, all.command(nvme::Opcode::write, 8, offset, bytes, lists)).status == 0);
      CHECK(on_medium(*h, 8 * kPage, bytes) == data);
      std::memset(gpu.own(), 0xee, gpu.size());
      CHECK(h->run(1, all.command(nvme::Opcode::read, 8, offset, bytes, lists)).status == 0);
      CHECK(std::memcmp(gpu.own() + offset, data.data(), bytes) == 0);
      CHECK(gpu.own()[offset + bytes] == std::byte{0xee});
      if (offset != 0) CHECK(gpu.own()[offset - 1] == std::byte{0xee});
    }
  }
  CHECK(gpu.largest() <= 1 << 20);
  CHECK(h->violation_count() == 0);
}

TEST_CASE("foreign memory: one command's data lies partly in it and partly in ordinary memory") {
  auto h = ready_host("1MiB?pump=caller");
  ForeignMemory gpu(16 * kPage);
  Dma ordinary(h->c, 16 * kPage), lists(h->c, 65536);
  const std::uint64_t iova = h->c.map(gpu.range(), true);
  Scattered mixed;
  mixed.add(ordinary.iova + 3 * kPage, 2 * kPage);
  mixed.add(iova + 5 * kPage, 3 * kPage);
  mixed.add(iova + 1 * kPage, kPage);
  mixed.add(ordinary.iova, kPage);
  const auto data = patterned(6 * kPage + 512, 3);
  h->c.poke(1, 0, data.data(), 6 * kPage);
  ordinary.pages.fill(0);
  CHECK(h->run(1, mixed.command(nvme::Opcode::read, 0, 512, 6 * kPage, lists)).status == 0);
  CHECK(std::memcmp(ordinary.data() + 3 * kPage + 512, data.data(), 2 * kPage - 512) == 0);
  CHECK(std::memcmp(gpu.own() + 5 * kPage, data.data() + 2 * kPage - 512, 3 * kPage) == 0);
  CHECK(std::memcmp(gpu.own() + kPage, data.data() + 5 * kPage - 512, kPage) == 0);
  CHECK(std::memcmp(ordinary.data(), data.data() + 6 * kPage - 512, 512) == 0);
  const auto other = patterned(kPage, 9);
  std::memcpy(gpu.own() + kPage, other.data(), kPage);
  CHECK(h->run(1, mixed.command(nvme::Opcode::write, 10, 512, 6 * kPage, lists)).status == 0);
  CHECK(on_medium(*h, 10 * kPage, 5 * kPage - 512) ==
        std::vector<std::byte>(data.begin(), data.begin() + 5 * kPage - 512));
  CHECK(on_medium(*h, 15 * kPage - 512, kPage) == other);
  CHECK(h->violation_count() == 0);
}

TEST_CASE("foreign memory: metadata and the ranges of Dataset Management may lie in it") {
  auto h = ready_host("1MiB?pump=caller&metadata=8");
  ForeignMemory gpu(4 * kPage);
  const std::uint64_t iova = h->c.map(gpu.range(), true);
  SubmissionEntry e = nvme::block_command(nvme::Opcode::write, 1, Lba(0), 1, 0);
  e.prp1 = iova;
  e.metadata = iova + kPage;
  pattern(gpu.own(), 2 * kPage, 1);
  const std::vector<std::byte> was(gpu.own(), gpu.own() + kPage + 8);
  CHECK(h->run(1, e).status == 0);
  std::memset(gpu.own(), 0, 2 * kPage);
  e.opcode = static_cast<std::uint8_t>(nvme::Opcode::read);
  CHECK(h->run(1, e).status == 0);
  CHECK(std::memcmp(gpu.own(), was.data(), kPage) == 0);
  CHECK(std::memcmp(gpu.own() + kPage, was.data() + kPage, 8) == 0);
  const nvme::DsmRange range{0, 1, 0};
  std::memcpy(gpu.own(), &range, sizeof range);
  SubmissionEntry trim{};
  trim.opcode = static_cast<std::uint8_t>(nvme::Opcode::dataset_management);
  trim.nsid = 1;
  trim.prp1 = iova;
  trim.cdw11 = nvme::kDsmDeallocate;
  CHECK(h->run(1, trim).status == 0);
  CHECK(on_medium(*h, 0, kPage) == std::vector<std::byte>(kPage));
  CHECK(h->violation_count() == 0);
}

TEST_CASE("foreign memory: what is mapped for reading only is not written to") {
  auto h = ready_host("1MiB?pump=caller");
  ForeignMemory gpu(4 * kPage);
  Dma lists(h->c, 65536);
  Scattered pages;
  pages.add(h->c.map(gpu.range(), false), gpu.size());
  pattern(gpu.own(), gpu.size(), 1);
  const std::vector<std::byte> was(gpu.own(), gpu.own() + gpu.size());
  CHECK(h->run(1, pages.command(nvme::Opcode::write, 0, 0, gpu.size(), lists)).status == 0);
  CHECK(on_medium(*h, 0, gpu.size()) == was);
  CHECK(h->violation_count() == 0);
  CHECK(h->run(1, pages.command(nvme::Opcode::read, 8, 0, gpu.size(), lists)).status ==
        nvme::status::data_transfer_error);
  CHECK(h->violated("read-only-access"));
  CHECK(std::memcmp(gpu.own(), was.data(), was.size()) == 0);
}

TEST_CASE("foreign memory: a copier that fails ends its command, and others go on") {
  auto h = ready_host("16MiB?pump=caller&mdts=10");
  ForeignMemory gpu(3 << 20);
  Dma lists(h->c, 65536), ordinary(h->c, kPage);
  Scattered pages;
  pages.add(h->c.map(gpu.range(), true), gpu.size());
  for (const auto opcode : {nvme::Opcode::read, nvme::Opcode::write}) {
    for (const int after : {0, 2}) {
      const auto before = h->c.counters();
      gpu.fail_after(after, EIO);
      h->place(1, pages.command(opcode, 0, 0, gpu.size(), lists), 100);
      h->place(1, h->transfer(nvme::Opcode::read, 1, 0, 1, ordinary, 0, kPage), 101);
      h->ring(1);
      CHECK(h->wait(1).status == nvme::status::data_transfer_error);
      CHECK(h->wait(1).status == 0);
      gpu.fail_after(-1, 0);
      CHECK(h->c.counters().reads == before.reads + 1);
      CHECK(h->c.counters().writes == before.writes);
    }
    CHECK(h->run(1, pages.command(opcode, 0, 0, gpu.size(), lists)).status == 0);
  }
  CHECK(h->violation_count() == 0);
}

TEST_CASE("foreign memory: queues, lists, doorbells and admin pages are refused in it") {
  auto h = ready_host("16MiB?pump=caller&mdts=10");
  ForeignMemory gpu(1 << 20);
  Dma ordinary(h->c, 64 * kPage);
  const std::uint64_t iova = h->c.map(gpu.range(), true);
  auto refused = [&](const Completion& done) {
    CHECK(done.status == nvme::status::data_transfer_error);
    CHECK(h->violation_count() == 1);
    CHECK(h->violated("foreign-access"));
    h->c.clear_violations();
  };
  SUBCASE("a queue") { refused(h->admin(nvme::create_completion_queue(2, 16, Iova(iova), false, 0))); }
  SUBCASE("an Identify page") {
    SubmissionEntry e{};
    e.opcode = static_cast<std::uint8_t>(nvme::AdminOpcode::identify);
    e.cdw10 = 1;
    e.prp1 = iova;
    refused(h->admin(e));
  }
  SUBCASE("shadow doorbells") {
    refused(h->admin(nvme::doorbell_buffer_config(Iova(iova), Iova(ordinary.iova))));
    refused(h->admin(nvme::doorbell_buffer_config(Iova(ordinary.iova), Iova(iova))));
  }
  SUBCASE("a PRP list") {
    SubmissionEntry e = nvme::block_command(nvme::Opcode::read, 1, Lba(0), 4, 0);
    e.prp1 = ordinary.iova;
    e.prp2 = iova;
    refused(h->run(1, e));
  }
  SUBCASE("the admin queues") {
    h->disable();
    h->set64(Register::asq, iova);
    h->set64(Register::acq, iova + 4 * kPage);
    h->set32(Register::cc, nvme::Configuration::make(kPage).with_enabled(true).raw);
    CHECK(h->csts().fatal());
    CHECK(h->violated("foreign-access"));
  }
  CHECK(gpu.calls() == 0);
}

TEST_CASE("foreign memory: faults that change data change it there") {
  auto h = ready_host("1MiB?pump=caller");
  ForeignMemory gpu(4 * kPage);
  Dma lists(h->c, 65536);
  Scattered pages;
  pages.add(h->c.map(gpu.range(), true), gpu.size());
  const auto data = patterned(gpu.size(), 5);
  h->c.poke(1, 0, data.data(), data.size());
  SUBCASE("corrupt") {
    Fault fault;
    fault.kind = Fault::Kind::corrupt;
    h->c.inject(fault);
    CHECK(h->run(1, pages.command(nvme::Opcode::read, 0, 0, gpu.size(), lists)).status == 0);
    int different = 0;
    for (std::uint64_t i = 0; i < gpu.size(); ++i) different += gpu.own()[i] != data[i];
    CHECK(different == 1);
  }
  SUBCASE("late_write") {
    Fault fault;
    fault.kind = Fault::Kind::late_write;
    h->c.inject(fault);
    h->submit(1, pages.command(nvme::Opcode::read, 0, 0, gpu.size(), lists), 7);
    h->turns(3);
    const std::byte first = gpu.own()[0];
    CHECK(first == gpu.own()[gpu.size() - 1]);
    h->turns(1);
    CHECK(gpu.own()[gpu.size() - 1] != first);
    // A copier that fails ends the writing, not the controller.
    gpu.fail_after(0, EIO);
    h->turns(2);
    const auto calls = gpu.calls();
    h->turns(2);
    CHECK(gpu.calls() == calls);
    CHECK(h->quiet(1));
    CHECK(h->admin(nvme::abort(1, 7)).status == 0);
    CHECK(h->wait(1).status == nvme::status::abort_requested);
  }
  CHECK(h->violation_count() == 0);
}

TEST_CASE("foreign memory: unmapped under a queued command, it is not reached any more") {
  auto h = ready_host("1MiB?pump=caller&clock=virtual&latency=1ms");
  ForeignMemory gpu(4 * kPage);
  Dma lists(h->c, 65536);
  Scattered pages;
  pages.add(h->c.map(gpu.range(), true), gpu.size());
  h->submit(1, pages.command(nvme::Opcode::read, 0, 0, gpu.size(), lists), 7);
  h->c.unmap(pages.pages[0]);
  CHECK(h->violated("unmap-in-use"));
  CHECK(h->wait(1).status == nvme::status::data_transfer_error);
  CHECK(gpu.calls() == 0);
  CHECK(h->c.counters().mapped_bytes == lists.pages.size() + 4 * 65536);
}

TEST_CASE("foreign memory: mapping refuses what is not whole pages or has no copier, and looks at nothing else") {
  Host h("1MiB?pump=caller");
  ForeignMemory gpu(4 * kPage);
  CHECK(map_error(h.c, {gpu.address() + 8, Bytes(kPage), &gpu}) == EINVAL);
  CHECK(map_error(h.c, {gpu.address(), Bytes(100), &gpu}) == EINVAL);
  CHECK(map_error(h.c, {gpu.address(), Bytes(0), &gpu}) == EINVAL);
  CHECK(map_error(h.c, {gpu.address(), Bytes(kPage), nullptr}) == EINVAL);
  CHECK(map_error(h.c, {std::uint64_t{1} << 46, Bytes(kPage), &gpu}) == 0);
  CHECK(gpu.calls() == 0);
}

TEST_CASE("foreign memory: a device gives the IOVA of each page, or says that its transport cannot") {
  ForeignMemory gpu(3 * kPage);
  const std::string text = "emulated:1MiB?pump=caller";
  device::EmulatedDevice device(text, parse_uri(text));
  std::uint64_t pages[3] = {};
  const device::Mapping mapping = device.map_foreign(gpu.range(), device::Access::read_write, pages);
  CHECK(mapping.length.value == 3 * kPage);
  for (std::uint64_t i = 0; i < 3; ++i) CHECK(pages[i] == mapping.token + i * kPage);
  device.unmap(mapping);
  CHECK(device.controller().counters().mapped_bytes == 0);
  try {
    static_cast<device::Device&>(device).Device::map_foreign(gpu.range(), device::Access::read_write, pages);
    FAIL("it was mapped");
  } catch (const Failure& f) {
    CHECK(f.error().code == EOPNOTSUPP);
    CHECK(cause_of(f).find("transport emulated") != std::string::npos);
  }
}
