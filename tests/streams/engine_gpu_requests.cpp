// SPDX-License-Identifier: Apache-2.0
//
// Requests on GPU memory, synchronous and in stream order, on both routes.
#include <algorithm>
#include <cerrno>
#include <thread>

#include "gpu_requests_host.hpp"

using namespace engine_test;

namespace {

constexpr Demand kRoutes[] = {Demand::direct, Demand::staged};
#if defined(__SANITIZE_THREAD__)  // which takes a minute for the large ones, and engine_stream.cpp has such
constexpr std::uint64_t kSizes[] = {4096, 12288, 128 * 1024, 384 * 1024, 1_MiB};
constexpr std::uint64_t kLargest = 2_MiB;
#else
constexpr std::uint64_t kSizes[] = {4096, 12288, 128 * 1024, 384 * 1024, 1_MiB, 3_MiB + 4096, 9_MiB, 20_MiB + 8192};
constexpr std::uint64_t kLargest = 24_MiB;
#endif

}  // namespace

TEST_CASE("gpu requests: a synchronous one moves the right bytes and no others, by either route") {
  Open ssd("emulated:64MiB");
  for (const Demand demand : kRoutes) {
    GpuMemory memory(kLargest, demand);
    for (const std::uint64_t size : kSizes) {
      CAPTURE(size);
      const Data data = data_of(size, static_cast<unsigned>(size));
      memory.set(data, 4);
      REQUIRE(engine::run_any(ssd.handle, {Opcode::write, memory.reference(), 8192, size, 4}, false) ==
              static_cast<std::int64_t>(size));
      CHECK(stored(ssd.handle, 8192, size) == data);
      memory.set(Data(size, std::byte{0}), 4);
      REQUIRE(engine::run_any(ssd.handle, {Opcode::read, memory.reference(), 8192, size, 4}, false) ==
              static_cast<std::int64_t>(size));
      CHECK(memory.get(4, size) == data);
      CHECK(memory.is_guarded());
    }
  }
}

TEST_CASE("gpu requests: on a stream they move the right bytes, by either route, fixed and bound late") {
  Open ssd("emulated:64MiB");
  for (const Demand demand : kRoutes) {
    GpuMemory memory(kLargest, demand);
    GpuStream stream;
    for (const std::uint64_t size : kSizes) {
      for (const bool late : {false, true}) {
        CAPTURE(size);
        CAPTURE(late);
        const Data data = data_of(size, static_cast<unsigned>(size) + late);
        const std::int64_t offset = 16384, bytes = static_cast<std::int64_t>(size), at = 8;
        std::int64_t told = -1;
        const auto move = [&](Opcode opcode) {
          Transfer t{opcode, memory.reference(), 16384, size, 8};
          StreamCall call{.requests = std::span(&t, 1), .told = &told};
          if (late) {
            t.offset = 0;
            t.buffer_offset = 0;
            t.size = size + 8192;
            call.late = {&offset, &bytes, &at};
          }
          REQUIRE(stream.submit(ssd.handle, call) == 0);
          REQUIRE(stream.synchronize() == 0);
          CHECK(told == bytes);
        };
        memory.set(data, 8);
        move(Opcode::write);
        CHECK(stored(ssd.handle, 16384, size) == data);
        memory.set(Data(size, std::byte{0}), 8);
        move(Opcode::read);
        CHECK(memory.get(8, size) == data);
        CHECK(memory.is_guarded());
      }
    }
  }
}

TEST_CASE("gpu requests: a group of many is gathered and scattered") {
  Open ssd("emulated:64MiB");
  for (const Demand demand : kRoutes) {
    for (const std::uint32_t count : {3u, 8u, 9u, 700u}) {
      CAPTURE(count);
      GpuMemory memory(8_MiB, demand);
      GpuStream stream;
      const Data data = data_of(count * 8192, count);
      memory.set(data);
      std::vector<Transfer> requests;
      // Block i of memory goes to a place of its own on the device, and none is beside its neighbour's.
      const auto place = [&](std::uint64_t i) { return (i * 389 + 5) % 4096 * 8192; };
      for (std::uint64_t i = 0; i < count; ++i)
        requests.push_back({Opcode::write, memory.reference(), place(i), 4096, i * 8192});
      Result written;
      REQUIRE(stream.submit(ssd.handle, {.requests = requests, .result = written.result}) == 0);
      REQUIRE(stream.synchronize() == 0);
      REQUIRE(written->done());
      CHECK(written->result() == count * 4096);
      for (std::uint64_t i = 0; i < count; i += 7) {
        const auto from = data.begin() + static_cast<std::ptrdiff_t>(i * 8192);
        REQUIRE(stored(ssd.handle, place(i), 4096) == Data(from, from + 4096));
      }
      memory.set(Data(data.size(), std::byte{0}));
      for (Transfer& t : requests) t.opcode = Opcode::read;
      Result result;
      REQUIRE(stream.submit(ssd.handle, {.requests = requests, .result = result.result}) == 0);
      REQUIRE(stream.synchronize() == 0);
      REQUIRE(result->done());
      for (std::uint64_t i = 0; i < count; ++i) {
        const auto from = data.begin() + static_cast<std::ptrdiff_t>(i * 8192);
        REQUIRE(memory.get(i * 8192, 4096) == Data(from, from + 4096));
        REQUIRE(memory.get(i * 8192 + 4096, 4096) == Data(4096, std::byte{0}));
      }
    }
  }
}

