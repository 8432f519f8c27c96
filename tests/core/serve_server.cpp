// SPDX-License-Identifier: Apache-2.0
//
// The server under the sanitizers; what clients find in detail is tested from Python by another make of client.
#include <poll.h>

#include <random>

#include "serve_client.hpp"

using namespace serve_test;

namespace {

int serve_error(const std::string& uri, const std::string& path) {
  try {
    const Server server(uri, path);
  } catch (const Failure& f) {
    return f.error().code;
  }
  return 0;
}

void still_serves(const Server& server) {
  Drive drive(server.path());
  CHECK(drive.run(1, Drive::transfer(nvme::Opcode::read, 0)) == 0);
}

}  // namespace

TEST_CASE("serve: a client writes and reads blocks, with interrupts, and the next finds them") {
  const Folder folder;
  Server server("emulated:1MiB", folder.at("s"));
  for (int round = 0; round < 3; ++round) {
    Drive drive(server.path());
    const Descriptor event(eventfd(0, EFD_CLOEXEC));
    REQUIRE(drive.client.set_irq(1, event.get()) == 0);
    drive.client.write(kRegionConfig, 0x92, 0x8000, 2);
    if (round != 0) {
      REQUIRE(drive.run(1, Drive::transfer(nvme::Opcode::read, 7)) == 0);
      CHECK(drive.memory.at[Drive::kData] == std::byte(round - 1));
    }
    for (int i = 0; i < 50; ++i) {
      drive.memory.at[Drive::kData] = std::byte(round);
      drive.submit(1, Drive::transfer(nvme::Opcode::write, 7));
      int status = -1;
      while (status < 0) {  // the read's interrupt may come late
        pollfd look{event.get(), POLLIN, 0};
        std::uint64_t count;
        REQUIRE(poll(&look, 1, 20'000) == 1);
        REQUIRE(read(event.get(), &count, sizeof count) == sizeof count);
        status = drive.poll(1);
      }
      CHECK(status == 0);
    }
  }
  await_idle(server);
  CHECK(server.clients() == 3);
  CHECK(server.controller().violations().empty());
  CHECK(server.controller().counters().mapped_ranges == 0);
}

TEST_CASE("serve: a client may go while commands are under way, and leaves nothing") {
  const Folder folder;
  Server server("emulated:1MiB?latency=300us", folder.at("s"));
  Client(server.path()).negotiate();
  await_idle(server);
  const std::size_t before = open_files();
  std::mt19937 random(1);
  for (int round = 0; round < 30; ++round) {
    Drive drive(server.path());
    for (int i = 0; i < 10; ++i)
      drive.submit(1, Drive::transfer(i % 2 == 0 ? nvme::Opcode::read : nvme::Opcode::write, 3));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 600));
  }
  await_idle(server);
  CHECK(open_files() == before);
  CHECK(server.controller().violations().empty());
  still_serves(server);
}

TEST_CASE("serve: memory that a client cuts is replaced, and the client disconnected") {
  const Folder folder;
  Server server("emulated:1MiB", folder.at("s"));
  for (int round = 0; round < 3; ++round) {
    Drive drive(server.path());
    const Shared data(8 * kPage, 0);  // which cannot be sealed
    REQUIRE(drive.client.map(data, 0x10000) == 0);
    REQUIRE(drive.run(1, Drive::transfer(nvme::Opcode::read, 0, 0x10000)) == 0);
    REQUIRE(ftruncate(data.file.get(), 0) == 0);
    drive.submit(1, Drive::transfer(nvme::Opcode::read, 0, 0x14000));
    CHECK(drive.client.receive() == -1);
  }
  await_idle(server);
  const std::vector<serve::Event> events = server.take_events();
  CHECK(events.back().reason.find("cut") != std::string::npos);
  still_serves(server);
}

TEST_CASE("serve: memory that can be sealed is, and then cannot be cut") {
  const Folder folder;
  Server server("emulated:1MiB", folder.at("s"));
  Client client(server.path());
  REQUIRE(client.negotiate() == 0);
  const Shared data(8 * kPage);
  REQUIRE(client.map(data, 0x10000) == 0);
  CHECK(ftruncate(data.file.get(), 0) == -1);
  CHECK((fcntl(data.file.get(), F_GET_SEALS) & F_SEAL_SHRINK) != 0);
}

