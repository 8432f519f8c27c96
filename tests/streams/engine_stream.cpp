// SPDX-License-Identifier: Apache-2.0
#include <sys/resource.h>

#include <cerrno>
#include <filesystem>
#include <map>

#include "engine_gpu_host.hpp"

using namespace gpu_test;

namespace {

/// What each worker has run, in nanoseconds, by its thread.
std::map<int, std::uint64_t> times_of_workers() {
  std::map<int, std::uint64_t> times;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    const std::string path = task.path().string() + "/";
    char name[32] = "", line[64] = "";
    if (FILE* file = std::fopen((path + "comm").c_str(), "r")) {
      if (std::fgets(name, sizeof name, file) == nullptr) name[0] = '\0';
      std::fclose(file);
    }
    if (std::strcmp(name, "ugds-streams\n") != 0) continue;
    if (FILE* file = std::fopen((path + "schedstat").c_str(), "r")) {
      if (std::fgets(line, sizeof line, file) != nullptr)
        times[std::stoi(task.path().filename().string())] = std::strtoull(line, nullptr, 10);
      std::fclose(file);
    }
  }
  return times;
}

/// The same since then, together. One of a test before may have ended meanwhile.
std::uint64_t run_since(const std::map<int, std::uint64_t>& before) {
  std::uint64_t total = 0;
  for (const auto& [thread, time] : times_of_workers()) {
    if (const auto found = before.find(thread); found != before.end()) total += time - found->second;
  }
  return total;
}

/// A word in device memory for kernels' counts, and for statuses.
struct Count {
  CUdeviceptr address = 0;
  Count() {
    OK(cuMemAlloc_v2(&address, 4096));
    set(0);
  }
  ~Count() { CHECK(cuMemFree_v2(address) == CUDA_SUCCESS); }
  Count(const Count&) = delete;
  void set(std::uint64_t value) { CHECK(fake_cuda_poke(address, &value, 8) == 0); }
  std::uint64_t get() const {
    std::uint64_t value = 0;
    CHECK(fake_cuda_peek(&value, address, 8) == 0);
    return value;
  }
};

}  // namespace

TEST_CASE("stream: reads and writes of every size bring the bytes in order, direct and staged, bound early and late") {
  Cuda cuda;
  Open open("emulated:64MiB");
  const CUstream stream = cuda.stream();
  Count wrong;
  for (const Demand route : kRoutes) {
    GpuMemory source(40 * MiB, route), target(40 * MiB, route);
    for (const bool late : {false, true}) {
      for (const std::uint64_t size :
           {4 * KiB, 256 * KiB, 260 * KiB, 2 * MiB + 4 * KiB, 8 * MiB, 8 * MiB + 4 * KiB, 13 * MiB, 40 * MiB}) {
        CAPTURE(static_cast<int>(route));
        CAPTURE(late);
        CAPTURE(size);
        // From a place in the memory that is no block's, where there is room for that.
        const std::uint64_t in = size < 40 * MiB ? 8 : 0;
        const std::uint64_t most = late ? std::min(40 * MiB, size + 1 * MiB) : size;
        std::int64_t offset = 8 * KiB, bytes = static_cast<std::int64_t>(size), at = static_cast<std::int64_t>(in);
        std::int64_t told[2] = {-1, -1};
        StreamCall call;
        if (late) call.late = {&offset, &bytes, &at};
        cuda.launch("ugds_fill", stream, source.address() + in, size, size + late);
        call.told = &told[0];
        Asked written(open.handle, stream, {writing(source, late ? 0 : 8 * KiB, most, late ? 0 : in)}, call);
        // The source is overwritten at once: the write had its bytes by then.
        cuda.launch("ugds_fill", stream, source.address() + in, size, 77);
        call.told = &told[1];
        Asked was_read(open.handle, stream, {reading(target, late ? 0 : 8 * KiB, most, late ? 0 : in)}, call);
        cuda.launch("ugds_check", stream, target.address() + in, size, size + late, wrong.address);
        cuda.finish(stream);
        CHECK(told[0] == bytes);
        CHECK(told[1] == bytes);
        CHECK(written.result() == bytes);
        CHECK(was_read.result() == bytes);
        CHECK(wrong.get() == 0);
        CHECK(fake_cuda_test::comes_true([&] { return stream_of(stream).idle(); }));
      }
    }
  }
  CHECK(stream_of(stream).take_error() == nullptr);
}