TEST_CASE("gpu requests: kernels before and behind them on the stream see them in order") {
  Open ssd("emulated:64MiB");
  fake_runtime();
  fake_cuda_test::Gpu gpu(32);
  const CUfunction fill = gpu.kernel("ugds_fill"), check = gpu.kernel("ugds_check");
  *gpu.word(0) = 0;
  for (const Demand demand : kRoutes) {
    GpuMemory memory(1_MiB, demand);
    GpuStream stream;
    for (std::uint64_t i = 0; i < 100; ++i) {
      const std::uint64_t size = 4096 * (1 + i % 60);
      OK(gpu.launch(fill, stream.get(), memory.address(), size, i));
      REQUIRE(stream.move(ssd.handle, Opcode::write, memory, 0, size, 0) == 0);
      OK(gpu.launch(fill, stream.get(), memory.address(), size, 1000 + i));
      REQUIRE(stream.move(ssd.handle, Opcode::read, memory, 0, size, 0) == 0);
      OK(gpu.launch(check, stream.get(), memory.address(), size, i, fake_cuda_test::at(gpu.word(0))));
    }
    REQUIRE(stream.synchronize() == 0);
  }
  CHECK(*gpu.word(0) == 0);
}

TEST_CASE("gpu requests: streams beyond the connections are held by calls, and all of them end") {
  fake_runtime();
  fake_cuda_set("connections", 8);
  Open ssd("emulated:64MiB?latency=2ms");
  const Data data = data_of(4096 * 64, 1);
  store(ssd.handle, 0, data);
  for (const Demand demand : kRoutes) {
    if (demand == Demand::direct) continue;  // an emulated device's own copies need connections
    GpuMemory memory(4096 * 64, demand);
    std::vector<std::unique_ptr<GpuStream>> streams;
    for (int i = 0; i < 64; ++i) streams.push_back(std::make_unique<GpuStream>());
    const auto& counters = ssd.handle.stream_worker().counters();
    const std::uint64_t by_call = counters.held_by_call;
    for (std::uint64_t i = 0; i < 64; ++i)
      REQUIRE(streams[i]->move(ssd.handle, Opcode::read, memory, i * 4096, 4096, i * 4096) == 0);
    for (auto& stream : streams) REQUIRE(stream->synchronize() == 0);
    CHECK(counters.held_by_call - by_call >= 32);
    CHECK(memory.get(0, 4096 * 64) == data);
  }
  fake_cuda_reset();
}

TEST_CASE("gpu requests: more operations than a stream takes wait for room") {
  Open ssd("emulated:64MiB");
  GpuMemory memory(4096, Demand::staged);
  GpuStream stream;
  for (std::uint64_t i = 0; i < 1000; ++i)
    REQUIRE(stream.move(ssd.handle, Opcode::read, memory, i * 4096, 4096, 0) == 0);
  CHECK(stream.synchronize() == 0);
}

TEST_CASE("gpu requests: one that fails is told of, poisons its destination, and leaves the stream usable") {
  Open ssd("emulated:64MiB");
  for (const Demand demand : kRoutes) {
    GpuMemory memory(1_MiB, demand);
    GpuStream stream;
    const Data data = data_of(65536, 3);
    store(ssd.handle, 0, data);
    ssd.controller().inject({.kind = emulator::Fault::Kind::status, .status = nvme::status::unrecovered_read_error});
    Result failed, right;
    REQUIRE(stream.move(ssd.handle, Opcode::read, memory, 0, 4096, 0, failed.result) == 0);
    REQUIRE(stream.move(ssd.handle, Opcode::read, memory, 0, 65536, 8192, right.result) == 0);
    REQUIRE(stream.synchronize() == 0);
    REQUIRE(fake_cuda_test::comes_true([&] { return failed->done() && right->done(); }));
    CHECK(failed->result() == -EIO);
    CHECK(failed->error().status == nvme::status::unrecovered_read_error);
    CHECK(memory.get(0, 4096) == Data(4096, std::byte{0xdb}));
    CHECK(right->result() == 65536);
    CHECK(memory.get(8192, 65536) == data);
    StreamResult* told = stream.ours().take_error();
    REQUIRE(told == failed.result);
    told->release();
    CHECK(stream.ours().take_error() == nullptr);
  }
}