TEST_CASE("serve: random messages do no harm") {
  const Folder folder;
  Server server("emulated:1MiB", folder.at("s"));
  Client(server.path()).negotiate();
  await_idle(server);
  const std::size_t before = open_files();
  {
    const Shared data(8 * kPage);
    const Descriptor event(eventfd(0, EFD_CLOEXEC));
    std::mt19937_64 random(7);
    const auto pick = [&](std::initializer_list<std::uint64_t> from) {
      return *(from.begin() + random() % from.size());
    };
    for (int round = 0; round < 300; ++round) {
      Client client(server.path());
      if (round % 10 != 0 && client.negotiate() != 0) continue;
      for (int i = 0; i < 30; ++i) {
        std::uint32_t words[16];
        words[0] = static_cast<std::uint32_t>(random() % 20 << 16 | (random() & 0xffff));
        words[1] = static_cast<std::uint32_t>(pick({16, 32, 36, 40, 48, 48, 64, 64, 15, random()}));
        words[2] = static_cast<std::uint32_t>(pick({0, 0, 0, kNoReply, kNoReply, random() & 0x3f}));
        for (int w = 3; w < 16; ++w)
          words[w] = static_cast<std::uint32_t>(
              pick({0, 0, 1, 2, 3, 4, 7, 8, 16, 20, 24, 32, 36, 0x14, 0x1000, 0x8000, 0x7fff'ffff, random()}));
        std::vector<int> files;
        for (std::uint64_t f = pick({0, 0, 1, 1, 2, 9}); f-- > 0;)
          files.push_back(random() % 2 == 0 ? data.file.get() : event.get());
        const std::size_t size = words[1] >= 16 && words[1] <= sizeof words ? words[1] : sizeof words;
        if (!client.send(words, size, files, MSG_DONTWAIT)) break;
      }
    }
  }
  await_idle(server);
  CHECK(open_files() == before);
  still_serves(server);
}

TEST_CASE("serve: garbage in queues does no harm") {
  const Folder folder;
  Server server("emulated:1MiB", folder.at("s"));
  std::mt19937 random(11);
  for (int round = 0; round < 20; ++round) {
    Drive drive(server.path());
    auto* words = reinterpret_cast<std::uint32_t*>(drive.memory.at);
    for (int i = 0; i < 50; ++i) {
      // Stores that the controller may see half of, as it may a hostile process's.
      for (std::uint64_t w = 0; w < 4 * kPage / 4; w += 1 + random() % 8) {
        const std::uint32_t choices[] = {0, 1, 2, 0x7f00, 0x4000, static_cast<std::uint32_t>(random())};
        std::atomic_ref<std::uint32_t>(words[w]).store(choices[random() % 6], std::memory_order_relaxed);
      }
      drive.store(static_cast<int>(random() % 8), static_cast<std::uint32_t>(random() % 20));
    }
    static_cast<void>(drive.client.read(Register::csts));
  }
  await_idle(server);
  still_serves(server);
}

TEST_CASE("serve: who comes while another is there is told so, and has its turn later") {
  const Folder folder;
  Server server("emulated:1MiB", folder.at("s"));
  {
    const Drive drive(server.path());
    Client second(server.path());
    CHECK(second.negotiate() == EBUSY);
    CHECK(second.receive() == -1);
  }
  Client third(server.path());
  CHECK(third.negotiate() == 0);
}

TEST_CASE("serve: it can be stopped at any moment, by several at once, and its controller asked") {
  const Folder folder;
  for (int round = 0; round < 20; ++round) {
    Server server("emulated:1MiB", folder.at("s"));
    Client client(server.path());
    if (round % 2 == 0) REQUIRE(client.negotiate() == 0);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i)
      threads.emplace_back([&] {
        static_cast<void>(server.controller().counters());
        static_cast<void>(server.take_events());
        server.stop();
      });
    for (std::thread& thread : threads) thread.join();
    CHECK_FALSE(std::filesystem::exists(folder.at("s")));
    CHECK(client.receive() == -1);
  }
}

TEST_CASE("serve: what cannot be served leaves no socket") {
  const Folder folder;
  CHECK(serve_error("emulated:1MiB", folder.at("missing/s")) == ENOENT);
  CHECK(serve_error("emulated:1MiB", folder.at(std::string(108, 'x'))) == ENAMETOOLONG);
  CHECK(serve_error("emulated:1MiB?pump=caller", folder.at("s")) == EINVAL);
  CHECK(serve_error("other:1MiB", folder.at("s")) == EINVAL);
  CHECK(serve_error("emulated:1MiB?lba=7", folder.at("s")) == EINVAL);
  CHECK(std::filesystem::is_empty(folder.path));
  const Server server("emulated:1MiB", folder.path + "/");
  CHECK(server.path() == folder.at("cntrl"));
  CHECK(serve_error("emulated:1MiB", folder.path) == EADDRINUSE);
}
