// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "queue/wakeup.hpp"

using namespace ugds;
using queue::Wakeup;

namespace {
constexpr std::uint64_t kLong = 20'000'000'000;

void interrupt(const Wakeup& wakeup) {
  const std::uint64_t one = 1;
  CHECK(write(wakeup.eventfd(), &one, sizeof one) == sizeof one);
}
}  // namespace

TEST_CASE("wakeup: what is there before sleeping is not slept for") {
  Wakeup wakeup;
  int asked = 0;
  CHECK(wakeup.sleep([&] { return ++asked == 1; }, kLong));
  CHECK(asked == 1);
  CHECK(wakeup.woken() == 0);
}

TEST_CASE("wakeup: an interrupt from before it slept ends a sleep") {
  Wakeup wakeup;
  interrupt(wakeup);
  const std::uint64_t start = monotonic_ns();
  CHECK_FALSE(wakeup.sleep([] { return false; }, kLong));
  CHECK(monotonic_ns() - start < kLong / 2);
  CHECK(wakeup.woken() == 1);
}

TEST_CASE("wakeup: every sleeper learns of what one interrupt brought") {
  for (int round = 0; round < 50; ++round) {
    Wakeup wakeup;
    constexpr int kSleepers = 6;
    std::atomic<int> looked{0}, woke{0};
    std::atomic<bool> there{false};
    std::vector<std::thread> sleepers;
    for (int i = 0; i < kSleepers; ++i) {
      sleepers.emplace_back([&] {
        bool first = true;
        while (!wakeup.sleep(
            [&] {
              if (first) looked.fetch_add(1);
              first = false;
              return there.load();
            },
            kLong)) {
        }
        woke.fetch_add(1);
      });
    }
    while (looked.load() != kSleepers) std::this_thread::yield();
    const std::uint64_t start = monotonic_ns();
    there.store(true);
    interrupt(wakeup);
    for (auto& sleeper : sleepers) sleeper.join();
    CHECK(woke.load() == kSleepers);
    CHECK(monotonic_ns() - start < kLong / 2);
  }
}

TEST_CASE("wakeup: completions that no interrupt told of are counted until there are too many in a row") {
  Wakeup wakeup;
  const auto miss = [&] {
    int asked = 0;
    return wakeup.sleep([&] { return ++asked == 2; }, 100'000);
  };
  for (std::uint32_t i = 1; i < Wakeup::kMostMissed; ++i) {
    CHECK(miss());
    CHECK(wakeup.missed() == i);
  }
  CHECK(wakeup.armed());
  interrupt(wakeup);
  CHECK_FALSE(wakeup.sleep([] { return false; }, kLong));
  CHECK(wakeup.missed() == 0);
  for (std::uint32_t i = 0; i < Wakeup::kMostMissed; ++i) CHECK(miss());
  CHECK_FALSE(wakeup.armed());
  interrupt(wakeup);
  CHECK_FALSE(wakeup.sleep([] { return false; }, kLong));
  CHECK_FALSE(wakeup.armed());  // not trusted again
}
