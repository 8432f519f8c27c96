// SPDX-License-Identifier: Apache-2.0
//
// What stalls while streams wait for words, or in host functions, was measured on an H200. The fake has to stall there
// too, or the tests that use it prove nothing.
#include <sys/mman.h>

#include <vector>

#include "fake_cuda_host.hpp"

using namespace fake_cuda_test;

namespace {

constexpr std::size_t size = 4096;

/// As many streams as asked for are held until `release`, each by a word or by a host function.
class Held {
 public:
  Held(Gpu& gpu, int count, bool by_call) : gpu_(gpu), count_(count) {
    for (int i = 0; i < count; i++) streams.push_back(gpu.stream());
    for (int i = 0; i < count; i++) {
      const auto s = streams[static_cast<std::size_t>(i)];
      const int most = by_call ? count : static_cast<int>(fake_cuda_get("connections"));
      if (by_call) {
        OK(cuLaunchHostFunc(s, spin, gpu.word(i)));
      } else {
        OK(cuStreamWaitValue64_v2(s, at(gpu.word(i)), 1, CU_STREAM_WAIT_VALUE_GEQ));
      }
      const auto want = static_cast<std::uint64_t>(std::min(i + 1, most));
      REQUIRE(comes_true([&] { return fake_cuda_live(by_call ? "calling" : "waiting") == want; }));
    }
  }
  ~Held() { release(); }
  void release() {
    for (int i = 0; i < count_; i++) gpu_.value(i).store(1, std::memory_order_release);
  }
  std::vector<CUstream> streams;

 private:
  static void spin(void* word) {
    const std::atomic_ref flag(*static_cast<std::uint64_t*>(word));
    while (flag.load(std::memory_order_acquire) == 0) std::this_thread::sleep_for(50us);
  }
  Gpu& gpu_;
  int count_;
};

enum class Outcome { ends, never };

/// What the call does while streams are held; it has to end once they are not.
void expect(Gpu& gpu, Held& held, Outcome outcome, std::function<void()> what) {
  const Attempt attempt(gpu.context, std::move(what));
  if (outcome == Outcome::ends) {
    CHECK(attempt.ends());
  } else {
    CHECK(attempt.is_stuck());
  }
  held.release();
  CHECK(attempt.ends());
}

struct Case {
  int waiting, connections;
  Outcome outcome;
};

const Case copies[] = {{1, 8, Outcome::ends},    {16, 8, Outcome::never}, {16, 32, Outcome::ends},
                       {40, 32, Outcome::never}, {1, 1, Outcome::never},  {7, 8, Outcome::ends}};

}  // namespace

TEST_CASE("fake cuda: a copy on another stream stalls behind as many waits as there are connections") {
  for (const auto& [waiting, connections, outcome] : copies) {
    CAPTURE(waiting);
    CAPTURE(connections);
    Gpu gpu(connections);
    const auto target = gpu.allocate(size);
    const auto other = gpu.stream();
    Held held(gpu, waiting, false);
    expect(gpu, held, outcome, [&] {
      cuMemcpyHtoDAsync_v2(target, gpu.word(200), 8, other);
      cuStreamSynchronize(other);
    });
  }
}

TEST_CASE("fake cuda: a loaded kernel stalls as a copy does") {
  for (const auto& [waiting, connections, outcome] : copies) {
    Gpu gpu(connections);
    const auto target = gpu.allocate(size);
    const auto other = gpu.stream();
    const auto fill = gpu.kernel("ugds_fill");
    OK(gpu.launch(fill, other, target, size, 1));
    OK(cuStreamSynchronize(other));
    Held held(gpu, waiting, false);
    expect(gpu, held, outcome, [&] {
      gpu.launch(fill, other, target, size, 1);
      cuStreamSynchronize(other);
    });
  }
}

TEST_CASE("fake cuda: the first launch of a kernel waits for streams that wait or are in a host function") {
  for (const bool by_call : {false, true}) {
    Gpu gpu;
    const auto other = gpu.stream();
    const auto spin = gpu.kernel("ugds_spin");
    Held held(gpu, 1, by_call);
    expect(gpu, held, Outcome::never, [&] { gpu.launch(spin, other, 1); });
  }
}

TEST_CASE("fake cuda: allocating and freeing, also of pinned memory, waits for streams that wait or call") {
  for (const bool by_call : {false, true}) {
    for (int what = 0; what < 5; what++) {
      CAPTURE(by_call);
      CAPTURE(what);
      Gpu gpu;
      CUdeviceptr there = 0;
      OK(cuMemAlloc_v2(&there, size));
      void* host = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      Held held(gpu, 1, by_call);
      expect(gpu, held, Outcome::never, [&] {
        CUdeviceptr device = 0;
        void* pinned = nullptr;
        if (what == 0) cuMemFree_v2(there);
        if (what == 1 && cuMemAlloc_v2(&device, size) == CUDA_SUCCESS) cuMemFree_v2(device);
        if (what == 2 && cuMemHostAlloc(&pinned, size, 0) == CUDA_SUCCESS) cuMemFreeHost(pinned);
        if (what == 3 && cuMemHostRegister_v2(host, size, 0) == CUDA_SUCCESS) cuMemHostUnregister(host);
        if (what == 4 && cuMemAllocManaged(&device, size, CU_MEM_ATTACH_GLOBAL) == CUDA_SUCCESS) cuMemFree_v2(device);
      });
      if (what != 0) OK(cuMemFree_v2(there));
      ::munmap(host, size);
    }
  }
}

