// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <csignal>

#include "serve/config_space.hpp"
#include "serve/fault_guard.hpp"
#include "serve_client.hpp"

using namespace serve_test;
using serve::ConfigSpace;
using serve::FaultGuard;
using serve::MsixTable;

namespace {

std::uint64_t get(const ConfigSpace& config, std::uint32_t at, std::size_t bytes) {
  std::uint64_t value = 0;
  std::array<std::byte, 8> raw{};
  config.read(at, std::span(raw).first(bytes));
  std::memcpy(&value, raw.data(), bytes);
  return value;
}

void put(ConfigSpace& config, std::uint32_t at, std::uint64_t value, std::size_t bytes) {
  std::array<std::byte, 8> raw{};
  std::memcpy(raw.data(), &value, 8);
  config.write(at, std::span(raw).first(bytes));
}

}  // namespace

TEST_CASE("config space: an address register shows its size, and keeps what it can hold") {
  ConfigSpace config(0x4000, 3);
  CHECK(get(config, 0x10, 8) == 4);
  put(config, 0x10, ~std::uint64_t{0}, 8);
  CHECK(get(config, 0x10, 8) == ~std::uint64_t{0x3fff} + 4);
  put(config, 0x10, 0x1234'5678'9abc'def0, 8);
  CHECK(get(config, 0x10, 8) == 0x1234'5678'9abc'c004);
}

TEST_CASE("config space: the capabilities are a list that ends, with MSI-X only where there are vectors") {
  for (const std::uint32_t vectors : {0u, 1u, 2048u}) {
    ConfigSpace config(0x2000, vectors);
    CHECK((get(config, 6, 2) & 0x10) != 0);
    std::vector<std::uint64_t> found;
    for (auto at = get(config, 0x34, 1); at != 0; at = get(config, static_cast<std::uint32_t>(at) + 1, 1)) {
      REQUIRE(found.size() < 10);
      found.push_back(get(config, static_cast<std::uint32_t>(at), 1));
      if (found.back() == 0x11) CHECK(get(config, static_cast<std::uint32_t>(at) + 2, 2) == vectors - 1);
    }
    const std::vector<std::uint64_t> expected =
        vectors == 0 ? std::vector<std::uint64_t>{1, 0x10} : std::vector<std::uint64_t>{1, 0x10, 0x11};
    CHECK(found == expected);
    put(config, 0x92, 0xffff, 2);
    CHECK(config.msix_enabled() == (vectors != 0));
  }
}

TEST_CASE("config space: a function level reset is asked for once") {
  ConfigSpace config(0x2000, 1);
  CHECK_FALSE(config.take_reset());
  put(config, 0x58, 0x8000, 2);
  CHECK((get(config, 0x58, 2) & 0x8000) == 0);
  CHECK(config.take_reset());
  CHECK_FALSE(config.take_reset());
}

TEST_CASE("msix table: 2048 entries fill it to its end, and the pending bits read as zeros") {
  MsixTable table(2048);
  std::array<std::byte, 16> raw{};
  raw.fill(std::byte{0xff});
  table.write(0x7ff8, raw);
  std::array<std::byte, 16> back{};
  table.read(0x7ff8, back);
  CHECK(back[7] == std::byte{0xff});
  CHECK(back[8] == std::byte{0});
}

TEST_CASE("fault guard: a cut range becomes memory of zeros, and only that range") {
  const Descriptor wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  Shared cut(4 * kPage, 0), other(4 * kPage, 0);
  cut.at[kPage] = other.at[kPage] = std::byte{1};
  const FaultGuard guard(cut.at, cut.size, wake.get()), beside(other.at, other.size, wake.get());
  REQUIRE(ftruncate(cut.file.get(), kPage) == 0);
  CHECK_FALSE(guard.lost());
  CHECK(cut.at[3 * kPage] == std::byte{0});
  cut.at[kPage] = std::byte{9};
  CHECK(cut.at[kPage] == std::byte{9});
  CHECK(guard.lost());
  CHECK_FALSE(beside.lost());
  CHECK(other.at[kPage] == std::byte{1});
  std::uint64_t count = 0;
  REQUIRE(read(wake.get(), &count, sizeof count) == sizeof count);
  CHECK(count == 1);
}

TEST_CASE("fault guard: a slot is used again, and is then not lost") {
  const Descriptor wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  for (int i = 0; i < 3; ++i) {
    Shared memory(kPage, 0);
    const FaultGuard guard(memory.at, memory.size, wake.get());
    CHECK_FALSE(guard.lost());
    REQUIRE(ftruncate(memory.file.get(), 0) == 0);
    memory.at[0] = std::byte{1};
    CHECK(guard.lost());
  }
}
