// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "device/emulated.hpp"
#include "engine_host.hpp"
#include "fake_device.hpp"

using namespace engine_test;

namespace {

std::unique_ptr<device::Device> open_device(const std::string& uri) { return device::open(uri, parse_uri(uri)); }

}  // namespace

TEST_CASE("virtual clock: a device that goes by one gives out the word, and one that goes by real time none") {
  CHECK(testing::FakeDevice().virtual_clock() == nullptr);
  CHECK(open_device("emulated:1MiB?pump=caller")->virtual_clock() == nullptr);
  CHECK(open_device("emulated:1MiB?clock=real")->virtual_clock() == nullptr);
  const auto device = open_device("emulated:1MiB?pump=caller&clock=virtual");
  const std::atomic<std::uint64_t>* clock = device->virtual_clock();
  REQUIRE(clock != nullptr);
  CHECK(*clock == 0);
  dynamic_cast<device::EmulatedDevice&>(*device).controller().advance_ns(1234);
  CHECK(*clock == 1234);
}

TEST_CASE("virtual clock: the word moves by what the device's commands take, and by nothing else") {
  Open open("emulated:1MiB?pump=caller&clock=virtual&latency=20us");
  const std::atomic<std::uint64_t>& clock = *open.handle.device().virtual_clock();
  Buffer buffer(4096);
  for (int i = 1; i <= 5; ++i) {
    CHECK(read(open.handle, buffer, 0, 4096) == 4096);
    CHECK(clock == i * 20'000u);
    CHECK(clock == open.controller().virtual_now_ns());
  }
}
