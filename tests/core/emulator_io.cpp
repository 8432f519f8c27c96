// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <thread>

#include "emulator_host.hpp"

using namespace emulator_test;
using nvme::Opcode;
namespace status = ugds::nvme::status;

namespace {

constexpr std::uint64_t kPage = 4096;

/// A path that nothing uses, removed at the end.
struct TemporaryFile {
  TemporaryFile() {
    char name[] = "/tmp/ugds-emulator-XXXXXX";
    const int fd = mkstemp(name);
    REQUIRE(fd >= 0);
    close(fd);
    unlink(name);
    path = name;
  }
  ~TemporaryFile() { unlink(path.c_str()); }
  std::string path;
};

int failure_code(const std::string& uri) {
  try {
    Host h(uri);
  } catch (const Failure& f) {
    return f.error().code;
  }
  return 0;
}

}  // namespace

TEST_CASE("emulator: what is written is read back, for lists of one to three pages and every offset") {
  auto h = ready_host("64MiB?pump=caller&mdts=14");
  Dma out(h->c, 8 << 20), in(h->c, 8 << 20), lists(h->c, 5 * kPage);
  for (const std::uint32_t blocks : {1u, 2u, 3u, 512u, 513u, 514u, 1023u, 1024u, 1025u, 1536u, 1540u}) {
    for (const std::uint64_t offset : {std::uint64_t{0}, std::uint64_t{4}, std::uint64_t{512}, std::uint64_t{4092}}) {
      CAPTURE(blocks);
      CAPTURE(offset);
      const std::uint64_t bytes = blocks * kPage;
      pattern(out.data() + offset, bytes, blocks + offset);
      REQUIRE(h->run(1, h->transfer(Opcode::write, 1, 7, blocks, out, offset, bytes, &lists)).status == 0);
      in.pages.fill(0);
      REQUIRE(h->run(1, h->transfer(Opcode::read, 1, 7, blocks, in, offset, bytes, &lists)).status == 0);
      CHECK(std::memcmp(in.data() + offset, out.data() + offset, bytes) == 0);
      CHECK(in.data()[offset + bytes] == std::byte{0});
      if (offset != 0) CHECK(in.data()[offset - 1] == std::byte{0});
    }
  }
  CHECK(h->violation_count() == 0);
}

TEST_CASE("emulator: a list is not read beyond what the transfer needs") {
  auto h = ready_host("64MiB?pump=caller&mdts=14");
  Dma buffer(h->c, 4 << 20);
  // The list ends with its mapping: one entry more would be an access to nothing.
  Dma list(h->c, kPage);
  SubmissionEntry e = nvme::block_command(Opcode::read, 1, Lba(0), 4);
  e.prp1 = buffer.iova;
  e.prp2 = list.iova + kPage - 3 * 8;
  for (int i = 0; i < 3; ++i) list.as<std::uint64_t>()[509 + i] = buffer.iova + (i + 1) * kPage;
  CHECK(h->run(1, e).status == 0);
  // 512 entries fill a list's page exactly, and the last is no pointer.
  e = nvme::block_command(Opcode::read, 1, Lba(0), 513);
  e.prp1 = buffer.iova;
  e.prp2 = list.iova;
  for (int i = 0; i < 512; ++i) list.as<std::uint64_t>()[i] = buffer.iova + (i + 1) * kPage;
  CHECK(h->run(1, e).status == 0);
  CHECK(h->violation_count() == 0);
}

TEST_CASE("emulator: scattered pages are merged or not, and arrive in order") {
  auto h = ready_host("1MiB?pump=caller");
  Dma a(h->c, 2 * kPage), b(h->c, kPage), list(h->c, kPage), source(h->c, 4 * kPage);
  pattern(source.data(), 3 * kPage, 5);
  REQUIRE(h->run(1, h->transfer(Opcode::write, 1, 0, 3, source, 0, 3 * kPage, &list)).status == 0);
  SubmissionEntry e = nvme::block_command(Opcode::read, 1, Lba(0), 3);
  e.prp1 = b.iova;
  e.prp2 = list.iova;
  list.as<std::uint64_t>()[0] = a.iova + kPage;
  list.as<std::uint64_t>()[1] = a.iova;
  REQUIRE(h->run(1, e).status == 0);
  CHECK(std::memcmp(b.data(), source.data(), kPage) == 0);
  CHECK(std::memcmp(a.data() + kPage, source.data() + kPage, kPage) == 0);
  CHECK(std::memcmp(a.data(), source.data() + 2 * kPage, kPage) == 0);
}

