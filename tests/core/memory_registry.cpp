// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/backing.hpp"
#include "base/steps.hpp"
#include "fake_device.hpp"
#include "memory/host.hpp"
#include "memory/registry.hpp"

using namespace ugds;
using memory::Registry;
using testing::FakeDevice;

namespace {

struct Attached {
  FakeDevice device;
  std::uint32_t number = Registry::instance().attach(device);
  ~Attached() { Registry::instance().detach(number, false); }
};

int code_of_add(void* address, std::uint64_t size) {
  try {
    Registry::instance().close(Registry::instance().add(address, size, memory::Kind::host, false));
    return 0;
  } catch (const Failure& failure) {
    return failure.error().code;
  }
}

}  // namespace

TEST_CASE("a registration has its own addresses on each device") {
  Attached a, b;
  std::vector<std::byte> buffer(3 * 4096 + 100);
  auto& registry = Registry::instance();
  const auto r = registry.add(buffer.data() + 7, buffer.size() - 7, memory::Kind::host, false);
  REQUIRE(r.registration->pages(a.number) != nullptr);
  REQUIRE(r.registration->pages(b.number) != nullptr);
  CHECK(r.registration->pages(a.number) != r.registration->pages(b.number));
  CHECK(a.device.at(r.registration->pages(a.number)[0] + r.page_offset()) == buffer.data() + 7);
  CHECK(a.device.mappings.size() == 1);
  CHECK(registry.close(r) == 0);
  CHECK(a.device.mappings.empty());
  CHECK(b.device.mappings.empty());
}

TEST_CASE("a device opened later gets what was registered for all, and not what was narrowed") {
  Attached a;
  std::vector<std::byte> first(8192), second(8192);
  auto& registry = Registry::instance();
  const std::uint32_t only[] = {a.number};
  const auto everywhere = registry.add(first.data(), first.size(), memory::Kind::host, false);
  const auto narrowed = registry.add(second.data(), second.size(), memory::Kind::host, false, only);
  {
    Attached late;
    CHECK(everywhere.registration->pages(late.number) != nullptr);
    CHECK(narrowed.registration->pages(late.number) == nullptr);
  }
  CHECK(registry.close(everywhere) == 0);
  CHECK(registry.close(narrowed) == 0);
}

TEST_CASE("overlapping ranges are refused, neighbouring ones within a page are not") {
  std::vector<std::byte> buffer(4096);
  auto& registry = Registry::instance();
  const auto r = registry.add(buffer.data() + 100, 100, memory::Kind::host, false);
  CHECK(code_of_add(buffer.data() + 199, 1) == EEXIST);
  CHECK(code_of_add(buffer.data() + 100, 1) == EEXIST);
  CHECK(code_of_add(buffer.data() + 50, 1000) == EEXIST);
  CHECK(code_of_add(buffer.data() + 99, 2) == EEXIST);
  CHECK(code_of_add(buffer.data(), 100) == 0);
  CHECK(code_of_add(buffer.data() + 200, 100) == 0);
  CHECK(registry.close(r) == 0);
  CHECK(code_of_add(buffer.data() + 50, 1000) == 0);
}

TEST_CASE("what is no memory is refused") {
  std::byte byte{};
  CHECK(code_of_add(&byte, 0) == EINVAL);
  CHECK(code_of_add(nullptr, 10) == EINVAL);
  CHECK(code_of_add(&byte, ~std::uint64_t{0}) == EINVAL);
}

TEST_CASE("deregistering is refused while a command is in flight") {
  auto& registry = Registry::instance();
  memory::Ledger ledger;
  registry.add_ledger(ledger);
  std::vector<std::byte> buffer(4096);
  const auto r = registry.add(buffer.data(), buffer.size(), memory::Kind::host, false);
  REQUIRE(memory::hold(ledger, r) == memory::Hold::held);
  CHECK(registry.close(r) == EBUSY);
  CHECK(registry.in_flight(r) == 1);
  CHECK(registry.find(buffer.data()).generation == r.generation);  // nothing has changed
  ledger.remove(r.registration->index());
  CHECK(registry.close(r) == 0);
  CHECK(memory::hold(ledger, r) == memory::Hold::stale);
  CHECK(ledger.count(r.registration->index()) == 0);
  registry.remove_ledger(ledger);
}

