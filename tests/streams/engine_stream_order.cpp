// SPDX-License-Identifier: Apache-2.0
//
// Streams: many at once, held one way and the other, full ones, and what closing does while they are pending.
#include <cerrno>
#include <cstdlib>
#include <deque>

#include "engine/table.hpp"
#include "engine_gpu_host.hpp"

using namespace gpu_test;

namespace {

/// Reads on so many streams at once, each checked.
void read_on_streams(unsigned count, std::uint64_t size, Demand route) {
  CAPTURE(count);
  CAPTURE(static_cast<int>(route));
  Cuda cuda;
  Open open("emulated:64MiB");
  Buffer host(16 * MiB);
  host.fill(7);
  REQUIRE(write(open.handle, host, 0, 16 * MiB) == 16 * MiB);
  GpuMemory target(count * size, route);
  std::deque<Asked> asked;
  std::vector<CUstream> streams;
  for (unsigned i = 0; i < count; ++i) streams.push_back(cuda.stream());
  for (int round = 0; round < 3; ++round) {
    asked.clear();
    for (unsigned i = 0; i < count; ++i) {
      const Transfer t = reading(target, (i * 97 + round) % 1000 * 4 * KiB, size, i * size);
      asked.emplace_back(open.handle, streams[i], std::vector<Transfer>{t});
    }
    for (auto& one : asked) REQUIRE(one.result() == static_cast<std::int64_t>(size));
    for (unsigned i = 0; i < count; ++i) {
      cuda.finish(streams[i]);
      REQUIRE(target.same(host.data() + (i * 97 + round) % 1000 * 4 * KiB, size, i * size) == size);
    }
  }
}

}  // namespace

TEST_CASE("stream: 128 streams at once, more than there are connections, get each its own bytes") {
  for (const Demand route : kRoutes) read_on_streams(128, 64 * KiB, route);
}

TEST_CASE("stream: those beyond the connections are held by calls, and all of them end") {
  Cuda cuda;
  fake_cuda_set("connections", 8);
  Open open("emulated:16MiB?latency=300ms");
  Buffer host(64 * 4 * KiB);
  host.fill(3);
  REQUIRE(write(open.handle, host, 0, 64 * 4 * KiB) == 64 * 4 * KiB);
  // Not direct: an emulated device's own copies need connections.
  GpuMemory target(64 * 4 * KiB, Demand::staged);
  std::deque<Asked> asked;
  std::vector<CUstream> streams;
  for (int i = 0; i < 64; ++i) streams.push_back(cuda.stream());
  for (std::uint64_t i = 0; i < 64; ++i)
    asked.emplace_back(open.handle, streams[i],
                       std::vector<Transfer>{reading(target, i * 4 * KiB, 4 * KiB, i * 4 * KiB)});
  for (auto& one : asked) CHECK(one.result() == 4096);
  for (const CUstream stream : streams) cuda.finish(stream);
  CHECK(target.same(host.data(), target.size()) == target.size());
  const auto& counters = open.handle.streams()->counters();
  CHECK(counters.held_by_call >= 32);
  CHECK(counters.held_by_kernel > 0);
}

TEST_CASE("stream: kernels in front of requests and behind them see them in order, many at once") {
  Cuda cuda;
  Open open("emulated:16MiB");
  const CUstream stream = cuda.stream();
  CUdeviceptr wrong = 0;
  OK(cuMemAlloc_v2(&wrong, 4096));
  std::uint64_t value = 0;
  REQUIRE(fake_cuda_poke(wrong, &value, 8) == 0);
  for (const Demand route : kRoutes) {
    GpuMemory memory(1 * MiB, route);
    std::deque<Asked> asked;
    for (std::uint64_t i = 0; i < 100; ++i) {
      const std::uint64_t size = 4 * KiB * (1 + i % 60);
      cuda.launch("ugds_fill", stream, memory.address(), size, i << 16);
      asked.emplace_back(open.handle, stream, std::vector<Transfer>{writing(memory, 0, size)});
      cuda.launch("ugds_fill", stream, memory.address(), size, 1000 << 16);
      asked.emplace_back(open.handle, stream, std::vector<Transfer>{reading(memory, 0, size)});
      cuda.launch("ugds_check", stream, memory.address(), size, i << 16, wrong);
    }
    for (auto& one : asked) CHECK(one.result() > 0);
    cuda.finish(stream);
  }
  REQUIRE(fake_cuda_peek(&value, wrong, 8) == 0);
  CHECK(value == 0);
  OK(cuMemFree_v2(wrong));
}