TEST_CASE("emulator: block ranges are checked with 64 bits") {
  auto h = ready_host("1MiB?pump=caller");
  Dma buffer(h->c, 1 << 17), lists(h->c, kPage);
  CHECK(h->run(1, h->transfer(Opcode::read, 1, 255, 1, buffer, 0, kPage)).status == 0);
  CHECK(h->run(1, h->transfer(Opcode::read, 1, 256, 1, buffer, 0, kPage)).status == status::lba_out_of_range);
  CHECK(h->run(1, h->transfer(Opcode::read, 1, 255, 2, buffer, 0, 2 * kPage)).status == status::lba_out_of_range);
  for (const std::uint64_t lba : {~std::uint64_t{0}, std::uint64_t{1} << 32, std::uint64_t{1} << 63}) {
    CHECK(h->run(1, h->transfer(Opcode::read, 1, lba, 2, buffer, 0, 2 * kPage)).status == status::lba_out_of_range);
    CHECK(h->run(1, nvme::block_command(Opcode::write_zeroes, 1, Lba(lba), 65536)).status == status::lba_out_of_range);
  }
}

TEST_CASE("emulator: beyond 4 GiB and 2^32 blocks data stays where it belongs, at no cost in memory") {
  auto h = ready_host("4TiB?lba=512&pump=caller");
  Dma out(h->c, kPage), in(h->c, kPage);
  const std::uint64_t places[] = {0,
                                  (std::uint64_t{1} << 23) - 1,
                                  std::uint64_t{1} << 23,
                                  (std::uint64_t{1} << 32) - 1,
                                  std::uint64_t{1} << 32,
                                  (std::uint64_t{1} << 33) - 8};
  for (std::uint64_t i = 0; i < std::size(places); ++i) {
    pattern(out.data(), 512, i);
    REQUIRE(h->run(1, h->transfer(Opcode::write, 1, places[i], 1, out, 0, 512)).status == 0);
  }
  for (std::uint64_t i = 0; i < std::size(places); ++i) {
    pattern(out.data(), 512, i);
    REQUIRE(h->run(1, h->transfer(Opcode::read, 1, places[i], 1, in, 0, 512)).status == 0);
    CHECK(std::memcmp(in.data(), out.data(), 512) == 0);
  }
  CHECK(h->c.stored_bytes() <= std::uint64_t{16} << 20);
  // Deallocating all of it takes no time either.
  Dma ranges(h->c, kPage);
  for (std::uint64_t i = 0; i < 3; ++i) ranges.as<nvme::DsmRange>()[i] = {0, 0xffffffffu, i * 0xffffffffu};
  ranges.as<nvme::DsmRange>()[2].blocks = 2;
  const std::uint64_t begin = monotonic_ns();
  REQUIRE(h->run(1, nvme::dataset_management(1, 3, nvme::kDsmDeallocate, Iova(ranges.iova))).status == 0);
  CHECK(monotonic_ns() - begin < 2'000'000'000);
  REQUIRE(h->run(1, h->transfer(Opcode::read, 1, std::uint64_t{1} << 32, 1, in, 0, 512)).status == 0);
  CHECK(in.data()[7] == std::byte{0});
}

TEST_CASE("emulator: Write Zeroes and deallocation read as zeros, and their neighbours stay") {
  for (const char* uri : {"8MiB?pump=caller", "8MiB?pump=caller&vwc=0", "8MiB?pump=caller&lba=512"}) {
    auto h = ready_host(uri);
    Dma buffer(h->c, kPage), ranges(h->c, kPage);
    const std::uint32_t lba = h->c.options().lba;
    buffer.pages.fill(0x33);
    for (std::uint64_t block = 10; block < 20; ++block)
      REQUIRE(h->run(1, h->transfer(Opcode::write, 1, block, 1, buffer, 0, lba)).status == 0);
    CHECK(h->run(1, nvme::block_command(Opcode::write_zeroes, 1, Lba(11), 3, nvme::kDeallocate)).status == 0);
    ranges.as<nvme::DsmRange>()[0] = {0, 1, 15};
    ranges.as<nvme::DsmRange>()[1] = {0, 2, 17};
    CHECK(h->run(1, nvme::dataset_management(1, 2, nvme::kDsmDeallocate, Iova(ranges.iova))).status == 0);
    for (std::uint64_t block = 10; block < 20; ++block) {
      std::byte byte{};
      h->c.peek(1, block * lba + lba - 1, &byte, 1);
      const bool zero = (block >= 11 && block < 14) || block == 15 || block == 17 || block == 18;
      CHECK(byte == (zero ? std::byte{0} : std::byte{0x33}));
    }
    ranges.as<nvme::DsmRange>()[1] = {0, 1, h->c.options().size / lba};
    CHECK(h->run(1, nvme::dataset_management(1, 2, nvme::kDsmDeallocate, Iova(ranges.iova))).status ==
          status::lba_out_of_range);
  }
  auto without = ready_host("1MiB?pump=caller&zeroes=0&dsm=0");
  CHECK(without->run(1, nvme::block_command(Opcode::write_zeroes, 1, Lba(0), 1)).status == status::invalid_opcode);
  CHECK(without->run(1, nvme::dataset_management(1, 1, 4, Iova(0))).status == status::invalid_opcode);
}

TEST_CASE("emulator: whole extents are given back when they are deallocated and nothing keeps their image") {
  auto h = ready_host("64MiB?pump=caller&vwc=0&mdts=12");
  Dma buffer(h->c, 8 << 20), lists(h->c, 8 * kPage), ranges(h->c, kPage);
  REQUIRE(h->run(1, h->transfer(Opcode::write, 1, 0, 2048, buffer, 0, 8 << 20, &lists)).status == 0);
  CHECK(h->c.stored_bytes() == 8 << 20);
  ranges.as<nvme::DsmRange>()[0] = {0, 1536, 0};
  REQUIRE(h->run(1, nvme::dataset_management(1, 1, nvme::kDsmDeallocate, Iova(ranges.iova))).status == 0);
  CHECK(h->c.stored_bytes() == 2 << 20);
}

TEST_CASE("emulator: separate metadata goes by MPTR, interleaved metadata with the blocks") {
  {
    auto h = ready_host("1MiB?lba=512&metadata=8&pump=caller");
    Dma data(h->c, kPage), metadata(h->c, kPage);
    pattern(data.data(), 4 * 512, 1);
    pattern(metadata.data() + 16, 32, 2);
    SubmissionEntry e = h->transfer(Opcode::write, 1, 5, 4, data, 0, 4 * 512);
    e.metadata = metadata.iova + 16;
    REQUIRE(h->run(1, e).status == 0);
    Dma in(h->c, kPage), in_metadata(h->c, kPage);
    e = h->transfer(Opcode::read, 1, 6, 2, in, 0, 2 * 512);
    e.metadata = in_metadata.iova;
    REQUIRE(h->run(1, e).status == 0);
    CHECK(std::memcmp(in.data(), data.data() + 512, 1024) == 0);
    CHECK(std::memcmp(in_metadata.data(), metadata.data() + 24, 16) == 0);
    h->c.power_cut(0.0, 1);
    std::byte after[8];
    h->c.peek(1, (1 << 20) + 5 * 8, after, 8);
    CHECK(after[0] == std::byte{0});
  }
  auto h = ready_host("1MiB?lba=512&metadata=8&interleaved=1&pump=caller");
  Dma data(h->c, kPage), in(h->c, kPage);
  pattern(data.data(), 4 * 520, 3);
  REQUIRE(h->run(1, h->transfer(Opcode::write, 1, 5, 4, data, 0, 4 * 520)).status == 0);
  REQUIRE(h->run(1, h->transfer(Opcode::read, 1, 6, 2, in, 4, 2 * 520)).status == 0);
  CHECK(std::memcmp(in.data() + 4, data.data() + 520, 1040) == 0);
  CHECK(h->violation_count() == 0);
}

TEST_CASE("emulator: namespaces do not overlap") {
  auto h = ready_host("1MiB?namespaces=3&pump=caller");
  Dma buffer(h->c, kPage);
  for (std::uint32_t nsid = 1; nsid <= 3; ++nsid) {
    buffer.pages.fill(static_cast<int>(nsid));
    REQUIRE(h->run(1, h->transfer(Opcode::write, nsid, 255, 1, buffer, 0, kPage)).status == 0);
    REQUIRE(h->run(1, h->transfer(Opcode::write, nsid, 0, 1, buffer, 0, kPage)).status == 0);
  }
  for (std::uint32_t nsid = 1; nsid <= 3; ++nsid) {
    for (const std::uint64_t block : {0u, 255u}) {
      REQUIRE(h->run(1, h->transfer(Opcode::read, nsid, block, 1, buffer, 0, kPage)).status == 0);
      CHECK(buffer.data()[100] == std::byte(nsid));
    }
  }
  std::byte byte{};
  CHECK_THROWS_AS(h->c.peek(4, 0, &byte, 1), Failure);
  CHECK_THROWS_AS(h->c.peek(1, 1 << 20, &byte, 1), Failure);
  CHECK_THROWS_AS(h->c.peek(1, ~std::uint64_t{0}, &byte, 2), Failure);
}

TEST_CASE("emulator: a file keeps the data, is locked, and holds namespaces one after another") {
  TemporaryFile file;
  CHECK(failure_code(file.path) == EINVAL);
  const std::string with_size = file.path + "?size=1MiB&namespaces=2&pump=caller";
  {
    auto h = ready_host(with_size);
    Dma buffer(h->c, kPage);
    buffer.pages.fill(0x42);
    REQUIRE(h->run(1, h->transfer(Opcode::write, 2, 1, 1, buffer, 0, kPage)).status == 0);
    REQUIRE(h->run(1, nvme::flush(1)).status == 0);
    CHECK(failure_code(with_size) == EBUSY);
    CHECK(h->c.stored_bytes() <= 65536);
  }
  struct stat s;
  REQUIRE(stat(file.path.c_str(), &s) == 0);
  CHECK(s.st_size == 2 << 20);
  {
    Host h(file.path + "?namespaces=2&pump=caller");
    std::byte byte{};
    h.c.peek(2, kPage, &byte, 1);
    CHECK(byte == std::byte{0x42});
    CHECK(h.c.counters().commands == 0);
  }
  CHECK(failure_code(file.path + "?namespaces=3") == EINVAL);
  CHECK(failure_code(file.path + "?namespaces=2&size=2MiB") == EINVAL);
  CHECK(failure_code("/tmp") == EISDIR);
  CHECK(failure_code("/nonexistent/image?size=1MiB") == ENOENT);
}

TEST_CASE("emulator: an opening that fails leaves no file behind, and one that exists alone") {
  TemporaryFile file;
  const std::string uri = file.path + "?size=1MiB&pump=caller";
  testing::record_steps();
  { Host h(uri); }
  const auto steps = testing::recorded_steps();
  CHECK(access(file.path.c_str(), F_OK) == 0);
  for (const bool exists : {true, false}) {
    for (std::size_t i = 0; i < steps.size(); ++i) {
      CAPTURE(steps[i]);
      if (!exists) unlink(file.path.c_str());
      testing::arm_step(i);
      CHECK_THROWS_AS(Host{uri}, Failure);
      CHECK(testing::disarm_steps());
      CHECK((access(file.path.c_str(), F_OK) == 0) == exists);
      // Nothing holds the lock of the file either.
      Host again(uri);
    }
  }
}

TEST_CASE("emulator: what is locked is the file of that name, and only its owner removes it") {
  TemporaryFile file;
  std::atomic<bool> stop{false};
  std::atomic<int> lost{0};
  // Another process whose opening fails: it makes the file, locks it, and removes it.
  std::thread other([&] {
    while (!stop) {
      const int fd = open(file.path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
      if (flock(fd, LOCK_EX | LOCK_NB) == 0 && unlink(file.path.c_str()) != 0) ++lost;
      close(fd);
    }
  });
  int opened = 0, nameless = 0;
  for (int i = 0; i < 20000 && opened < 2000; ++i) {
    try {
      Host h(file.path + "?size=1MiB&pump=caller");
      ++opened;
      nameless += access(file.path.c_str(), F_OK) != 0;
    } catch (const Failure& failure) {
      CHECK(failure.error().code == EBUSY);
    }
  }
  stop = true;
  other.join();
  CHECK(opened > 0);
  CHECK(nameless == 0);
  CHECK(lost == 0);
}

TEST_CASE("emulator: a disk that is full is an NVMe status, and what was there stays") {
  TemporaryFile file;
  auto h = ready_host(file.path + "?size=1MiB&pump=caller");
  Dma buffer(h->c, kPage);
  buffer.pages.fill(0x42);
  REQUIRE(h->run(1, h->transfer(Opcode::write, 1, 0, 1, buffer, 0, kPage)).status == 0);
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{65536, before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
  const auto failed = h->run(1, h->transfer(Opcode::write, 1, 100, 1, buffer, 0, kPage)).status;
  REQUIRE(setrlimit(RLIMIT_FSIZE, &before) == 0);
  std::signal(SIGXFSZ, handler);
  CHECK(failed == status::capacity_exceeded);
  buffer.pages.fill(0);
  CHECK(h->run(1, h->transfer(Opcode::read, 1, 0, 1, buffer, 0, kPage)).status == 0);
  CHECK(buffer.data()[0] == std::byte{0x42});
  REQUIRE(truncate(file.path.c_str(), 4096) == 0);
  CHECK(h->run(1, h->transfer(Opcode::read, 1, 100, 1, buffer, 0, kPage)).status == status::unrecovered_read_error);
}

TEST_CASE("emulator: controllers of one name share their blocks until the name is forgotten") {
  const std::string uri = "1MiB?name=shared-blocks&pump=caller";
  {
    auto a = ready_host(uri);
    auto b = ready_host(uri);
    Dma out(a->c, kPage), in(b->c, kPage);
    out.pages.fill(0x24);
    REQUIRE(a->run(1, a->transfer(Opcode::write, 1, 9, 1, out, 0, kPage)).status == 0);
    REQUIRE(b->run(1, b->transfer(Opcode::read, 1, 9, 1, in, 0, kPage)).status == 0);
    CHECK(in.data()[0] == std::byte{0x24});
    CHECK_FALSE(emulator::forget_subsystem("shared-blocks"));
    try {
      Host other("1MiB?name=shared-blocks&lba=512");
      FAIL("another block size was accepted");
    } catch (const Failure& f) {
      CHECK(f.error().code == EINVAL);
      CHECK(cause_of(f).find("lba=512") != std::string::npos);
    }
    CHECK(failure_code("2MiB?name=shared-blocks") == EINVAL);
    CHECK(failure_code("1MiB?name=shared-blocks&vwc=0") == EINVAL);
    CHECK(failure_code("1MiB?name=shared-blocks&namespaces=2") == EINVAL);
  }
  Host again(uri);
  std::byte byte{};
  again.c.peek(1, 9 * kPage, &byte, 1);
  CHECK(byte == std::byte{0x24});
  CHECK_FALSE(emulator::forget_subsystem("nobody"));
}

TEST_CASE("emulator: threads on controllers of one name do not race") {
  const std::string uri = "4MiB?name=raced";
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int t = 0; t < 2; ++t)
    threads.emplace_back([&, t] {
      Host h(uri);
      h.bring_up();
      if (h.create_queue(1, 8) != 0) ++failures;
      Dma buffer(h.c, kPage);
      for (std::uint64_t i = 0; i < 300; ++i) {
        const Opcode opcode = i % 3 == 0 ? Opcode::write : Opcode::read;
        if (h.run(1, h.transfer(opcode, 1, (i * 7 + static_cast<std::uint64_t>(t)) % 64, 1, buffer, 0, kPage)).status)
          ++failures;
        if (i % 50 == 0 && h.run(1, nvme::flush(1)).status != 0) ++failures;
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(failures == 0);
  CHECK(emulator::forget_subsystem("raced"));
}
