// SPDX-License-Identifier: Apache-2.0
//
// Threads that share a command's copies: nothing but the time it takes is to differ.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>

#include "emulator_host.hpp"
#include "foreign_memory.hpp"

using namespace emulator_test;

namespace {

constexpr std::uint64_t kPage = 4096;

/// Threads of this process by the name of those that copy.
int copiers_alive() {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream comm(task.path() / "comm");
    std::string name;
    std::getline(comm, name);
    count += name == "ugds-copier";
  }
  return count;
}

/// Waits for threads that have been started and have not named themselves yet.
bool wait_for_copiers(int count) {
  for (int i = 0; i < 2000 && copiers_alive() != count; ++i) usleep(1000);
  return copiers_alive() == count;
}

/// The same requests for every number of copiers, and what came of each.
struct Script {
#if defined(__SANITIZE_THREAD__)  // which looks at every byte that is copied
  static constexpr int kSteps = 8;
#else
  static constexpr int kSteps = 24;
#endif
  std::uint64_t seed;
  std::uint64_t most_blocks = 1024;

  std::vector<std::byte> run(const std::string& uri, bool foreign) const {
    auto h = ready_host(uri);
    std::mt19937_64 random(seed);
    const std::uint64_t bytes = (most_blocks + 1) * kPage;
    Dma ordinary(h->c, bytes), lists(h->c, 65536);
    ForeignMemory gpu(bytes);
    const std::uint64_t iova = foreign ? h->c.map(gpu.range(), true) : ordinary.iova;
    std::byte* const data = foreign ? gpu.own() : ordinary.data();
    std::vector<std::uint64_t> pages;
    for (std::uint64_t at = 0; at < bytes; at += kPage) pages.push_back(iova + at);
    std::vector<std::byte> seen;
    for (int i = 0; i < kSteps; ++i) {
      if (i % 4 == 3) std::shuffle(pages.begin(), pages.end(), random);
      if (i % 8 == 7) std::sort(pages.begin(), pages.end());
      const std::uint64_t blocks = 1 + random() % most_blocks, lba = random() % 512, offset = random() % 8 * 512;
      const auto opcode = i % 2 == 0 ? nvme::Opcode::write : nvme::Opcode::read;
      if (i % 2 == 0) pattern(data, bytes, random());
      SubmissionEntry e = nvme::block_command(opcode, 1, Lba(lba), static_cast<std::uint32_t>(blocks), 0);
      nvme::build_prps(e, {pages.data(), offset}, blocks * kPage, kPage, [&](std::uint32_t page) {
        return nvme::ListPage{reinterpret_cast<std::uint64_t*>(lists.data() + page * kPage), lists.iova + page * kPage};
      });
      CHECK(h->run(1, e).status == 0);
      if (i % 2 != 0) seen.insert(seen.end(), data, data + bytes);
    }
    CHECK(h->violation_count() == 0);
    CHECK(h->c.counters().reads == kSteps / 2);
    return seen;
  }
};

}  // namespace

TEST_CASE("copiers: the bytes are the same for any number of them, of any size and order of pages") {
  for (const bool foreign : {false, true}) {
    CAPTURE(foreign);
    const Script script{foreign ? 11u : 12u};
    const auto expected = script.run("16MiB?mdts=10", foreign);
    for (const char* copiers : {"1", "3"}) {
      CHECK(script.run(std::string("16MiB?mdts=10&copiers=") + copiers, foreign) == expected);
      CHECK(script.run(std::string("16MiB?mdts=10&pump=caller&copiers=") + copiers, foreign) == expected);
    }
  }
}

TEST_CASE("copiers: blocks with metadata are moved whole, wherever it lies") {
  for (const char* kind : {"", "&interleaved=1"}) {
    auto h = ready_host("16MiB?mdts=10&metadata=8&copiers=3" + std::string(kind));
    const bool interleaved = *kind != '\0';
    const std::uint64_t blocks = 300, bytes = blocks * (interleaved ? kPage + 8 : kPage);
    Dma buffer(h->c, 320 * kPage), lists(h->c, 65536), metadata(h->c, kPage);
    pattern(buffer.data(), bytes, 4);
    pattern(metadata.data(), kPage, 5);
    const std::vector<std::byte> was(buffer.data(), buffer.data() + bytes);
    const std::vector<std::byte> meta(metadata.data(), metadata.data() + blocks * 8);
    auto run = [&](nvme::Opcode opcode) {
      SubmissionEntry e = h->transfer(opcode, 1, 0, blocks, buffer, 0, bytes, &lists);
      e.metadata = interleaved ? 0 : metadata.iova;
      return h->run(1, e).status;
    };
    CHECK(run(nvme::Opcode::write) == 0);
    buffer.pages.fill(0);
    metadata.pages.fill(0);
    CHECK(run(nvme::Opcode::read) == 0);
    CHECK(std::memcmp(buffer.data(), was.data(), bytes) == 0);
    if (!interleaved) CHECK(std::memcmp(metadata.data(), meta.data(), meta.size()) == 0);
    CHECK(h->violation_count() == 0);
  }
}