TEST_CASE("streams-again" * doctest::skip()) {
  if (const char* words = std::getenv("TEST_STREAM_WORDS")) fake_cuda_set("stream_words", std::atoi(words));
  for (const Demand route : kRoutes) {
    Cuda cuda;
    if (const char* words = std::getenv("TEST_STREAM_WORDS")) fake_cuda_set("stream_words", std::atoi(words));
    Open open("emulated:64MiB");
    GpuMemory source(20 * MiB, route), target(20 * MiB, route);
    const CUstream stream = cuda.stream();
    CUdeviceptr wrong = 0;
    OK(cuMemAlloc_v2(&wrong, 4096));
    std::uint64_t value = 0;
    REQUIRE(fake_cuda_poke(wrong, &value, 8) == 0);
    for (const std::uint64_t size : {4 * KiB, 20 * MiB}) {
      cuda.launch("ugds_fill", stream, source.address(), size, size);
      Asked written(open.handle, stream, {writing(source, 0, size)});
      cuda.launch("ugds_fill", stream, source.address(), size, 1);
      Asked was_read(open.handle, stream, {reading(target, 0, size)});
      cuda.launch("ugds_check", stream, target.address(), size, size, wrong);
      CHECK(written.result() == static_cast<std::int64_t>(size));
      CHECK(was_read.result() == static_cast<std::int64_t>(size));
      cuda.finish(stream);
    }
    CHECK(fake_cuda_peek(&value, wrong, 8) == 0);
    CHECK(value == 0);
    const auto& counters = open.handle.streams()->counters();
    const bool calls = std::getenv("TEST_CALLS") != nullptr;
    const bool kernels = !calls && std::getenv("UGDS_GPU_KERNELS") == nullptr;
    CHECK((counters.held_by_wait + counters.held_by_kernel == 0) == calls);
    CHECK((counters.held_by_kernel == 0) == !kernels);
    CHECK((counters.held_by_call == 0) == !calls);
    // Requests that are submitted faster than they end meet the rings' ends.
    std::deque<Asked> asked;
    for (unsigned i = 0; i < 700; ++i) {
      asked.emplace_back(open.handle, stream, std::vector<Transfer>{reading(target, 0, 260 * KiB)});
    }
    for (auto& one : asked) REQUIRE(one.result() == 260 * 1024);
    cuda.finish(stream);
    OK(cuMemFree_v2(wrong));
  }
}

TEST_CASE("stream: held by calls, without words, with one connection, and with little memory to stage through") {
  CHECK(run_again("TEST_CALLS=1 UGDS_STREAM_WAITS=0", "streams-again") == 0);
  CHECK(run_again("TEST_CALLS=1 TEST_STREAM_WORDS=0", "streams-again") == 0);
  CHECK(run_again("TEST_CALLS=1 CUDA_DEVICE_MAX_CONNECTIONS=1", "streams-again") == 0);
  CHECK(run_again("CUDA_DEVICE_MAX_CONNECTIONS=2", "streams-again") == 0);
  CHECK(run_again("UGDS_GPU_KERNELS=0", "streams-again") == 0);
  CHECK(run_again("UGDS_STAGING=16MiB", "streams-again") == 0);
}

TEST_CASE("stream: more operations than a stream has room for wait, and a caller may be interrupted") {
  Cuda cuda;
  Open open("emulated:16MiB");
  const CUstream stream = cuda.stream();
  GpuMemory target(1 * MiB, Demand::direct);
  cuda.launch("ugds_spin", stream, 200'000'000);
  std::deque<Asked> asked;
  for (unsigned i = 0; i < 254; ++i) {
    asked.emplace_back(open.handle, stream, std::vector<Transfer>{reading(target, i * 4 * KiB, 4 * KiB)});
  }
  const Transfer t = reading(target, 0, 4 * KiB);
  StreamCall call;
  call.requests = {&t, 1};
  CHECK(stream_of(stream).submit(open.handle, call, {[](void*) { return true; }, nullptr}) == -EINTR);
  CHECK(last_error().code == EINTR);
  for (unsigned i = 0; i < 300; ++i) {
    asked.emplace_back(open.handle, stream, std::vector<Transfer>{reading(target, i % 256 * 4 * KiB, 4 * KiB)});
  }
  for (auto& one : asked) REQUIRE(one.result() == 4096);
  cuda.finish(stream);
  CHECK(memory::Registry::instance().in_flight(target.reference()) == 0);
}

