// SPDX-License-Identifier: Apache-2.0
//
// What survives a power cut: what was flushed or written through, and of the rest each block on its own.
#include <unistd.h>

#include <map>
#include <random>

#include "emulator_host.hpp"

using namespace emulator_test;
using nvme::Opcode;

namespace {

constexpr std::uint64_t kPage = 4096;

struct Fixture {
  explicit Fixture(const std::string& uri) : host(ready_host(uri)), h(*host), buffer(h.c, 65536) {}
  void write(std::uint64_t block, int value, std::uint32_t control = 0, std::uint32_t nsid = 1) {
    buffer.pages.fill(value);
    REQUIRE(h.run(1, h.transfer(Opcode::write, nsid, block, 1, buffer, 0, kPage, nullptr, control)).status == 0);
  }
  int stored(std::uint64_t block, std::uint32_t nsid = 1) {
    std::byte bytes[kPage];
    h.c.peek(nsid, block * kPage, bytes, kPage);
    CHECK(std::all_of(bytes, bytes + kPage, [&](std::byte b) { return b == bytes[0]; }));
    return std::to_integer<int>(bytes[0]);
  }
  /// After a cut the controller is in its initial state.
  void restart() {
    CHECK(h.reg32(Register::cc) == 0);
    h.bring_up();
    REQUIRE(h.create_queue(1, 64) == 0);
  }
  std::unique_ptr<Host> host;
  Host& h;
  Dma buffer;
};

}  // namespace

TEST_CASE("power cut: whoever rings before it can know has made no mistake, and whoever does later has") {
  Fixture f("1MiB?pump=caller&doorbells=trapped");
  const std::uint32_t doorbell = nvme::kDoorbellBase + 8;
  f.h.c.power_cut(0.0, 1);
  f.h.c.write(doorbell, 1, 4);
  CHECK(f.h.violation_count() == 0);
  f.restart();
  f.write(0, 1);
  f.h.set32(Register::cc, 0);
  f.h.c.write(doorbell, 1, 4);
  CHECK(f.h.violated("queue-while-disabled"));
}

TEST_CASE("power cut: a flush, a forced write and a shutdown make data durable; nothing else does") {
  Fixture f("1MiB?pump=caller");
  f.write(0, 1);
  REQUIRE(f.h.run(1, nvme::flush(1)).status == 0);
  f.write(0, 2);
  f.write(1, 3, nvme::kForceUnitAccess);
  f.write(2, 4);
  CHECK(f.stored(0) == 2);
  f.h.c.power_cut(0.0, 1);
  CHECK(f.stored(0) == 1);
  CHECK(f.stored(1) == 3);
  CHECK(f.stored(2) == 0);
  f.restart();
  f.write(2, 5);
  f.h.c.power_cut(1.0, 1);
  CHECK(f.stored(2) == 5);
}

TEST_CASE("power cut: without a write cache, or with it switched off, all that completed is durable") {
  Fixture none("1MiB?pump=caller&vwc=0");
  none.write(0, 7);
  none.h.c.power_cut(0.0, 1);
  CHECK(none.stored(0) == 7);
  Fixture off("1MiB?pump=caller");
  off.write(1, 6);
  REQUIRE(off.h.admin(nvme::set_features(nvme::Feature::volatile_write_cache, 0)).status == 0);
  off.write(0, 7);
  off.h.c.power_cut(0.0, 1);
  CHECK(off.stored(0) == 7);
  CHECK(off.stored(1) == 6);
}

TEST_CASE("power cut: discarded blocks come back unless the discard was flushed") {
  Fixture f("4MiB?pump=caller");
  for (std::uint64_t block = 0; block < 4; ++block) f.write(block, 9);
  REQUIRE(f.h.run(1, nvme::flush(1)).status == 0);
  REQUIRE(f.h.run(1, nvme::block_command(Opcode::write_zeroes, 1, Lba(0), 1024, nvme::kDeallocate)).status == 0);
  CHECK(f.stored(0) == 0);
  f.h.c.power_cut(0.0, 1);
  CHECK(f.stored(0) == 9);
  CHECK(f.stored(3) == 9);
  f.restart();
  const auto durable = nvme::kDeallocate | nvme::kForceUnitAccess;
  REQUIRE(f.h.run(1, nvme::block_command(Opcode::write_zeroes, 1, Lba(0), 1024)).status == 0);
  REQUIRE(f.h.run(1, nvme::block_command(Opcode::write_zeroes, 1, Lba(0), 1024, durable)).status == 0);
  f.h.c.power_cut(0.0, 1);
  CHECK(f.stored(0) == 0);
}

