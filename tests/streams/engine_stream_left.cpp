// SPDX-License-Identifier: Apache-2.0
//
// What requests that were given up leave behind: staging memory, lanes, and streams that go on.
#include <cerrno>
#include <cstdlib>
#include <thread>

#include "engine/table.hpp"
#include "engine_gpu_host.hpp"

using namespace gpu_test;

namespace {

engine::Policy deadline(std::uint64_t milliseconds) {
  engine::Policy policy;
  policy.deadline_ns = milliseconds * 1'000'000;
  return policy;
}

emulator::Fault fault(emulator::Fault::Kind kind) {
  emulator::Fault made;
  made.kind = kind;
  made.abortable = false;
  made.count = 1000;
  return made;
}

/// Until nothing is left, counted; all of it is given back.
unsigned slabs_left() {
  Staging& staging = Staging::of(runtime());
  std::vector<engine::StagingArea> all;
  while (const engine::StagingArea area = staging.take(Staging::kSlab)) all.push_back(area);
  for (const engine::StagingArea& area : all) staging.give_back(area);
  return static_cast<unsigned>(all.size());
}

}  // namespace

TEST_CASE("left-pinning-again" * doctest::skip()) {
  // No memory is pinned yet, and pinning waits for streams that wait.
  Cuda cuda;
  auto closing = std::make_unique<Open>("emulated:16MiB?latency=500ms");
  Open other("emulated:16MiB");
  const CUstream stream = cuda.stream();
  GpuMemory direct(1 * MiB, Demand::direct), staged(8 * MiB, Demand::staged);
  Asked first(closing->handle, stream, {reading(direct, 0, 4 * KiB)});
  std::atomic<std::int64_t> second{1};
  std::thread submitter([&] {
    cuCtxSetCurrent(cuda.context);
    second = Asked(other.handle, stream, {reading(staged, 0, 8 * MiB)}).result();
  });
  std::this_thread::sleep_for(100ms);
  CHECK(second == 1);
  closing.reset();
  submitter.join();
  CHECK(first.result() == -ECANCELED);
  CHECK(second == 8 * MiB);
  cuda.finish(stream);
}

TEST_CASE("stream: closing a device lets a stream go on for which another submission waits in the driver") {
  CHECK(run_again("", "left-pinning-again") == 0);
}

TEST_CASE("staging: what was given up is free once the device and the stream are past it, and not before") {
  static Staging* const staging = [] {
    setenv("UGDS_STAGING", "8MiB", 1);
    auto* made = new Staging(runtime());  // NOLINT: its slabs stay pinned
    unsetenv("UGDS_STAGING");
    return made;
  }();
  memory::Ledger ledger;
  auto& registry = memory::Registry::instance();
  registry.add_ledger(ledger);
  std::atomic<std::uint64_t> reached{~std::uint64_t{0}};
  const engine::StagingArea first = staging->take(4 * MiB), second = staging->take(4 * MiB);
  REQUIRE(first);
  REQUIRE(second);
  REQUIRE(memory::hold(ledger, first.slab) == memory::Hold::held);
  staging->give_up(first, &reached, 2);
  staging->give_up(second);
  CHECK_FALSE(staging->take(4 * MiB));
  ledger.remove(first.slab.registration->index());
  const engine::StagingArea again = staging->take(4 * MiB);
  CHECK(again.data == second.data);
  CHECK_FALSE(staging->take(4 * MiB));
  reached = 2;
  CHECK(staging->take(4 * MiB).data == first.data);
  CHECK(staging->pinned() == 8 * MiB);
  registry.remove_ledger(ledger);
}

TEST_CASE("left-wedged-again" * doctest::skip()) {
  using Kind = emulator::Fault::Kind;
  Cuda cuda;
  auto& table = engine::Table::instance();
  const engine::HandleId id = table.open("emulated:16MiB?timeout=1", deadline(200));
  Open other("emulated:16MiB");
  GpuMemory target(8 * MiB, Demand::staged);
  const CUstream stream = cuda.stream();
  REQUIRE(slabs_left() == 3);
  {
    const engine::Table::Use stuck(table, id);
    for (const Kind kind : {Kind::hang, Kind::never_stopped, Kind::reset_fails})
      controller_of(*stuck).inject(fault(kind));
    CHECK(Asked(*stuck, stream, {reading(target, 0, 8 * MiB)}).result() == -ETIMEDOUT);
    CHECK(engine::run_staged(*stuck, reading(target, 0, 8 * MiB), {}) < 0);
  }
  cuda.finish(stream);
  // The stream's area may be written to until the device is stopped, and nobody has it; the other goes by another.
  CHECK(Asked(other.handle, stream, {reading(target, 0, 8 * MiB)}).result() == 8 * MiB);
  cuda.finish(stream);
  const unsigned while_wedged = slabs_left();
  {
    const engine::Table::Use stuck(table, id);
    controller_of(*stuck).clear_faults();
  }
  CHECK(table.close(id, engine::Table::Mode::force, 100'000'000) == 0);
  CHECK(slabs_left() == while_wedged + 1);
}

