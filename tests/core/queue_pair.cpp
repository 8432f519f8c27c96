// SPDX-License-Identifier: Apache-2.0
//
// A queue pair against a controller that the test plays by hand.
#include "queue/queue_pair.hpp"

#include <doctest/doctest.h>

#include <cstring>
#include <deque>
#include <random>
#include <vector>

#include "fake_device.hpp"

using namespace ugds;
using queue::Command;
using queue::QueuePair;
using queue::Request;

namespace {

constexpr std::uint32_t kSubmission = 0x1008, kCompletion = 0x100c;

struct Rig {
  testing::FakeDevice device;
  QueuePair pair;
  std::uint32_t depth;
  std::uint32_t fetched = 0, posted = 0, phase = 1;

  explicit Rig(std::uint32_t entries, std::uint32_t lists = 8)
      : pair(device, {.id = 1, .depth = entries, .completion_depth = entries, .page_size = 4096, .list_pages = lists},
             queue::Doorbell(device, kSubmission), queue::Doorbell(device, kCompletion)),
        depth(entries) {}

  nvme::SubmissionEntry& entry(std::uint32_t slot) {
    return *reinterpret_cast<nvme::SubmissionEntry*>(device.at(pair.submission_ring().value + slot * 64));
  }
  /// Fetches one command, as the controller would once the doorbell moved.
  nvme::SubmissionEntry fetch() {
    REQUIRE(fetched != device.registers[kSubmission]);
    const nvme::SubmissionEntry e = entry(fetched);
    fetched = (fetched + 1) % depth;
    return e;
  }
  void post(std::uint16_t cid, std::uint16_t status = 0, std::uint32_t result = 0) {
    auto& c = *reinterpret_cast<nvme::CompletionEntry*>(device.at(pair.completion_ring().value + posted * 16));
    c.result = result;
    c.sq_head = static_cast<std::uint16_t>(fetched);
    std::atomic_ref(c.last).store(nvme::CompletionWord::make(cid, phase != 0, status).raw, std::memory_order_release);
    if (++posted == depth) {
      posted = 0;
      phase ^= 1;
    }
  }
  void stage(Request& request) {
    pair.next() = nvme::flush(1);
    pair.stage(request);
  }
};

}  // namespace

TEST_CASE("rings are zeroed, so that nothing looks like a completion") {
  Rig rig(4);
  REQUIRE(rig.pair.try_acquire());
  CHECK(rig.pair.reap() == 0);
  CHECK(rig.device.registers[kCompletion] == 0);
}

TEST_CASE("ownership is exclusive") {
  Rig rig(4);
  CHECK(rig.pair.try_acquire());
  CHECK_FALSE(rig.pair.try_acquire());
  rig.pair.release();
  CHECK(rig.pair.try_acquire());
}

TEST_CASE("a queue of every depth fills to one less than its entries, and wraps at them") {
  for (const std::uint32_t depth : {2u, 3u, 4u, 5u, 7u, 64u, 100u, 1000u}) {
    CAPTURE(depth);
    Rig rig(depth);
    for (int round = 0; round < 5; ++round) {
      std::deque<Request> requests;
      std::vector<std::uint16_t> ids;
      while (rig.pair.has_room(0)) {
        rig.stage(requests.emplace_back());
        requests.back().on_idle = queue::OnIdle::done;
      }
      CHECK(requests.size() == depth - 1);
      CHECK(rig.pair.load() == depth - 1);
      rig.pair.ring();
      for (std::size_t i = 0; i < requests.size(); ++i) ids.push_back(rig.fetch().cid);
      CHECK(rig.fetched == rig.device.registers[kSubmission]);
      std::sort(ids.begin(), ids.end());
      CHECK(std::unique(ids.begin(), ids.end()) == ids.end());
      for (const auto id : ids) rig.post(id);
      std::uint32_t reaped = 0;
      while (const std::uint32_t n = rig.pair.reap()) reaped += n;
      CHECK(reaped == depth - 1);
      CHECK(rig.device.registers[kCompletion] == rig.posted);
      for (const auto& request : requests) CHECK(request.done.load() == 1);
      CHECK(rig.pair.load() == 0);
    }
  }
}

TEST_CASE("one doorbell store tells of everything staged") {
  Rig rig(16);
  Request request;
  for (int i = 0; i < 10; ++i) rig.stage(request);
  CHECK(rig.device.registers[kSubmission] == 0);
  rig.pair.ring();
  CHECK(rig.device.registers[kSubmission] == 10);
  rig.pair.ring();
  CHECK(rig.pair.doorbells() == 1);
}