TEST_CASE("power cut: a flush of one namespace leaves the others in the cache") {
  Fixture f("1MiB?pump=caller&namespaces=2");
  f.write(0, 1, 0, 1);
  f.write(0, 2, 0, 2);
  REQUIRE(f.h.run(1, nvme::flush(1)).status == 0);
  f.h.c.power_cut(0.0, 1);
  CHECK(f.stored(0, 1) == 1);
  CHECK(f.stored(0, 2) == 0);
  f.restart();
  f.write(0, 3, 0, 1);
  f.write(0, 4, 0, 2);
  REQUIRE(f.h.run(1, nvme::flush(nvme::kAllNamespaces)).status == 0);
  f.h.c.power_cut(0.0, 1);
  CHECK(f.stored(0, 1) == 3);
  CHECK(f.stored(0, 2) == 4);
}

TEST_CASE("power cut: each block holds its last durable value or the last written, for any history") {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    CAPTURE(seed);
    Fixture f("8MiB?pump=caller");
    std::mt19937_64 random(seed);
    std::map<std::uint64_t, int> durable, latest;
    int value = 0, survived = 0, lost = 0;
    for (int round = 0; round < 3; ++round) {
      for (int step = 0; step < 300; ++step) {
        const std::uint64_t block = random() % 60 * 31;
        value = value % 250 + 1;
        switch (random() % 12) {
          case 0:
            REQUIRE(f.h.run(1, nvme::flush(1)).status == 0);
            durable = latest;
            break;
          case 1:
            f.write(block, value, nvme::kForceUnitAccess);
            durable[block] = latest[block] = value;
            break;
          case 2:
            REQUIRE(f.h.run(1, nvme::block_command(Opcode::write_zeroes, 1, Lba(block), 1)).status == 0);
            latest[block] = 0;
            break;
          default: f.write(block, value); latest[block] = value;
        }
      }
      f.h.c.power_cut(0.5, seed * 100 + static_cast<std::uint64_t>(round));
      for (const auto& [block, last] : latest) {
        const int now = f.stored(block);
        const bool legal = now == last || now == durable[block];
        CHECK(legal);
        if (last != durable[block]) ++(now == last ? survived : lost);
        durable[block] = now;
      }
      latest = durable;
      f.restart();
    }
    CHECK(survived > 0);
    CHECK(lost > 0);
    CHECK(f.h.violation_count() == 0);
  }
}

TEST_CASE("power cut: every controller of the subsystem resets") {
  const std::string uri = "1MiB?pump=caller&name=cut";
  {
    Fixture a(uri), b(uri);
    a.write(0, 1);
    b.write(1, 2);
    a.h.c.power_cut(0.0, 1);
    CHECK(a.stored(0) == 0);
    CHECK(b.stored(1) == 0);
    CHECK(b.h.reg32(Register::csts) == 0);
    b.restart();
    b.write(3, 3);
    REQUIRE(b.h.run(1, nvme::flush(1)).status == 0);
    CHECK(a.stored(3) == 3);
  }
  CHECK(emulator::forget_subsystem("cut"));
}

TEST_CASE("power cut: of a file what was not flushed is taken back") {
  const std::string path = "/tmp/ugds-emulator-power-" + std::to_string(getpid());
  {
    Fixture f(path + "?size=1MiB&pump=caller");
    f.write(0, 1);
    REQUIRE(f.h.run(1, nvme::flush(1)).status == 0);
    f.write(0, 2);
    f.write(5, 3);
    f.h.c.power_cut(0.0, 1);
    CHECK(f.stored(0) == 1);
    CHECK(f.stored(5) == 0);
  }
  unlink(path.c_str());
}
