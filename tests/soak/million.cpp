// SPDX-License-Identifier: Apache-2.0
//
// Random work of eight threads on three devices that are closed and opened again, reset, wedged, removed and cut from
// their power under it. Each request is told of once, each byte is what a model says, and nothing stays behind.
//
// SOAK_OPERATIONS and SOAK_SEED are for more of it: ./test --endurance runs a million under each sanitizer.
#include <dirent.h>

#include <cstdio>
#include <cstdlib>

#include "worker.hpp"

using namespace soak_test;

namespace {

std::uint64_t number_of(const char* name, std::uint64_t otherwise) {
  const char* const said = std::getenv(name);
  return said != nullptr && *said != '\0' ? std::strtoull(said, nullptr, 10) : otherwise;
}

unsigned entries(const char* folder) {
  unsigned count = 0;
  if (DIR* const all = opendir(folder)) {
    while (readdir(all) != nullptr) ++count;
    closedir(all);
  }
  return count;
}

/// What is there at one time of what must not grow.
struct Footprint {
  std::uint64_t registrations = memory::Registry::instance().open_registrations();
  unsigned descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task");
  std::uint64_t allocations = fake_cuda_live("allocations"), pins = fake_cuda_live("pins"),
                streams = fake_cuda_live("streams");
};

constexpr unsigned kThreads = 8;

void work(Cuda& cuda, const std::vector<CUstream>& streams, std::uint64_t operations, std::uint64_t seed,
          Figures& figures) {
  std::vector<std::unique_ptr<Worker>> workers;
  Devices devices(figures, seed);
  for (unsigned i = 0; i < kThreads; ++i)
    workers.push_back(std::make_unique<Worker>(devices, figures, i, seed * 100 + i));
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      OK(cuCtxSetCurrent(cuda.context));
      workers[i]->run(operations, streams[i]);
    });
  }
  for (auto& thread : threads) thread.join();
  // What is there in the end, by devices that were opened anew.
  for (unsigned i = 0; i < Devices::kCount; ++i) {
    for (int tries = 0; !devices.reopen(i); ++tries) REQUIRE(tries < 100);
  }
  for (auto& worker : workers) worker->check();
  workers.clear();
}

}  // namespace

TEST_CASE("a great many random requests from eight threads, while everything else happens to their devices") {
  const std::uint64_t operations = number_of("SOAK_OPERATIONS", 15'000), seed = number_of("SOAK_SEED", 7);
  Cuda cuda;
  std::vector<CUstream> streams;
  for (unsigned i = 0; i < kThreads; ++i) streams.push_back(cuda.stream());
  {
    // What is made once and kept is no leak.
    Figures first;
    work(cuda, streams, 500, seed + 1, first);
    std::vector<engine::StagingArea> all;
    while (const engine::StagingArea area = Staging::of(runtime()).take(Staging::kSlab)) all.push_back(area);
    for (const engine::StagingArea& area : all) Staging::of(runtime()).give_back(area);
  }
  const Footprint before;
  Figures figures;
  const std::uint64_t start = monotonic_ns();
  work(cuda, streams, operations, seed, figures);
  const double seconds = static_cast<double>(monotonic_ns() - start) * 1e-9;
  // Threads take a moment to end. Some, and the streams that requests are copied on, are made where they are needed
  // first and kept: a few of them.
  constexpr unsigned kKept = 8;
  static_cast<void>(comes_true([&] { return Footprint().threads <= before.threads + kKept; }));
  const Footprint after;
  CHECK(after.registrations == before.registrations);
  CHECK(after.descriptors == before.descriptors);
  CHECK(after.threads <= before.threads + kKept);
  CHECK(after.allocations == before.allocations);
  CHECK(after.pins == before.pins);
  CHECK(after.streams <= before.streams + kKept);
  std::string words;
  const auto say = [&](const char* what, const std::atomic<std::uint64_t>& count) {
    words += ", " + std::to_string(count) + " " + what;
  };
  say("faults", figures.faults);
  say("resets", figures.resets);
  say("aborts", figures.aborts);
  say("power cuts", figures.power_cuts);
  say("devices closed", figures.closes);
  say("refused to be", figures.closes_refused);
  say("closed by force", figures.forced);
  say("deregistrations", figures.deregistrations);
  say("refused", figures.deregistrations_refused);
  say("requests cancelled", figures.cancels);
  say("abandoned", figures.abandoned);
  say("not collected", figures.uncollected);
  say("on streams", figures.streams);
  for (std::size_t code = 0; code < figures.errors.size(); ++code) {
    if (figures.errors[code] != 0) say(strerrorname_np(static_cast<int>(code)), figures.errors[code]);
  }
  std::printf("soak: %llu requests of %u threads in %.1f s%s (seed %llu)\n",
              static_cast<unsigned long long>(figures.operations), kThreads, seconds, words.c_str(),
              static_cast<unsigned long long>(seed));
}
