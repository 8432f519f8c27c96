// SPDX-License-Identifier: Apache-2.0
#include <cerrno>

#include "engine_gpu_host.hpp"

using namespace gpu_test;

namespace {

/// By whichever way a caller without a stream takes.
std::int64_t go(Handle& h, const Transfer& t, const engine::Interrupt& interrupt = {}) {
  return t.buffer.registration->is_staged(h.geometry().number) ? engine::run_staged(h, t, interrupt)
                                                               : engine::run(h, t, interrupt);
}

}  // namespace

TEST_CASE("gpu memory: writes and reads of every size bring the bytes, direct and staged") {
  Cuda cuda;
  Open open("emulated:64MiB");
  Buffer host(40 * MiB);
  host.fill(1);
  for (const Demand route : kRoutes) {
    CAPTURE(static_cast<int>(route));
    GpuMemory source(40 * MiB, route), target(40 * MiB, route);
    source.poke(0, host.data(), host.size());
    std::uint64_t offset = 0;
    for (const std::uint64_t size :
         {4 * KiB, 8 * KiB, 124 * KiB, 128 * KiB, 132 * KiB, 1 * MiB, 3 * MiB + 4 * KiB, 8 * MiB + 4 * KiB, 40 * MiB}) {
      CAPTURE(size);
      offset = (offset + 4 * KiB) % (20 * MiB);
      const std::uint64_t at = size < 40 * MiB ? 4 * KiB : 0;
      REQUIRE(go(open.handle, writing(source, offset, size, at)) == static_cast<std::int64_t>(size));
      REQUIRE(go(open.handle, reading(target, offset, size, at)) == static_cast<std::int64_t>(size));
      CHECK(target.same(host.data() + at, size, at) == size);
    }
    if (route == Demand::staged) CHECK(target.bytes(0, 4) != std::vector<std::byte>(4, std::byte{0}));
  }
}

TEST_CASE("gpu memory: requests that keep to no block and no dword bring the bytes") {
  Cuda cuda;
  Open open("emulated:16MiB");
  Buffer host(4 * MiB);
  host.fill(2);
  for (const Demand route : kRoutes) {
    CAPTURE(static_cast<int>(route));
    GpuMemory source(4 * MiB, route), target(4 * MiB, route);
    source.poke(0, host.data(), host.size());
    for (const std::uint64_t size : {std::uint64_t{1}, std::uint64_t{511}, 4 * KiB, 12345 + 64 * KiB, 3 * MiB + 7}) {
      for (const std::uint64_t shift : {std::uint64_t{0}, std::uint64_t{3}, std::uint64_t{4}}) {
        CAPTURE(size);
        CAPTURE(shift);
        const auto all = static_cast<std::int64_t>(size);
        REQUIRE(engine::run_any(open.handle, writing(source, 100, size, shift), true) == all);
        REQUIRE(engine::run_any(open.handle, reading(target, 100, size, shift + 1), false) == all);
        CHECK(target.same(host.data() + shift, size, shift + 1) == size);
      }
    }
  }
}

TEST_CASE("staged: what a failed read tells to be right is right, and the next one succeeds") {
  Cuda cuda;
  Open open("emulated:64MiB");
  Buffer host(16 * MiB);
  host.fill(3);
  REQUIRE(write(open.handle, host, 0, 16 * MiB) == 16 * MiB);
  GpuMemory target(16 * MiB, Demand::staged);
  for (const std::uint64_t bad : {std::uint64_t{0}, 128 * KiB, 5 * MiB + 8 * KiB, 16 * MiB - 4 * KiB}) {
    CAPTURE(bad);
    fail_block(open.handle, bad);
    CHECK(engine::run_staged(open.handle, reading(target, 0, 16 * MiB), {}) == -EIO);
    const std::uint64_t right = last_error().completed;
    CHECK(right <= bad);
    CHECK(target.same(host.data(), right) == right);
    CHECK(last_error().length == 16 * MiB);
    CHECK(engine::run_staged(open.handle, reading(target, 0, 16 * MiB), {}) == 16 * MiB);
    CHECK(target.same(host.data(), 16 * MiB) == 16 * MiB);
    fail_block(open.handle, bad, 1);
    CHECK(engine::run_staged(open.handle, writing(target, 0, 16 * MiB), {}) == -EIO);
    CHECK(last_error().completed <= bad);
  }
}

