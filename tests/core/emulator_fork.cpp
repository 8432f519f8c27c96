// SPDX-License-Identifier: Apache-2.0
//
// Process-wide state in a child of `fork`.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "emulator_host.hpp"
#include "fake_device.hpp"
#include "memory/registry.hpp"

using namespace emulator_test;

namespace {

/// What `body` gives in a child, or -1 where it hangs or crashes.
int in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    alarm(10);
    try {
      _exit(body());
    } catch (const std::exception&) {
      _exit(100);
    }
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

TEST_CASE("emulator: a child of a fork has names of its own, whatever the parent's threads were doing") {
  const std::string uri = "1MiB?pump=caller&name=fork";
  Host mine(uri);
  std::atomic<bool> stop{false};
  std::thread thread([&] {
    while (!stop) {
      Host h("1MiB?pump=caller&name=fork-busy");
    }
  });
  int good = 0;
  // Of another geometry: it would be refused if the parent's were found.
  for (int i = 0; i < 20 && good == i; ++i) {
    good += in_child([] {
              Host h("2MiB?pump=caller&name=fork");
              return 0;
            }) == 0;
  }
  stop = true;
  thread.join();
  CHECK(good == 20);
  CHECK_THROWS_AS(Host("2MiB?pump=caller&name=fork"), Failure);
}

TEST_CASE("a child's device is not asked to unmap what was mapped to its parent's") {
  auto& registry = memory::Registry::instance();
  testing::FakeDevice device;
  const std::uint32_t number = registry.attach(device);
  std::vector<std::byte> buffer(8192);
  const auto r = registry.add(buffer.data(), buffer.size(), memory::Kind::host, false);
  CHECK(in_child([&] {
          testing::FakeDevice own;
          std::uint64_t page = 0;
          own.map(buffer.data(), Bytes(4096), device::Access::read_write, &page);  // of the same token
          const std::uint32_t again = registry.attach(own);
          registry.detach(again, false);
          if (again != number) return 1;
          return own.mappings.size() == 1 ? 0 : 2;
        }) == 0);
  CHECK(registry.close(r) == 0);
  registry.detach(number, false);
}