TEST_CASE("a stale reference can neither close nor hold a newer registration at the same address") {
  auto& registry = Registry::instance();
  memory::Ledger ledger;
  std::vector<std::byte> buffer(4096);
  const auto old = registry.add(buffer.data(), buffer.size(), memory::Kind::host, false);
  CHECK(registry.close(old) == 0);
  const auto now = registry.add(buffer.data(), buffer.size(), memory::Kind::host, false);
  CHECK(now.generation > old.generation);
  CHECK(registry.close(old) == ESTALE);
  CHECK(memory::hold(ledger, old) == memory::Hold::stale);
  CHECK(registry.find(buffer.data()).generation == now.generation);
  CHECK(registry.close(now) == 0);
}

TEST_CASE("what an exporter took back is unmapped from that device alone, and is no longer reached by it") {
  Attached a, b;
  auto& registry = Registry::instance();
  std::vector<std::byte> host(4096);
  const Backing dma_buf{.descriptor = 0, .offset = 0};
  const auto add = [&](std::uint64_t address) {
    return registry.add(reinterpret_cast<void*>(address), 8192, memory::Kind::peer, false, {}, dma_buf);
  };
  const auto taken = add(1 << 20), kept = add(2 << 20);
  const auto other = registry.add(host.data(), host.size(), memory::Kind::host, false);
  REQUIRE(a.device.mappings.size() == 3);
  a.device.revoked.insert(a.device.mappings.begin()->first);
  registry.drop_revoked(a.number);
  CHECK(taken.registration->pages(a.number) == nullptr);
  CHECK(taken.registration->is_revoked(a.number));
  CHECK(a.device.mappings.size() == 2);
  CHECK(registry.way(taken).why == "its exporter took it back");
  // The other device, and the others of this one, go on.
  CHECK(taken.registration->pages(b.number) != nullptr);
  CHECK_FALSE(taken.registration->is_revoked(b.number));
  CHECK(kept.registration->pages(a.number) != nullptr);
  CHECK(other.registration->pages(a.number) != nullptr);
  for (const auto& r : {taken, kept, other}) CHECK(registry.close(r) == 0);
  // The slot's next registration knows nothing of it.
  const auto next = add(1 << 20);
  CHECK_FALSE(next.registration->is_revoked(a.number));
  CHECK(registry.close(next) == 0);
  CHECK(a.device.mappings.empty());
}

TEST_CASE("every step of registering undoes the others when it fails") {
  Attached a, b;
  std::vector<std::byte> buffer(3 * 4096);
  auto& registry = Registry::instance();
  const auto before = registry.open_registrations();
  unsigned failures = 0;
  for (std::uint64_t step = 0;; ++step) {
    testing::arm_step(step);
    const int code = code_of_add(buffer.data(), buffer.size());
    if (!testing::disarm_steps()) {
      CHECK(code == 0);
      break;
    }
    CHECK(code == ENOMEM);
    CHECK(a.device.mappings.empty());
    CHECK(b.device.mappings.empty());
    CHECK_FALSE(registry.find(buffer.data()));
    ++failures;
  }
  CHECK(failures >= 6);  // index, slot, and twice a page table and a mapping
  CHECK(registry.open_registrations() == before);
}