TEST_CASE("staged: memory that was freed is refused, also when another lies there now") {
  Cuda cuda;
  Open open("emulated:16MiB");
  GpuMemory target(1 * MiB, Demand::staged);
  const Transfer t = reading(target, 0, 1 * MiB);
  target.free();
  CHECK(engine::run_staged(open.handle, t, {}) == -ESTALE);
  CUdeviceptr other = 0;
  OK(cuMemAlloc_v2(&other, 1 * MiB + 2 * GpuMemory::kGuard));
  CHECK(engine::run_staged(open.handle, t, {}) == -ESTALE);
  CHECK(cuMemFree_v2(other) == CUDA_SUCCESS);
}

TEST_CASE("staged: a caller who goes away gets EINTR, and his memory is left alone") {
  Cuda cuda;
  Open open("emulated:64MiB?latency=300ms");
  GpuMemory target(16 * MiB, Demand::staged);
  const engine::Interrupt always{[](void*) { return true; }, nullptr};
  const std::uint64_t start = monotonic_ns();
  CHECK(engine::run_staged(open.handle, reading(target, 0, 16 * MiB), always) == -EINTR);
  CHECK(monotonic_ns() - start < 2'000'000'000);
  CHECK(open.handle.drain(5'000'000'000));
  CHECK(target.bytes(0, 4 * KiB) == std::vector<std::byte>(4 * KiB, GpuMemory::kMark));
}

TEST_CASE("staged: a copy that the driver refuses fails its request only") {
  Cuda cuda;
  Open open("emulated:16MiB");
  GpuMemory target(3 * MiB, Demand::staged);
  REQUIRE(engine::run_staged(open.handle, reading(target, 0, 2 * MiB), {}) == 2 * MiB);
  struct {
    const char* name;
    unsigned nth;
    std::uint64_t at;
  } const calls[] = {// By a kernel, and where that cannot be, since it is not aligned, by the copy engine.
                     {"cuLaunchKernel", 1, 0},
                     {"cuMemcpyHtoDAsync_v2", 2, 4},
                     {"cuStreamBatchMemOp_v2", 2, 4}};
  for (const auto& [name, nth, at] : calls) {
    CAPTURE(name);
    REQUIRE(fake_cuda_fail(name, nth, CUDA_ERROR_UNKNOWN) == 0);
    CHECK(engine::run_staged(open.handle, reading(target, 0, 2 * MiB, at), {}) == -EIO);
    CHECK(last_error().message().find("CUDA_ERROR_UNKNOWN") != std::string::npos);
    CHECK(engine::run_staged(open.handle, reading(target, 0, 2 * MiB, at), {}) == 2 * MiB);
  }
}

TEST_CASE("staged: more callers than lanes get their own bytes, and nothing stays behind") {
  Cuda cuda;
  Open open("emulated:64MiB");
  const std::uint64_t registrations = memory::Registry::instance().open_registrations();
  std::atomic<int> wrong{0};
  std::uint64_t pinned = 0;
  for (int round = 0; round < 2; ++round) {
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 12; ++t) {
      threads.emplace_back([&, t] {
        cuCtxSetCurrent(cuda.context);
        GpuMemory mine(2 * MiB + 4 * KiB, Demand::staged);
        const std::uint64_t at = t % 2 * 4;  // by the copy engine, where that is not aligned
        std::vector<std::byte> bytes(2 * MiB);
        for (unsigned turn = 0; turn < 4; ++turn) {
          const std::uint64_t size = (turn % 2 == 0 ? 2 * MiB : 8 * KiB);
          for (std::uint64_t i = 0; i < size; ++i) bytes[i] = pattern(i, t * 1000 + turn);
          mine.poke(at, bytes.data(), size);
          wrong += engine::run_staged(open.handle, writing(mine, t * 4 * MiB, size, at), {}) != std::int64_t(size);
          mine.poke(at, std::vector<std::byte>(size).data(), size);
          wrong += engine::run_staged(open.handle, reading(mine, t * 4 * MiB, size, at), {}) != std::int64_t(size);
          wrong += mine.same(bytes.data(), size, at) != size;
        }
      });
    }
    for (auto& thread : threads) thread.join();
    if (round == 0) pinned = Staging::of(runtime()).pinned();
  }
  CHECK(wrong == 0);
  CHECK(Staging::of(runtime()).pinned() == pinned);
  CHECK(pinned <= Staging::of(runtime()).limit());
  CHECK(memory::Registry::instance().open_registrations() >= registrations);
  CHECK(memory::Registry::instance().open_registrations() <= registrations + pinned / Staging::kSlab);
}