TEST_CASE("fake cuda: a synchronous copy and a kernel on the legacy stream stall when all connections are held") {
  for (const int waiting : {1, 16}) {
    for (const bool is_copy : {false, true}) {
      CAPTURE(waiting);
      CAPTURE(is_copy);
      Gpu gpu;
      const auto target = gpu.allocate(size);
      const auto fill = gpu.kernel("ugds_fill");
      OK(gpu.launch(fill, nullptr, target, size, 1));
      OK(cuStreamSynchronize(nullptr));
      Held held(gpu, waiting, false);
      expect(gpu, held, waiting == 1 ? Outcome::ends : Outcome::never, [&] {
        if (is_copy) {
          cuMemcpyHtoD_v2(target, "abc", 3);
        } else {
          gpu.launch(fill, nullptr, target, size, 1);
          cuStreamSynchronize(nullptr);
        }
      });
    }
  }
}

TEST_CASE("fake cuda: streams are made and destroyed, and events recorded, while all connections are held") {
  Gpu gpu;
  Held held(gpu, 16, false);
  expect(gpu, held, Outcome::ends, [&] {
    CUstream stream = nullptr;
    CUevent event = nullptr;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS);
    CHECK(cuEventRecord(event, stream) == CUDA_SUCCESS);
    CHECK(comes_true([&] { return cuEventQuery(event) == CUDA_SUCCESS; }));
    CHECK(cuEventDestroy_v2(event) == CUDA_SUCCESS);
    CHECK(cuStreamDestroy_v2(stream) == CUDA_SUCCESS);
  });
}

TEST_CASE("fake cuda: a host function runs while all connections are held") {
  Gpu gpu;
  const auto other = gpu.stream();
  Held held(gpu, 16, false);
  expect(gpu, held, Outcome::ends, [&] {
    std::atomic<bool> ran{false};
    cuLaunchHostFunc(
        other, [](void* flag) { *static_cast<std::atomic<bool>*>(flag) = true; }, &ran);
    cuStreamSynchronize(other);
    CHECK(ran);
  });
}

TEST_CASE("fake cuda: what was enqueued behind the waits runs once the processor has set the words") {
  Gpu gpu;
  const auto target = gpu.allocate(64 * 8);
  Held held(gpu, 16, false);
  for (int i = 0; i < 16; i++) {
    gpu.value(64 + i) = static_cast<std::uint64_t>(i) + 100;
    const auto stream = held.streams[static_cast<std::size_t>(i)];
    OK(cuMemcpyHtoDAsync_v2(target + 8 * i, gpu.word(64 + i), 8, stream));
    OK(cuStreamWriteValue64_v2(stream, at(gpu.word(32 + i)), 5, 0));
  }
  held.release();
  for (int i = 0; i < 16; i++) {
    OK(cuStreamSynchronize(held.streams[static_cast<std::size_t>(i)]));
    CHECK(gpu.value(32 + i) == 5);
    std::uint64_t copied = 0;
    OK(cuMemcpyDtoH_v2(&copied, target + 8 * i, 8));
    CHECK(copied == static_cast<std::uint64_t>(i) + 100);
  }
}

TEST_CASE("fake cuda: the ninth wait does not end before one of the eight in front of it") {
  Gpu gpu;
  Held held(gpu, 9, false);
  gpu.value(8) = 1;
  std::this_thread::sleep_for(10ms);
  CHECK(cuStreamQuery(held.streams[8]) == CUDA_ERROR_NOT_READY);
  gpu.value(3) = 1;
  CHECK(comes_true([&] { return cuStreamQuery(held.streams[8]) == CUDA_SUCCESS; }));
  CHECK(cuStreamQuery(held.streams[0]) == CUDA_ERROR_NOT_READY);
}

TEST_CASE("fake cuda: blocked host functions hold no connection") {
  for (const int blocked : {1, 16}) {
    Gpu gpu(1);
    const auto target = gpu.allocate(size);
    const auto other = gpu.stream();
    const auto fill = gpu.kernel("ugds_fill");
    OK(gpu.launch(fill, other, target, size, 1));
    OK(cuStreamSynchronize(other));
    Held held(gpu, blocked, true);
    expect(gpu, held, Outcome::ends, [&] {
      cuMemcpyHtoDAsync_v2(target, gpu.word(200), 8, other);
      gpu.launch(fill, other, target, size, 1);
      cuStreamSynchronize(other);
      gpu.launch(fill, nullptr, target, size, 1);
      cuMemcpyHtoD_v2(target, "abc", 3);
    });
  }
}

TEST_CASE("fake cuda: host functions of all streams run one after another") {
  Gpu gpu;
  const auto other = gpu.stream();
  Held held(gpu, 1, true);
  expect(gpu, held, Outcome::never, [&] {
    cuLaunchHostFunc(
        other, [](void*) {}, nullptr);
    cuStreamSynchronize(other);
  });
}

TEST_CASE("fake cuda: an idle GPU takes no time of the processor") {
  Gpu gpu;
  const auto busy = [] {
    timespec now{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
  };
  for (int i = 0; i < 8; i++) OK(cuStreamSynchronize(gpu.stream()));
  const auto start = busy();
  std::this_thread::sleep_for(60ms);
  CHECK(busy() - start < 20ms);
}