TEST_CASE("stream: groups of few and of many scattered requests, and of both directions, bring the bytes") {
  Cuda cuda;
  Open open("emulated:64MiB");
  Buffer host(16 * MiB);
  host.fill(4);
  REQUIRE(write(open.handle, host, 0, 16 * MiB) == 16 * MiB);
  const CUstream stream = cuda.stream();
  for (const Demand route : kRoutes) {
    for (const unsigned count : {0u, 1u, 3u, 8u, 9u, 300u, 2000u}) {
      CAPTURE(static_cast<int>(route));
      CAPTURE(count);
      GpuMemory target(16 * MiB, route), source(1 * MiB, route);
      source.poke(0, host.data() + 5 * MiB, 1 * MiB);
      std::vector<Transfer> list;
      for (unsigned i = 0; i < count; ++i) {
        // Every other block of the memory, from all over the device.
        const std::uint64_t size = i % 5 == 4 && count <= 300 ? 12 * KiB : 4 * KiB;
        list.push_back(reading(target, (i * 7919 % 3000) * 4 * KiB, size, i * (count <= 300 ? 16 : 8) * KiB));
      }
      list.push_back(writing(source, 20 * MiB, 1 * MiB));
      if (count == 0) list.clear();
      std::int64_t told = -1;
      StreamCall call;
      call.told = &told;
      Asked asked(open.handle, stream, list, call);
      std::int64_t all = 0;
      for (const Transfer& t : list) all += static_cast<std::int64_t>(t.size);
      CHECK(asked.result() == all);
      CHECK(told == all);
      cuda.finish(stream);
      for (const Transfer& t : list) {
        if (t.opcode == Opcode::read) REQUIRE(target.same(host.data() + t.offset, t.size, t.buffer_offset) == t.size);
      }
      if (count == 0) continue;
      Buffer back(1 * MiB);
      REQUIRE(read(open.handle, back, 20 * MiB, 1 * MiB) == 1 * MiB);
      CHECK(std::memcmp(back.data(), host.data() + 5 * MiB, 1 * MiB) == 0);
    }
  }
}

TEST_CASE("stream: a group of many writes is gathered, each to its own place") {
  Cuda cuda;
  Open open("emulated:64MiB");
  const CUstream stream = cuda.stream();
  for (const Demand route : kRoutes) {
    for (const std::uint64_t count : {3u, 9u, 700u}) {
      CAPTURE(static_cast<int>(route));
      CAPTURE(count);
      GpuMemory source(8 * MiB, route);
      cuda.launch("ugds_fill", stream, source.address(), 8 * MiB, count);
      std::vector<Transfer> list;
      // None is beside its neighbour on the device.
      const auto place = [](std::uint64_t i) { return (i * 389 + 5) % 4096 * 8 * KiB; };
      for (std::uint64_t i = 0; i < count; ++i) list.push_back(writing(source, place(i), 4 * KiB, i * 8 * KiB));
      CHECK(Asked(open.handle, stream, list).result() == static_cast<std::int64_t>(count * 4 * KiB));
      cuda.finish(stream);
      Buffer back(4 * KiB);
      for (std::uint64_t i = 0; i < count; i += 7) {
        REQUIRE(read(open.handle, back, place(i), 4 * KiB) == 4096);
        REQUIRE(source.same(back.data(), 4 * KiB, i * 8 * KiB) == 4 * KiB);
      }
    }
  }
}

