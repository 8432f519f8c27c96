// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <map>
#include <random>

#include "base/error.hpp"
#include "base/units.hpp"
#include "device/iova_space.hpp"
#include "device/pci.hpp"

using namespace ugds;
using device::IovaSpace;

TEST_CASE("iova space: ranges are allowed, disjoint and congruent to their addresses") {
  const std::vector<IovaSpace::Range> allowed = {{0, 0xfedfffff}, {0xfef00000, (std::uint64_t{1} << 39) - 1}};
  IovaSpace space(allowed);
  std::mt19937_64 random(1);
  std::map<std::uint64_t, std::uint64_t> model;
  for (int step = 0; step < 20000; ++step) {
    if (!model.empty() && random() % 3 == 0) {
      auto victim = std::next(model.begin(), static_cast<long>(random() % std::min<std::size_t>(model.size(), 50)));
      CHECK(space.length(victim->first) == victim->second);
      space.give(victim->first);
      model.erase(victim);
      continue;
    }
    const std::uint64_t length = (1 + random() % (std::uint64_t{1} << (random() % 15))) * 4096;
    const std::uint64_t address = random() % (std::uint64_t{1} << 47) / 4096 * 4096;
    const std::uint64_t iova = space.take(address, length);
    REQUIRE(iova % 64_KiB == address % 64_KiB);
    if (length >= 2_MiB) REQUIRE(iova % 2_MiB == address % 2_MiB);
    bool inside = false;
    for (const auto& range : allowed) inside = inside || (iova >= range.first && iova + length - 1 <= range.last);
    REQUIRE(inside);
    REQUIRE(iova >= 16_MiB);
    const auto after = model.lower_bound(iova);
    if (after != model.end()) REQUIRE(iova + length <= after->first);
    if (after != model.begin()) REQUIRE(std::prev(after)->first + std::prev(after)->second <= iova);
    model.emplace(iova, length);
  }
}

TEST_CASE("iova space: a freed range rests until the others were handed out") {
  IovaSpace space({{0, 64_MiB - 1}});
  const std::uint64_t first = space.take(0, 64_KiB);
  space.give(first);
  std::uint64_t different = 0;
  for (int i = 0; i < 700; ++i) {
    const std::uint64_t next = space.take(0, 64_KiB);
    different += next != first ? 1 : 0;
    space.give(next);
  }
  CHECK(different == 700);  // 768 places of 64 KiB lie above the first 16 MiB
}

TEST_CASE("iova space: what does not fit is refused, and what was given fits again") {
  IovaSpace space({{0, 32_MiB - 1}});
  const std::uint64_t all = space.take(0, 16_MiB);
  CHECK_THROWS_AS(space.take(0, 4_KiB), Failure);
  space.give(all);
  CHECK(space.take(0, 16_MiB) == all);
  CHECK_THROWS_AS(IovaSpace({{0, 1_MiB}}).take(0, 4_KiB), Failure);
  CHECK_THROWS_AS(IovaSpace({}).take(0, 4_KiB), Failure);
  // The end of the address space does not wrap.
  CHECK_THROWS_AS(IovaSpace({{~std::uint64_t{0} - 1_MiB + 1, ~std::uint64_t{0}}}).take(0, 4_KiB), Failure);
  CHECK_THROWS_AS(IovaSpace({{0, ~std::uint64_t{0}}}).take(0, std::uint64_t{1} << 63), Failure);
}

TEST_CASE("pci: addresses are taken in both forms, and nothing else is") {
  CHECK(device::pci_address("0000:65:00.0") == "0000:65:00.0");
  CHECK(device::pci_address("65:00.1") == "0000:65:00.1");
  CHECK(device::pci_address("10001:ff:1f.7") == "10001:ff:1f.7");
  for (const char* bad : {"", "65", "0000:65:00", "0000:65:20.0", "0000:65:00.8", "0000:65:00.0x", "/dev/nvme0", "::.",
                          "-1:00:00.0", " 1:00.0", "0x00:65:00.0", "0000:+5:00.0", "0000:65:0.0", "1:2:3:00.0"}) {
    CHECK_FALSE(device::pci_address(bad).has_value());
  }
  CHECK_THROWS_AS(device::find_nvme_function("zz"), Failure);
  CHECK_THROWS_AS(device::find_nvme_function("fffe:65:00.0"), Failure);
}