TEST_CASE("copiers: no command passes a part of another that is still being copied") {
  // Each read follows a write of the same blocks, and sees all of it.
  auto h = ready_host("16MiB?mdts=10&copiers=3");
  Dma buffer(h->c, 2 << 20), lists(h->c, 131072);
  const std::uint64_t half = 1 << 20;
  auto part = [&](nvme::Opcode opcode, std::uint64_t at, std::uint64_t list) {
    SubmissionEntry e = nvme::block_command(opcode, 1, Lba(0), 256, 0);
    std::vector<std::uint64_t> pages;
    for (std::uint64_t i = 0; i < half; i += kPage) pages.push_back(buffer.iova + at + i);
    nvme::build_prps(e, {pages.data(), 0}, half, kPage, [&](std::uint32_t i) {
      const std::uint64_t where = list + i * kPage;
      return nvme::ListPage{reinterpret_cast<std::uint64_t*>(lists.data() + where), lists.iova + where};
    });
    return e;
  };
  for (std::uint64_t i = 0; i < 100; ++i) {
    pattern(buffer.data(), half, i);
    std::memset(buffer.data() + half, 0, half);
    h->place(1, part(nvme::Opcode::write, 0, 0), 1);
    h->place(1, part(nvme::Opcode::read, half, 65536), 2);
    h->ring(1);
    CHECK(h->wait(1).status == 0);
    CHECK(h->wait(1).status == 0);
    CHECK(std::memcmp(buffer.data(), buffer.data() + half, half) == 0);
  }
  CHECK(h->violation_count() == 0);
}

TEST_CASE("copiers: faults are as they are without") {
  auto h = ready_host("16MiB?mdts=10&copiers=3&pump=caller");
  Dma buffer(h->c, 1 << 20), lists(h->c, 65536);
  std::vector<std::byte> data(buffer.pages.size());
  pattern(data.data(), data.size(), 3);
  h->c.poke(1, 0, data.data(), data.size());
  const SubmissionEntry read = h->transfer(nvme::Opcode::read, 1, 0, 256, buffer, 0, 1 << 20, &lists);
  Fault fault;
  auto different = [&] {
    std::uint64_t count = 0;
    for (std::uint64_t i = 0; i < data.size(); ++i) count += buffer.data()[i] != data[i];
    return count;
  };
  fault.kind = Fault::Kind::corrupt;
  h->c.inject(fault);
  CHECK(h->run(1, read).status == 0);
  CHECK(different() == 1);
  fault.kind = Fault::Kind::status;
  fault.status = nvme::status::unrecovered_read_error;
  buffer.pages.fill(0);
  h->c.inject(fault);
  CHECK(h->run(1, read).status == nvme::status::unrecovered_read_error);
  CHECK(std::all_of(buffer.data(), buffer.data() + data.size(), [](std::byte b) { return b == std::byte{0}; }));
  CHECK(h->run(1, read).status == 0);
  CHECK(different() == 0);
  CHECK(h->violation_count() == 0);
}

TEST_CASE("copiers: one that fails ends its command, and others go on") {
  auto h = ready_host("16MiB?mdts=10&copiers=3");
  ForeignMemory gpu(3 << 20);
  Dma lists(h->c, 65536);
  const std::uint64_t iova = h->c.map(gpu.range(), true);
  std::vector<std::uint64_t> pages;
  for (std::uint64_t at = 0; at < gpu.size(); at += kPage) pages.push_back(iova + at);
  for (const auto opcode : {nvme::Opcode::read, nvme::Opcode::write}) {
    SubmissionEntry e = nvme::block_command(opcode, 1, Lba(0), 768, 0);
    nvme::build_prps(e, {pages.data(), 0}, gpu.size(), kPage, [&](std::uint32_t i) {
      return nvme::ListPage{reinterpret_cast<std::uint64_t*>(lists.data() + i * kPage), lists.iova + i * kPage};
    });
    for (const int after : {0, 1, 5}) {
      gpu.fail_after(after, EIO);
      CHECK(h->run(1, e).status == nvme::status::data_transfer_error);
      gpu.fail_after(-1, 0);
      CHECK(h->run(1, e).status == 0);
    }
  }
  CHECK(gpu.largest() <= 1 << 20);
  CHECK(h->c.counters().reads == 3);
  CHECK(h->c.counters().writes == 3);
  CHECK(h->violation_count() == 0);
}

