// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cerrno>
#include <thread>

#include "base/steps.hpp"
#include "engine_host.hpp"

using namespace engine_test;

TEST_CASE("requests of every size and shape of device come back as they were written") {
  const char* shapes[] = {"",
                          "mdts=0",
                          "mdts=1",
                          "lba=512&mdts=1",
                          "queues=1&depth=2",
                          "depth=3",
                          "mpsmin=1&mpsmax=2",
                          "stride=4",
                          "shadow=0",
                          "doorbells=trapped",
                          "enabled=1",
                          "order=random",
                          "pump=caller",
                          "pump=caller&order=reverse&queues=1"};
  for (const std::string shape : shapes) {
    CAPTURE(shape);
    Open open("emulated:16MiB?" + shape);
    Buffer out(3 << 20), in(3 << 20, 4);
    out.fill(1);
    const std::uint64_t block = open.handle.identity().block_size;
    for (const std::uint64_t size :
         {block, 2 * block, 4096ul * 3, 128ul << 10, (128ul << 10) + 4096, 1ul << 20, 3ul << 20}) {
      const std::uint64_t offset = block * 3;
      REQUIRE(write(open.handle, out, offset, size) == static_cast<std::int64_t>(size));
      std::memset(in.data(), 0xee, in.size());
      REQUIRE(read(open.handle, in, offset, size) == static_cast<std::int64_t>(size));
      REQUIRE(std::memcmp(in.data(), out.data(), size) == 0);
      if (size < in.size()) REQUIRE(in.data()[size] == std::byte{0xee});
    }
  }
}

TEST_CASE("a large request is cut at MDTS exactly, and is rung once while the ring has room") {
  Open open("emulated:16MiB?mdts=5&pump=caller", {.queues = 1});
  Buffer in(1 << 20, 2048);
  const auto before = open.controller().counters();
  REQUIRE(read(open.handle, in, 0, 1 << 20) == 1 << 20);
  const auto after = open.controller().counters();
  CHECK(after.reads - before.reads == 8);
  CHECK(after.doorbells - before.doorbells == 1);
}

TEST_CASE("what the device fails in the middle is counted as far as it is right") {
  Open open("emulated:16MiB?mdts=5&order=random");
  Buffer in(1 << 20);
  emulator::Fault fault;
  fault.status = nvme::status::unrecovered_read_error;
  fault.lba = (512 << 10) / 4096;
  fault.blocks = 1;
  fault.opcode = 2;
  open.controller().inject(fault);
  CHECK(read(open.handle, in, 0, 1 << 20) == -EIO);
  CHECK(last_error().completed == 512 << 10);
  CHECK(last_error().status == nvme::status::unrecovered_read_error);
  CHECK(last_error().message().find("unrecovered read error") != std::string::npos);
  CHECK(read(open.handle, in, 0, 1 << 20) == 1 << 20);
}

TEST_CASE("unaligned reads and writes equal those of plain memory") {
  Open open("emulated:4MiB?lba=512");
  Buffer buffer(512 << 10);
  std::vector<std::byte> model(4 << 20);
  std::mt19937 random(5);
#if defined(__SANITIZE_THREAD__)
  constexpr int kRounds = 100;
#else
  constexpr int kRounds = 400;
#endif
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t size = 1 + random() % (round % 8 == 0 ? 400'000 : 3000);
    const std::uint64_t offset = random() % (model.size() - size), at = random() % (buffer.size() - size);
    buffer.fill(static_cast<unsigned>(round));
    if (round % 2 == 0) {
      REQUIRE(engine::run_any(open.handle, {Opcode::write, buffer.reference(), offset, size, at}, true) ==
              static_cast<std::int64_t>(size));
      std::memcpy(model.data() + offset, buffer.data() + at, size);
    } else {
      std::vector<std::byte> expected(buffer.data(), buffer.data() + buffer.size());
      std::memcpy(expected.data() + at, model.data() + offset, size);
      REQUIRE(engine::run_any(open.handle, {Opcode::read, buffer.reference(), offset, size, at}, false) ==
              static_cast<std::int64_t>(size));
      REQUIRE(std::memcmp(expected.data(), buffer.data(), buffer.size()) == 0);
    }
  }
  CHECK(engine::run_any(open.handle, {Opcode::write, buffer.reference(), 1, 512, 0}, false) == -EINVAL);
  CHECK(engine::run_any(open.handle, {Opcode::read, buffer.reference(), (4 << 20) - 5, 6, 0}, false) == -ERANGE);
}