TEST_CASE("completions in any order, with an identifier never used twice at once") {
  Rig rig(9);
  std::mt19937 random(3);
  std::vector<std::pair<std::uint16_t, Request*>> flying;
  std::deque<Request> requests;
  for (int step = 0; step < 20000; ++step) {
    if (rig.pair.has_room(0) && random() % 2 == 0) {
      Request& request = requests.emplace_back();
      request.on_idle = queue::OnIdle::done;
      rig.stage(request);
      rig.pair.ring();
      const std::uint16_t cid = rig.fetch().cid;
      for (const auto& [other, unused] : flying) CHECK(other != cid);
      flying.emplace_back(cid, &request);
    } else if (!flying.empty()) {
      const std::size_t i = random() % flying.size();
      const auto [cid, request] = flying[i];
      flying.erase(flying.begin() + static_cast<long>(i));
      rig.post(cid, 0, cid * 7u);
      REQUIRE(rig.pair.reap() == 1);
      CHECK(request->done.load() == 1);
      CHECK(request->result == cid * 7u);
    }
  }
}

TEST_CASE("the failure at the lowest offset is the request's, whatever the order") {
  Rig rig(8);
  Request request;
  testing::FakeDevice& device = rig.device;
  std::vector<std::byte> buffer(4 * 4096);
  auto pages = std::make_unique<std::uint64_t[]>(5);
  auto* base = reinterpret_cast<std::byte*>(align_down(reinterpret_cast<std::uintptr_t>(buffer.data()), 4096));
  device.map(base, Bytes(5 * 4096), device::Access::read_write, pages.get());
  for (std::uint64_t i = 0; i < 4; ++i) {
    rig.pair.next() = nvme::block_command(nvme::Opcode::read, 1, Lba(i), 1);
    rig.pair.ledger().add(5);
    rig.pair.stage_data(request, false, 5, {pages.get(), i * 4096}, i * 4096, 4096);
  }
  request.on_idle = queue::OnIdle::done;
  rig.pair.ring();
  std::uint16_t ids[4];
  for (auto& id : ids) id = rig.fetch().cid;
  rig.post(ids[3], 0x280);
  rig.post(ids[1], 0x281);
  rig.post(ids[2], 0x282);
  rig.pair.reap();
  CHECK(request.done.load() == 0);
  CHECK(rig.pair.ledger().count(5) == 1);  // the fourth still holds the registration
  rig.post(ids[0]);
  rig.pair.reap();
  CHECK(request.done.load() == 1);
  CHECK(request.failed_at == 4096);
  CHECK(request.status == 0x281);
  CHECK(rig.pair.ledger().count(5) == 0);
}

TEST_CASE("an identifier that is not in flight is a protocol error, and the queue is not trusted any more") {
  Rig rig(8);
  Request request;
  request.on_idle = queue::OnIdle::done;
  rig.stage(request);
  rig.pair.ring();
  const std::uint16_t cid = rig.fetch().cid;
  for (const std::uint16_t bad : {std::uint16_t(cid + 1), std::uint16_t(7), std::uint16_t(8), std::uint16_t(0xffff)}) {
    rig.post(bad);
    rig.pair.reap();
    CHECK(request.done.load() == 0);
  }
  CHECK(rig.pair.statistics().protocol_errors.get() == 4);
  CHECK(rig.pair.distrusted());
  rig.post(cid);
  rig.post(cid);  // and again
  rig.pair.reap();
  CHECK(request.done.load() == 1);
  CHECK(rig.pair.statistics().protocol_errors.get() == 5);
  CHECK(rig.pair.load() == 0);
}

TEST_CASE("a wrong phase is no completion") {
  Rig rig(4);
  Request request;
  request.on_idle = queue::OnIdle::done;
  rig.stage(request);
  rig.pair.ring();
  const std::uint16_t cid = rig.fetch().cid;
  rig.phase ^= 1;
  rig.post(cid);
  CHECK(rig.pair.reap() == 0);
  CHECK(request.done.load() == 0);
}