TEST_CASE("copiers: a power cut brings back the same blocks as without") {
  auto after_cut = [](const char* copiers) {
    auto h = ready_host(std::string("16MiB?mdts=10&vwc=1&copiers=") + copiers);
    Dma buffer(h->c, 4 << 20), lists(h->c, 65536);
    const SubmissionEntry write = h->transfer(nvme::Opcode::write, 1, 7, 1024, buffer, 0, 4 << 20, &lists);
    pattern(buffer.data(), buffer.pages.size(), 1);
    CHECK(h->run(1, write).status == 0);
    CHECK(h->run(1, nvme::flush(1)).status == 0);
    pattern(buffer.data(), buffer.pages.size(), 2);
    CHECK(h->run(1, write).status == 0);
    h->c.power_cut(0.5, 42);
    std::vector<std::byte> kept(6 << 20);
    h->c.peek(1, 0, kept.data(), kept.size());
    return kept;
  };
  CHECK(after_cut("0") == after_cut("3"));
}

TEST_CASE("copiers: a medium that fails ends the command with its status, and others go on") {
  const std::string path = "/tmp/ugds-copiers-" + std::to_string(getpid());
  {
    auto h = ready_host(path + "?size=16MiB&mdts=10&copiers=3");
    Dma buffer(h->c, 2 << 20), lists(h->c, 65536);
    CHECK(truncate(path.c_str(), 1 << 20) == 0);  // somebody cuts the file
    const SubmissionEntry read = h->transfer(nvme::Opcode::read, 1, 0, 512, buffer, 0, 2 << 20, &lists);
    CHECK(h->run(1, read).status == nvme::status::unrecovered_read_error);
    CHECK(h->c.counters().reads == 0);
    CHECK(truncate(path.c_str(), 16 << 20) == 0);
    CHECK(h->run(1, read).status == 0);
  }
  unlink(path.c_str());
}

TEST_CASE("copiers: closing the controller ends its threads, whether they work, wait or sleep") {
  CHECK(wait_for_copiers(0));
  for (const char* pump : {"", "&pump=caller"}) {
    for (const int rest_us : {0, 100, 20000}) {
      auto h = ready_host("16MiB?mdts=10&copiers=5" + std::string(pump));
      Dma buffer(h->c, 1 << 20), lists(h->c, 65536);
      CHECK(h->run(1, h->transfer(nvme::Opcode::read, 1, 0, 256, buffer, 0, 1 << 20, &lists)).status == 0);
      CHECK(wait_for_copiers(5));
      usleep(static_cast<useconds_t>(rest_us));
    }
    CHECK(wait_for_copiers(0));
  }
  CHECK_THROWS_AS(Host("/nowhere/image?copiers=5"), Failure);
  CHECK(wait_for_copiers(0));
}

TEST_CASE("copiers: a child of a fork has none, and can close what it has inherited") {
  auto h = ready_host("16MiB?mdts=10&copiers=3");
  auto inherited = std::make_unique<Controller>(parse("1MiB?pump=caller&copiers=2"));
  CHECK(wait_for_copiers(5));
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    alarm(10);
    const int alive = copiers_alive();
    inherited.reset();             // does not wait for threads that are not here
#if !defined(__SANITIZE_THREAD__)  // which refuses to start threads in such a child
    Host own("1MiB?copiers=2");
    if (!wait_for_copiers(2)) _exit(10);
#endif
    _exit(alive);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(wait_for_copiers(5));
  Dma buffer(h->c, 1 << 20), lists(h->c, 65536);
  CHECK(h->run(1, h->transfer(nvme::Opcode::read, 1, 0, 256, buffer, 0, 1 << 20, &lists)).status == 0);
}

TEST_CASE("copiers: options that cannot be are refused in words") {
  auto refused = [](const std::string& uri) {
    try {
      Host h(uri);
    } catch (const Failure& f) {
      return cause_of(f);
    }
    return std::string();
  };
  CHECK(refused("1MiB?copiers=65").find("copiers") != std::string::npos);
  CHECK(refused("1MiB?copiers=1&clock=virtual").find("clock=virtual") != std::string::npos);
  CHECK(refused("1MiB?copiers=64").empty());
  CHECK(refused("1MiB?copiers=0&clock=virtual").empty());
}