TEST_CASE("addresses are found among many, and only inside of ranges") {
  auto& registry = Registry::instance();
  std::vector<std::byte> arena(1 << 20);
  std::mt19937 random(7);
  std::vector<memory::Reference> open(1024);
  for (int round = 0; round < 20000; ++round) {
    const std::size_t i = random() % open.size();
    std::byte* const place = arena.data() + i * 1024 + 16;
    if (open[i]) {
      const auto inside = registry.find(place + random() % 1000);
      CHECK(inside.generation == open[i].generation);
      CHECK(inside.address == reinterpret_cast<std::uintptr_t>(place));
      CHECK(inside.size == 1000);
      CHECK_FALSE(registry.find(place + 1000 == arena.data() + arena.size() ? place - 1 : place + 1000));
      CHECK(registry.close(open[i]) == 0);
      open[i] = {};
    } else {
      CHECK_FALSE(registry.find(place));
      open[i] = registry.add(place, 1000, memory::Kind::host, random() % 2 == 0);
    }
  }
  for (const auto& r : open)
    if (r) CHECK(registry.close(r) == 0);
}

TEST_CASE("look-ups and holds race with closing, and never hold what is closed") {
  auto& registry = Registry::instance();
  std::vector<std::byte> buffer(8192);
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> closed_generation{0};
  std::atomic<int> wrong{0}, held{0};
  memory::Ledger ledgers[2];
  for (auto& ledger : ledgers) registry.add_ledger(ledger);
  std::vector<std::thread> threads;
  for (auto& ledger : ledgers) {
    threads.emplace_back([&] {
      while (!stop.load()) {
        const auto r = registry.find(buffer.data() + 4000);
        if (!r) continue;
        if (memory::hold(ledger, r) != memory::Hold::held) continue;
        held.fetch_add(1);
        if (r.generation <= closed_generation.load()) wrong.fetch_add(1);
        ledger.remove(r.registration->index());
      }
    });
  }
  for (int round = 0; round < 2000 || held.load() < 100; ++round) {
    const auto r = registry.add(buffer.data(), buffer.size(), memory::Kind::host, false);
    while (registry.close(r) == EBUSY) std::this_thread::yield();
    closed_generation.store(r.generation);
  }
  stop = true;
  for (auto& thread : threads) thread.join();
  CHECK(wrong.load() == 0);
  for (auto& ledger : ledgers) registry.remove_ledger(ledger);
}

TEST_CASE("host memory: what is large is laid out in large pages, where the kernel has them") {
  constexpr std::uint64_t kLarge = 2u << 20;
  const memory::HostMemory memory(5u << 20);
  const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
  CHECK(begin % kLarge == 0);
  CHECK(std::all_of(memory.data(), memory.data() + memory.size(), [](std::byte byte) { return byte == std::byte{0}; }));
  if (memory.huge_pages()) return;
  // Whether it is, only the kernel's own list of mappings says.
  std::ifstream maps("/proc/self/smaps");
  char start[32];
  std::snprintf(start, sizeof start, "%lx-", static_cast<unsigned long>(begin));
  bool here = false;
  std::uint64_t large_kib = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find('-') < 20 && line.find(' ') > line.find('-')) here = line.starts_with(start);
    if (here && line.starts_with("ShmemPmdMapped:")) large_kib = std::strtoull(line.c_str() + 15, nullptr, 10);
  }
  constexpr int kCollapse = 25;  // MADV_COLLAPSE
  if (large_kib == 0 && madvise(memory.data(), kLarge, kCollapse) != 0) {
    MESSAGE("NOT TESTED: this kernel makes no large pages of files in memory on demand (Linux 6.1), or has none left");
    return;
  }
  CHECK(large_kib >= kLarge / 1024);
}

TEST_CASE("memory of ours is zeroed, page-aligned and has a descriptor") {
  memory::HostMemory small(100), large(5u << 20);
  CHECK(reinterpret_cast<std::uintptr_t>(small.data()) % 4096 == 0);
  CHECK(small.size() == 100);
  CHECK(static_cast<bool>(find_backing(small.data(), small.size())));
  for (std::size_t i = 0; i < large.size(); i += 4096) CHECK(large.data()[i] == std::byte{0});
  CHECK_THROWS_AS(memory::HostMemory(0), Failure);
  CHECK_THROWS_AS(memory::HostMemory(std::uint64_t{1} << 60), Failure);
}