TEST_CASE("every command owns its list pages until it retires") {
  Rig rig(16, 4);
  std::vector<std::byte> buffer(3 << 20);
  auto* base = reinterpret_cast<std::byte*>(align_up(reinterpret_cast<std::uintptr_t>(buffer.data()), 4096));
  auto pages = std::make_unique<std::uint64_t[]>(700);
  rig.device.contiguous = false;
  rig.device.map(base, Bytes(700 * 4096), device::Access::read_write, pages.get());
  Request request;
  std::vector<std::uint16_t> ids;
  std::vector<std::uint64_t> lists;
  for (int i = 0; i < 4; ++i) {
    REQUIRE(rig.pair.has_room(1));
    rig.pair.next() = nvme::block_command(nvme::Opcode::read, 1, Lba(0), 512);
    rig.pair.stage_data(request, false, Command::kNoRegistration, {pages.get(), 0}, 0, 513 * 4096);
    rig.pair.ring();
    const auto fetched = rig.fetch();
    ids.push_back(fetched.cid);
    lists.push_back(fetched.prp2);
    for (std::uint64_t entry = 0; entry < 512; ++entry) {
      std::uint64_t at;
      std::memcpy(&at, rig.device.at(fetched.prp2 + entry * 8), 8);
      CHECK(at == pages[entry + 1]);
    }
  }
  std::sort(lists.begin(), lists.end());
  CHECK(std::unique(lists.begin(), lists.end()) == lists.end());
  CHECK_FALSE(rig.pair.has_room(1));
  CHECK(rig.pair.has_room(0));
  rig.post(ids[2]);
  rig.pair.reap();
  CHECK(rig.pair.has_room(1));
  CHECK_FALSE(rig.pair.has_room(2));
}

TEST_CASE("an orphaned request's command still gives back what it holds") {
  Rig rig(4);
  std::uint16_t cid;
  {
    Request request;
    request.on_idle = queue::OnIdle::done;
    rig.pair.next() = nvme::block_command(nvme::Opcode::read, 1, Lba(0), 1);
    const std::uint64_t page[] = {0x4000000000000};
    rig.pair.ledger().add(3);
    rig.pair.stage_data(request, false, 3, {page, 0}, 0, 4096);
    rig.pair.ring();
    cid = rig.fetch().cid;
    rig.pair.orphan(request);
  }
  CHECK(rig.pair.ledger().count(3) == 1);
  rig.post(cid);
  CHECK(rig.pair.reap() == 1);
  CHECK(rig.pair.ledger().count(3) == 0);
}

TEST_CASE("a restart ends everything in flight and the rings begin anew") {
  Rig rig(8);
  Request one, two;
  one.on_idle = two.on_idle = queue::OnIdle::done;
  rig.stage(one);
  rig.stage(two);
  rig.pair.ring();
  rig.post(rig.fetch().cid);
  rig.pair.restart(0x371, queue::Doorbell(rig.device, kSubmission), queue::Doorbell(rig.device, kCompletion));
  for (Request* request : {&one, &two}) {
    CHECK(request->done.load() == 1);
    CHECK(request->status == 0x371);
    CHECK(request->stopped);
  }
  CHECK(rig.pair.load() == 0);
  CHECK(rig.pair.reap() == 0);  // what was posted before is gone
  rig.device.registers[kSubmission] = 0;
  rig.fetched = rig.posted = 0;
  rig.phase = 1;
  Request three;
  three.on_idle = queue::OnIdle::done;
  rig.stage(three);
  rig.pair.ring();
  rig.post(rig.fetch().cid);
  CHECK(rig.pair.reap() == 1);
  CHECK(three.done.load() == 1);
}

TEST_CASE("a shadow doorbell rings the register only when the event index is passed") {
  testing::FakeDevice device;
  std::uint32_t shadow = 0, event = 0;
  queue::Doorbell doorbell(device, 0x1008, &shadow, &event);
  doorbell.ring(1);  // the event index 0 is passed
  CHECK(device.writes == 1);
  CHECK(device.registers[0x1008] == 1);
  doorbell.ring(2);
  CHECK(device.writes == 1);
  CHECK(shadow == 2);
  event = 2;
  doorbell.ring(5);
  CHECK(device.writes == 2);
  event = 4;
  doorbell.ring(6);
  CHECK(device.writes == 2);
}

TEST_CASE("a doorbell that is not mapped goes through the device") {
  testing::FakeDevice device;
  device.mapped_doorbells = false;
  queue::Doorbell doorbell(device, 0x1008);
  doorbell.ring(9);
  CHECK(device.writes == 1);
  CHECK(device.registers[0x1008] == 9);
}