TEST_CASE(
    "stream: a registration with pending requests cannot be closed, and one handle's abandoned ones are let through") {
  Cuda cuda;
  Open other("emulated:16MiB");
  Buffer host(1 * MiB);
  host.fill(8);
  REQUIRE(write(other.handle, host, 0, 1 * MiB) == 1 * MiB);
  for (const Demand route : kRoutes) {
    CAPTURE(static_cast<int>(route));
    const CUstream stream = cuda.stream();
    auto closing = std::make_unique<Open>("emulated:16MiB");
    GpuMemory target(1 * MiB, route), after(1 * MiB, route), scattered(1 * MiB, route);
    std::vector<Transfer> list;
    for (unsigned i = 0; i < 20; ++i) list.push_back(reading(scattered, i * 4 * KiB, 4 * KiB, i * 8 * KiB));
    // Orders of another request, which are not to be done for those that are let through.
    CHECK(Asked(other.handle, stream, list).result() == 20 * 4 * KiB);
    cuda.finish(stream);
    const std::vector<std::byte> zeros(1 * MiB);
    scattered.poke(0, zeros.data(), zeros.size());
    cuda.launch("ugds_spin", stream, 100'000'000);
    std::int64_t told = 0;
    StreamCall call;
    call.told = &told;
    for (Transfer& t : list) t.buffer = target.reference();
    Asked first(closing->handle, stream, {reading(target, 0, 1 * MiB)}, call);
    Asked many(closing->handle, stream, list);
    Asked second(other.handle, stream, {reading(after, 0, 1 * MiB)});
    CHECK(memory::Registry::instance().close(target.reference()) == EBUSY);
    CHECK(closing->handle.stream_operations() == 2);
    closing.reset();
    CHECK(first.result() == -ECANCELED);
    CHECK(many.result() == -ECANCELED);
    CHECK(told == -ECANCELED);
    CHECK(second.result() == 1 * MiB);
    cuda.finish(stream);
    CHECK(after.same(host.data(), 1 * MiB) == 1 * MiB);
    CHECK(scattered.same(zeros.data(), zeros.size()) == zeros.size());
    CHECK(memory::Registry::instance().in_flight(target.reference()) == 0);
  }
}

TEST_CASE("stream: a device with pending requests is closed by whoever waits, and by nobody else") {
  Cuda cuda;
  auto& table = engine::Table::instance();
  for (const Demand route : kRoutes) {
    CAPTURE(static_cast<int>(route));
    const CUstream stream = cuda.stream();
    GpuMemory target(1 * MiB, route);
    const engine::HandleId id = table.open("emulated:16MiB", {});
    cuda.launch("ugds_spin", stream, 200'000'000);
    std::deque<Asked> asked;
    {
      const engine::Table::Use handle(table, id);
      asked.emplace_back(*handle, stream, std::vector<Transfer>{reading(target, 0, 64 * KiB)});
    }
    CHECK(table.close(id, engine::Table::Mode::check) == EBUSY);
    CHECK(table.close(id, engine::Table::Mode::wait) == 0);
    CHECK(asked[0].result() == 64 * KiB);
    cuda.finish(stream);
  }
}

TEST_CASE("stream: two devices on one stream take turns in its order") {
  Cuda cuda;
  Open one("emulated:16MiB"), two("emulated:16MiB");
  const CUstream stream = cuda.stream();
  for (const Demand route : kRoutes) {
    GpuMemory memory(3 * MiB, route);
    std::deque<Asked> asked;
    std::vector<std::byte> wanted(3 * MiB);
    for (std::uint64_t i = 0; i < wanted.size(); ++i) wanted[i] = pattern(i, 9);
    cuda.launch("ugds_fill", stream, memory.address(), 3 * MiB, 9);
    for (unsigned turn = 0; turn < 20; ++turn) {
      Open& from = turn % 2 == 0 ? one : two;
      Open& to = turn % 2 == 0 ? two : one;
      asked.emplace_back(from.handle, stream, std::vector<Transfer>{writing(memory, turn % 4 * MiB, 3 * MiB)});
      cuda.launch("ugds_fill", stream, memory.address(), 3 * MiB, turn);
      asked.emplace_back(from.handle, stream, std::vector<Transfer>{reading(memory, turn % 4 * MiB, 3 * MiB)});
      asked.emplace_back(to.handle, stream, std::vector<Transfer>{writing(memory, 8 * MiB, 3 * MiB)});
    }
    for (auto& request : asked) REQUIRE(request.result() == 3 * MiB);
    cuda.finish(stream);
    CHECK(memory.same(wanted.data(), wanted.size()) == wanted.size());
  }
}

TEST_CASE("stream: memory to stage through is bounded, and goes from streams that are idle to those that are not") {
  const std::uint64_t limit = Staging::of(runtime()).limit();
  for (int round = 0; round < 2; ++round) read_on_streams(48, 1 * MiB, Demand::staged);
  Cuda cuda;
  Open open("emulated:16MiB");
  GpuMemory target(8 * MiB, Demand::staged);
  for (unsigned i = 0; i < 40; ++i) {
    const CUstream stream = cuda.stream();
    CHECK(Asked(open.handle, stream, {reading(target, 0, 8 * MiB)}).result() == 8 * MiB);
  }
  CHECK(Staging::of(runtime()).pinned() <= limit);
}