TEST_CASE("gpu requests: what a stream has pending keeps its registration and its device") {
  fake_runtime();
  fake_cuda_test::Gpu gpu(32);
  const CUfunction spin = gpu.kernel("ugds_spin");
  for (const Demand demand : kRoutes) {
    GpuStream stream;
    GpuMemory memory(1_MiB, demand);
    auto& table = engine::Table::instance();
    const engine::HandleId id = table.open("emulated:64MiB", {});
    OK(gpu.launch(spin, stream.get(), 200'000'000));
    Result result;
    {
      const engine::Table::Use handle(table, id);
      REQUIRE(stream.move(*handle, Opcode::read, memory, 0, 65536, 0, result.result) == 0);
    }
    CHECK(memory::Registry::instance().close(memory.reference()) == EBUSY);
    CHECK(table.close(id, engine::Table::Mode::check) == EBUSY);
    CHECK_FALSE(result->done());
    SUBCASE("until it is done") {
      REQUIRE(stream.synchronize() == 0);
      CHECK(table.close(id, engine::Table::Mode::wait) == 0);
      CHECK(result->result() == 65536);
    }
    SUBCASE("or the device is abandoned: then the stream goes on with an error") {
      table.abandon(id);
      CHECK(result->done());
      CHECK(result->result() == -ECANCELED);
      CHECK(stream.synchronize() == 0);
    }
  }
}

TEST_CASE("gpu requests: two devices take turns on one stream") {
  Open first("emulated:64MiB?latency=1ms"), second("emulated:64MiB");
  GpuMemory memory(1_MiB, Demand::staged);
  GpuStream stream;
  const Data data = data_of(65536, 9);
  store(first.handle, 0, data);
  for (std::uint64_t i = 0; i < 50; ++i) {
    REQUIRE(stream.move(first.handle, Opcode::read, memory, 0, 65536, 0) == 0);
    REQUIRE(stream.move(second.handle, Opcode::write, memory, i * 65536, 65536, 0) == 0);
  }
  REQUIRE(stream.synchronize() == 0);
  for (std::uint64_t i = 0; i < 50; ++i) REQUIRE(stored(second.handle, i * 65536, 65536) == data);
}

TEST_CASE("gpu requests: memory that was freed is refused") {
  Open ssd("emulated:64MiB");
  for (const Demand demand : kRoutes) {
    GpuMemory memory(65536, demand);
    GpuStream stream;
    memory.free();
    CHECK(engine::run_any(ssd.handle, {Opcode::read, memory.reference(), 0, 4096, 0}, false) == -ESTALE);
    CHECK(stream.move(ssd.handle, Opcode::read, memory, 0, 4096, 0) == -ESTALE);
  }
}

TEST_CASE("gpu requests: a capture is refused, and nothing is enqueued") {
  Open ssd("emulated:64MiB");
  GpuMemory memory(65536, Demand::staged);
  GpuStream stream;
  REQUIRE(cuStreamBeginCapture_v2(stream.get(), CU_STREAM_CAPTURE_MODE_RELAXED) == CUDA_SUCCESS);
  CHECK(stream.move(ssd.handle, Opcode::read, memory, 0, 4096, 0) == -EOPNOTSUPP);
  CUgraph graph = nullptr;
  REQUIRE(cuStreamEndCapture(stream.get(), &graph) == CUDA_SUCCESS);
  cuGraphDestroy(graph);
  CHECK(stream.move(ssd.handle, Opcode::read, memory, 0, 4096, 0) == 0);
  CHECK(stream.synchronize() == 0);
}

TEST_CASE("gpu requests: one that is enqueued in part fails and lets the stream through") {
  Open ssd("emulated:64MiB");
  GpuMemory memory(1_MiB, Demand::staged);
  GpuStream stream;
  const Data data = data_of(4096, 4);
  store(ssd.handle, 0, data);
  fake_cuda_fail("cuMemcpyHtoDAsync_v2", 1, 1);
  Result failed, right;
  REQUIRE(stream.move(ssd.handle, Opcode::read, memory, 0, 65536, 0, failed.result) == 0);
  REQUIRE(stream.move(ssd.handle, Opcode::read, memory, 0, 4096, 0, right.result) == 0);
  REQUIRE(stream.synchronize() == 0);
  REQUIRE(fake_cuda_test::comes_true([&] { return failed->done() && right->done(); }));
  CHECK(failed->result() == -EIO);
  CHECK(right->result() == 4096);
  CHECK(memory.get(0, 4096) == data);
  fake_cuda_reset();
}

TEST_CASE("gpu requests: threads stage at once") {
  Open ssd("emulated:64MiB");
  GpuMemory memory(16_MiB, Demand::staged);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (std::uint64_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const Data data = data_of(1_MiB, static_cast<unsigned>(i));
      fake_cuda_poke(memory.address() + i * 4_MiB, data.data(), data.size());
      for (int turn = 0; turn < 10; ++turn) {
        const auto size = static_cast<std::int64_t>(1_MiB);
        wrong += engine::run_any(ssd.handle, {Opcode::write, memory.reference(), i * 4_MiB, 1_MiB, i * 4_MiB}, false) !=
                 size;
        wrong += engine::run_any(ssd.handle, {Opcode::read, memory.reference(), i * 4_MiB, 1_MiB, i * 4_MiB + 2_MiB},
                                 false) != size;
      }
      Data got(1_MiB);
      fake_cuda_peek(got.data(), memory.address() + i * 4_MiB + 2_MiB, got.size());
      wrong += got != data;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("gpu requests: staging memory is bounded") { CHECK(engine::Staging::of(fake_runtime()).pinned() <= 256_MiB); }