TEST_CASE("stream: an error is told everywhere, poisons what was not read, and later requests are right") {
  Cuda cuda;
  Open open("emulated:64MiB");
  Buffer host(16 * MiB);
  host.fill(5);
  REQUIRE(write(open.handle, host, 0, 16 * MiB) == 16 * MiB);
  const CUstream stream = cuda.stream();
  Count status;
  for (const Demand route : kRoutes) {
    GpuMemory target(16 * MiB, route);
    for (const std::uint64_t bad : {std::uint64_t{0}, 4 * MiB + 64 * KiB, 9 * MiB, 16 * MiB - 4 * KiB}) {
      CAPTURE(static_cast<int>(route));
      CAPTURE(bad);
      fail_block(open.handle, bad);
      std::int64_t told = 0;
      StreamCall call;
      call.told = &told;
      call.status = status.address;
      Asked failed(open.handle, stream, {reading(target, 0, 16 * MiB)}, call);
      cuda.finish(stream);
      CHECK(failed.result() == -EIO);
      CHECK(told == -EIO);
      CHECK((status.get() & 0xffffffff) == EIO);
      const std::uint64_t right = failed.error().completed;
      CHECK(right <= bad);
      CHECK(target.same(host.data(), right) == right);
      CHECK(failed.error().length == 16 * MiB);
      CHECK(failed.error().status == nvme::status::unrecovered_read_error);
      CHECK(target.bytes(bad, 4 * KiB) == std::vector<std::byte>(4 * KiB, std::byte{0xdb}));
      Asked later(open.handle, stream, {reading(target, 0, 16 * MiB)}, call);
      cuda.finish(stream);
      CHECK(later.result() == 16 * MiB);
      CHECK((status.get() & 0xffffffff) == 0);
      CHECK(target.same(host.data(), 16 * MiB) == 16 * MiB);
    }
  }
  // Of a group of both directions, the write's error is the group's.
  GpuMemory target(1 * MiB, Demand::staged), source(1 * MiB, Demand::staged);
  fail_block(open.handle, 32 * MiB, 1);
  std::int64_t told = 0;
  StreamCall call;
  call.told = &told;
  Asked mixed(open.handle, stream, {reading(target, 0, 1 * MiB), writing(source, 32 * MiB, 1 * MiB)}, call);
  CHECK(mixed.result() == -EIO);
  cuda.finish(stream);
  CHECK(told == -EIO);
}

TEST_CASE("stream: a direct read of which no byte came is poisoned whole, and what its group wrote is left") {
  Cuda cuda;
  Open open("emulated:64MiB");
  const CUstream stream = cuda.stream();
  GpuMemory target(3 * MiB, Demand::direct), source(1 * MiB, Demand::direct);
  const auto marks = [](std::uint64_t size, std::byte with) { return std::vector<std::byte>(size, with); };
  fail_block(open.handle, 1 * MiB);
  std::vector<Transfer> group{reading(target, 1 * MiB, 64 * KiB), writing(source, 8 * MiB, 64 * KiB),
                              reading(target, 2 * MiB, 1 * MiB + 64 * KiB, 1 * MiB)};
  Asked asked(open.handle, stream, group);
  CHECK(asked.result() == -EIO);
  cuda.finish(stream);
  CHECK(target.bytes(0, 64 * KiB) == marks(64 * KiB, std::byte{0xdb}));
  CHECK(target.bytes(64 * KiB, 960 * KiB) == marks(960 * KiB, GpuMemory::kMark));
  CHECK(target.bytes(1 * MiB, 1 * MiB + 64 * KiB) == marks(1 * MiB + 64 * KiB, std::byte{0xdb}));
  CHECK(target.bytes(2 * MiB + 64 * KiB, 960 * KiB) == marks(960 * KiB, GpuMemory::kMark));
  CHECK(source.bytes(0, 64 * KiB) == marks(64 * KiB, GpuMemory::kMark));
}