TEST_CASE("stream: the staging memory of a request on a wedged device is had again when the device is stopped") {
  CHECK(run_again("UGDS_STAGING=24MiB", "left-wedged-again") == 0);
}

TEST_CASE("staged: callers wait for a lane within their deadline, and may be interrupted") {
  Cuda cuda;
  Open slow("emulated:16MiB?latency=2s"), quick("emulated:16MiB", deadline(200));
  GpuMemory target(1 * MiB, Demand::staged);
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (std::uint64_t i = 0; i < 8; ++i) {
    threads.emplace_back(
        [&, i] { right += engine::run_staged(slow.handle, reading(target, 0, 4 * KiB, i * 4 * KiB), {}) == 4096; });
  }
  std::this_thread::sleep_for(200ms);
  const std::uint64_t start = monotonic_ns();
  CHECK(engine::run_staged(quick.handle, reading(target, 0, 4 * KiB), {}) == -EAGAIN);
  CHECK(last_error().message().find("threads") != std::string::npos);
  const engine::Interrupt always{[](void*) { return true; }, nullptr};
  CHECK(engine::run_staged(quick.handle, reading(target, 0, 4 * KiB), always) == -EINTR);
  CHECK(monotonic_ns() - start < 1'000'000'000);
  for (std::thread& thread : threads) thread.join();
  CHECK(right == 8);
  CHECK(engine::run_staged(quick.handle, reading(target, 0, 4 * KiB), {}) == 4096);
}

TEST_CASE("staged: more abandoned requests than lanes keep no caller waiting, and no memory for good") {
  Cuda cuda;
  Open slow("emulated:64MiB?latency=3s"), quick("emulated:16MiB");
  GpuMemory target(1 * MiB, Demand::staged);
  const engine::Interrupt always{[](void*) { return true; }, nullptr};
  std::uint64_t pinned = 0;
  for (int round = 0; round < 2; ++round) {
    const std::uint64_t start = monotonic_ns();
    for (int i = 0; i < 10; ++i) CHECK(engine::run_staged(slow.handle, reading(target, 0, 1 * MiB), always) == -EINTR);
    CHECK(engine::run_staged(quick.handle, reading(target, 0, 1 * MiB), {}) == 1 * MiB);
    CHECK(monotonic_ns() - start < 2'800'000'000);
    CHECK(slow.handle.drain(10'000'000'000));
    if (round == 0) pinned = Staging::of(runtime()).pinned();
  }
  CHECK(Staging::of(runtime()).pinned() == pinned);
}

TEST_CASE("stream: a handle that is another context's stream by now is driven there") {
  Cuda one(0);
  std::uintptr_t number = 0;
  {
    CUstream first = nullptr;
    OK(cuStreamCreate(&first, CU_STREAM_NON_BLOCKING));
    CHECK(stream_of(first).place().device == 0);
    number = reinterpret_cast<std::uintptr_t>(first);
    OK(cuStreamDestroy_v2(first));
  }
  CUcontext context = nullptr;
  OK(cuDevicePrimaryCtxRetain(&context, 1));
  OK(cuCtxPushCurrent_v2(context));
  fake_cuda_set("reuse_streams", 1);
  CUstream made = nullptr;
  OK(cuStreamCreate(&made, CU_STREAM_NON_BLOCKING));
  REQUIRE(reinterpret_cast<std::uintptr_t>(made) == number);
  CHECK(stream_of(made).place().device == 1);
  CHECK(&stream_of(made) == &stream_of(made));
  Open open("emulated:16MiB");
  {
    GpuMemory target(1 * MiB, Demand::staged);
    CHECK(Asked(open.handle, made, {reading(target, 0, 1 * MiB)}).result() == 1 * MiB);
    Cuda::finish(made);
  }
  OK(cuStreamDestroy_v2(made));
  cuCtxPopCurrent_v2(nullptr);
  cuDevicePrimaryCtxRelease_v2(1);
}

TEST_CASE("stream: values that are bound late are of one request") {
  Cuda cuda;
  Open open("emulated:16MiB");
  const CUstream stream = cuda.stream();
  GpuMemory target(1 * MiB, Demand::direct);
  const std::int64_t zero = 0;
  StreamCall call;
  call.late = {&zero, nullptr, nullptr};
  const Transfer t = reading(target, 0, 4 * KiB);
  CHECK(Asked(open.handle, stream, {t, t}, call).submitted == -EINVAL);
  CHECK(last_error().message().find("by itself") != std::string::npos);
  CHECK(Asked(open.handle, stream, {}, call).submitted == -EINVAL);
  CHECK(Asked(open.handle, stream, {t}, call).result() == 4096);
  cuda.finish(stream);
}