TEST_CASE("discarded blocks read as zeros, and discards larger than one range are cut") {
  Open open("emulated:4TiB?lba=512");
  Buffer buffer(8192);
  buffer.fill(2);
  REQUIRE(write(open.handle, buffer, 3ul << 40, 8192) == 8192);
  REQUIRE(engine::discard(open.handle, 0, 4ul << 40) == static_cast<std::int64_t>(4ul << 40));
  REQUIRE(read(open.handle, buffer, 3ul << 40, 8192) == 8192);
  for (std::size_t i = 0; i < 8192; ++i) REQUIRE(buffer.data()[i] == std::byte{0});
  Open without("emulated:1MiB?dsm=0");
  CHECK(engine::discard(without.handle, 0, 4096) == -EOPNOTSUPP);
}

TEST_CASE("many threads share one queue pair, large requests and small ones") {
  for (const char* shape : {"queues=1&depth=4", "queues=1&order=random", "queues=2&mdts=1"}) {
    CAPTURE(shape);
    Open open(std::string("emulated:64MiB?") + shape);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 6; ++t) {
      threads.emplace_back([&, t] {
        Buffer buffer(256 << 10);
        std::vector<std::byte> model(256 << 10);
        std::mt19937 random(t);
        const std::uint64_t base = std::uint64_t{t} * (256 << 10);
        for (int round = 0; round < 150; ++round) {
          const std::uint64_t size = t == 0 ? 256 << 10 : 4096 * (1 + random() % 3);
          const std::uint64_t at = (random() % ((256u << 10) / 4096 - size / 4096 + 1)) * 4096;
          if (round % 2 == 0) {
            buffer.fill(static_cast<unsigned>(random()));
            if (write(open.handle, buffer, base + at, size, at) != static_cast<std::int64_t>(size)) ++wrong;
            std::memcpy(model.data() + at, buffer.data() + at, size);
          } else {
            if (read(open.handle, buffer, base + at, size, at) != static_cast<std::int64_t>(size)) ++wrong;
            if (std::memcmp(buffer.data() + at, model.data() + at, size) != 0) ++wrong;
          }
        }
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK(wrong.load() == 0);
    CHECK(open.handle.in_flight() == 0);
  }
}

TEST_CASE("every step of opening undoes the others when it fails") {
  const std::string uri = "emulated:1MiB?queues=2";
  { Open once(uri); }  // what is made once for the process
  testing::record_steps();
  { Open counted(uri); }
  const auto steps = testing::recorded_steps();
  CHECK(steps.size() >= 20);
  const auto registered = memory::Registry::instance().open_registrations();
  for (std::size_t step = 0; step < steps.size(); ++step) {
    CAPTURE(steps[step]);
    testing::arm_step(step);
    bool failed = false;
    try {
      Handle handle(uri, {});
    } catch (const Failure& failure) {
      failed = true;
      CHECK(failure.error().code == ENOMEM);
    }
    CHECK(testing::disarm_steps());
    CHECK(failed);
    CHECK(memory::Registry::instance().open_registrations() == registered);
  }
  Open after(uri);
  Buffer buffer(4096);
  CHECK(read(after.handle, buffer, 0, 4096) == 4096);
}

TEST_CASE("formats and namespaces that cannot be used are refused by name") {
  const auto why = [](const char* uri, const Policy& policy) {
    try {
      Handle handle(uri, policy);
      return std::string("opened");
    } catch (const Failure& failure) {
      return failure.error().message();
    }
  };
  CHECK(why("emulated:1MiB?lba=512&metadata=8", {}).find("512+8") != std::string::npos);
  CHECK(why("emulated:1MiB?lba=512&metadata=8&interleaved=1", {}).find("extended LBA") != std::string::npos);
  CHECK(why("emulated:1MiB?namespaces=2", {.namespace_id = 3}).find("namespace 3") != std::string::npos);
  CHECK(why("emulated:1MiB?namespaces=2", {.namespace_id = 2}) == "opened");
  CHECK(why("emulated:1MiB", {.depth = 1}).find("depth of 1") != std::string::npos);
}