TEST_CASE(
    "stream: a direct read that fails ends where the GPU cannot poison its memory, and nothing is poisoned later") {
  Cuda cuda;
  Open open("emulated:16MiB");
  Buffer host(1 * MiB);
  host.fill(5);
  REQUIRE(write(open.handle, host, 0, 1 * MiB) == 1 * MiB);
  const CUstream stream = cuda.stream();
  GpuMemory target(1 * MiB, Demand::direct);
  // The stream that waits holds the only one.
  fake_cuda_set("connections", 1);
  fail_block(open.handle, 0);
  const std::uint64_t start = monotonic_ns();
  {
    // Behind another one it is held by a wait, and not by a kernel.
    cuda.launch("ugds_spin", stream, 5'000'000);
    Asked before(open.handle, stream, {reading(target, 512 * KiB, 4 * KiB, 512 * KiB)});
    Asked failed(open.handle, stream, {reading(target, 0, 4 * KiB)});
    CHECK(before.result() == 4 * KiB);
    CHECK(failed.result() == -EIO);
    CHECK(monotonic_ns() - start < 1'000'000'000);
    CHECK(failed.error().message().find("old bytes") != std::string::npos);
  }
  fake_cuda_set("connections", 8);
  cuda.finish(stream);
  std::this_thread::sleep_for(100ms);
  CHECK(target.bytes(0, 4 * KiB) == std::vector<std::byte>(4 * KiB, GpuMemory::kMark));
  CHECK(Asked(open.handle, stream, {reading(target, 0, 1 * MiB)}).result() == 1 * MiB);
  cuda.finish(stream);
  CHECK(target.same(host.data(), 1 * MiB) == 1 * MiB);
  // It can be again.
  fail_block(open.handle, 0);
  CHECK(Asked(open.handle, stream, {reading(target, 0, 4 * KiB)}).result() == -EIO);
  cuda.finish(stream);
  CHECK(target.bytes(0, 4 * KiB) == std::vector<std::byte>(4 * KiB, std::byte{0xdb}));
}

TEST_CASE("stream: a direct read that fails ends while another thread waits in the driver for its stream") {
  Cuda cuda;
  Open open("emulated:16MiB?latency=300ms");
  const CUstream stream = cuda.stream();
  GpuMemory target(1 * MiB, Demand::direct);
  CUdeviceptr other = 0;
  OK(cuMemAlloc_v2(&other, 1 * MiB));
  fail_block(open.handle, 0);
  Asked failed(open.handle, stream, {reading(target, 0, 4 * KiB)});
  std::thread freeing([&] {
    cuCtxSetCurrent(cuda.context);
    CHECK(cuMemFree_v2(other) == CUDA_SUCCESS);
  });
  CHECK(failed.result() == -EIO);
  cuda.finish(stream);
  freeing.join();
}

TEST_CASE("stream: an error that nobody looked at is handed out once, in order") {
  Cuda cuda;
  Open open("emulated:16MiB");
  const CUstream stream = cuda.stream();
  GpuMemory target(1 * MiB, Demand::direct);
  StreamResult* result = StreamResult::make();
  const Transfer t = reading(target, 8 * KiB, 4 * KiB);
  StreamCall call;
  call.requests = {&t, 1};
  call.result = result;
  fail_block(open.handle, 8 * KiB);
  REQUIRE(stream_of(stream).submit(open.handle, call, {}) == 0);
  CHECK(engine::wait_for(stream_of(stream), {}) == 0);
  StreamResult* first = stream_of(stream).take_error();
  REQUIRE(first == result);
  CHECK(first->result() == -EIO);
  CHECK(stream_of(stream).take_error() == nullptr);
  first->release();
  result->release();
}

TEST_CASE("stream: values that are bound late and are bad fail their request, and touch nothing") {
  Cuda cuda;
  Open open("emulated:16MiB");
  const CUstream stream = cuda.stream();
  for (const Demand route : kRoutes) {
    CAPTURE(static_cast<int>(route));
    GpuMemory target(1 * MiB, route);
    const std::int64_t bad[][3] = {
        {100, 4096, 0}, {0, 2 * MiB, 0}, {0, 4096, 1 * MiB}, {16 * MiB, 4096, 0}, {0, -1, 0}};
    for (const auto& [offset, size, at] : bad) {
      std::int64_t told = 0;
      StreamCall call;
      call.late = {&offset, &size, &at};
      call.told = &told;
      Asked asked(open.handle, stream, {reading(target, 0, 1 * MiB)}, call);
      cuda.finish(stream);
      CHECK(asked.result() == (offset == 16 * MiB ? -ERANGE : -EINVAL));
      CHECK(told == asked.result());
      CHECK(target.bytes(0, 1 * MiB) == std::vector<std::byte>(1 * MiB, GpuMemory::kMark));
    }
  }
}

TEST_CASE("stream: memory that was freed is refused") {
  Cuda cuda;
  Open open("emulated:16MiB");
  const CUstream stream = cuda.stream();
  for (const Demand route : kRoutes) {
    GpuMemory target(1 * MiB, route);
    target.free();
    CHECK(Asked(open.handle, stream, {reading(target, 0, 4 * KiB)}).submitted == -ESTALE);
  }
}

TEST_CASE("stream: a capture is refused and nothing is enqueued") {
  Cuda cuda;
  Open open("emulated:16MiB");
  const CUstream stream = cuda.stream();
  GpuMemory target(1 * MiB, Demand::staged);
  CHECK(Asked(open.handle, stream, {reading(target, 0, 1 * MiB)}).result() == 1 * MiB);
  cuda.finish(stream);
  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  const std::uint64_t words = fake_cuda_calls("cuStreamBatchMemOp_v2");
  CHECK(Asked(open.handle, stream, {reading(target, 0, 1 * MiB)}).submitted == -EOPNOTSUPP);
  CHECK(fake_cuda_calls("cuStreamBatchMemOp_v2") == words);
  CUgraph graph = nullptr;
  OK(cuStreamEndCapture(stream, &graph));
  OK(cuGraphDestroy(graph));
  CHECK(Asked(open.handle, stream, {reading(target, 0, 1 * MiB)}).result() == 1 * MiB);
  // The thread lets go of it a moment after the stream went on.
  CHECK(comes_true([&] { return memory::Registry::instance().in_flight(target.reference()) == 0; }));
}

TEST_CASE("stream: an enqueueing that fails in the middle fails its request, and the stream goes on") {
  Cuda cuda;
  Open open("emulated:64MiB");
  Buffer host(12 * MiB);
  host.fill(6);
  REQUIRE(write(open.handle, host, 0, 12 * MiB) == 12 * MiB);
  const CUstream stream = cuda.stream();
  GpuMemory target(13 * MiB, Demand::staged), small(1 * MiB, Demand::staged);
  struct {
    const char* name;
    unsigned most;
    std::uint64_t at;
    bool busy = false;  ///< else the device begins before all is enqueued
  } const calls[] = {   // What one kernel copies, and what it does not, since it is not aligned for it.
                     {"cuLaunchKernel", 1, 0},
                     {"cuStreamBatchMemOp_v2", 1, 0, true},
                     {"cuLaunchKernel", 1, 0, true},
                     {"cuStreamBatchMemOp_v2", 3, 4},
                     {"cuMemcpyHtoDAsync_v2", 3, 4}};
  for (const auto& [name, most, at, busy] : calls) {
    for (unsigned nth = 1; nth <= most; ++nth) {
      CAPTURE(name);
      CAPTURE(nth);
      REQUIRE(comes_true([&] { return stream_of(stream).idle(); }));
      if (busy) cuda.launch("ugds_spin", stream, 2'000'000);
      REQUIRE(fake_cuda_fail(name, nth, CUDA_ERROR_UNKNOWN) == 0);
      Asked broken(open.handle, stream, {reading(target, 0, 12 * MiB, at)});
      Asked next(open.handle, stream, {reading(target, 0, 12 * MiB, at)});
      CHECK(broken.result() == -EIO);
      CHECK(next.result() == 12 * MiB);
      cuda.finish(stream);
      CHECK(target.same(host.data(), 12 * MiB, at) == 12 * MiB);
    }
  }
  // The orders of the request before are not done once more.
  std::vector<Transfer> list;
  for (unsigned i = 0; i < 20; ++i) list.push_back(reading(small, i * 4 * KiB, 4 * KiB, i * 8 * KiB));
  CHECK(Asked(open.handle, stream, list).result() == 20 * 4 * KiB);
  cuda.finish(stream);
  const std::vector<std::byte> zeros(1 * MiB);
  small.poke(0, zeros.data(), zeros.size());
  std::vector<Transfer> others;
  for (unsigned i = 0; i < 20; ++i) others.push_back(reading(target, i * 4 * KiB, 4 * KiB, i * 8 * KiB));
  REQUIRE(fake_cuda_fail("cuStreamBatchMemOp_v2", 2, CUDA_ERROR_UNKNOWN) == 0);
  CHECK(Asked(open.handle, stream, others).result() == -EIO);
  cuda.finish(stream);
  CHECK(small.same(zeros.data(), zeros.size()) == zeros.size());
}

TEST_CASE("stream: the worker sleeps while nothing is pending, and hardly runs while a stream does not arrive") {
  Cuda cuda;
  Open open("emulated:16MiB");
  const CUstream stream = cuda.stream();
  GpuMemory target(1 * MiB, Demand::direct);
  CHECK(Asked(open.handle, stream, {reading(target, 0, 1 * MiB)}).result() == 1 * MiB);
  std::this_thread::sleep_for(20ms);
  auto before = times_of_workers();
  CHECK(!before.empty());
  std::this_thread::sleep_for(200ms);
  CHECK(run_since(before) < 1'000'000);
  cuda.launch("ugds_spin", stream, 600'000'000);
  Asked asked(open.handle, stream, {reading(target, 0, 1 * MiB)});
  std::this_thread::sleep_for(50ms);
  before = times_of_workers();
  std::this_thread::sleep_for(400ms);
  const std::uint64_t spent = run_since(before);
  MESSAGE("of one core while it waits for a stream: " << double(spent) / 4'000'000 << " %");
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // whose own cost is most of it
  CHECK(spent < 20'000'000);
#endif
  CHECK(asked.result() == 1 * MiB);
}
