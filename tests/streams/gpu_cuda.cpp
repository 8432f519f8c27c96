// SPDX-License-Identifier: Apache-2.0
#include <cerrno>

#include "engine_gpu_host.hpp"

using namespace gpu_test;

namespace {

template <class Body>
int code_of(Body&& body) {
  try {
    body();
    return 0;
  } catch (const Failure& failure) {
    CHECK(!failure.error().message().empty());
    return failure.error().code;
  }
}

}  // namespace

TEST_CASE("cuda: an address is found with its allocation, and host and managed memory is not") {
  Cuda cuda;
  CUdeviceptr address = 0, managed = 0;
  OK(cuMemAlloc_v2(&address, 1 * MiB));
  const auto found = runtime().find(address + 4097);
  REQUIRE(found);
  CHECK(found->base == address);
  CHECK(found->size == 1 * MiB);
  CHECK(found->id != 0);
  CHECK(found->place == gpu::Place{0, cuda.context});
  int here = 0;
  CHECK(!runtime().find(reinterpret_cast<std::uintptr_t>(&here)));
  void* pinned = nullptr;
  OK(cuMemHostAlloc(&pinned, 4096, 0));
  CHECK(!runtime().find(reinterpret_cast<std::uintptr_t>(pinned)));
  OK(cuMemFreeHost(pinned));
  OK(cuMemAllocManaged(&managed, 4096, CU_MEM_ATTACH_GLOBAL));
  CHECK(code_of([&] { static_cast<void>(runtime().find(managed)); }) == EOPNOTSUPP);
  OK(cuMemFree_v2(managed));
  OK(cuMemFree_v2(address));
  CHECK(!runtime().find(address));
}

TEST_CASE("cuda: memory that was freed is not alive, also where other memory lies there now") {
  Cuda cuda;
  CUdeviceptr address = 0;
  OK(cuMemAlloc_v2(&address, 1 * MiB));
  const auto found = runtime().find(address);
  REQUIRE(found);
  CHECK(runtime().is_alive(*found, address + 100));
  OK(cuMemFree_v2(address));
  CHECK(!runtime().is_alive(*found, address));
  CUdeviceptr again = 0;
  OK(cuMemAlloc_v2(&again, 1 * MiB));
  CHECK(!runtime().is_alive(*found, address));
  OK(cuMemFree_v2(again));
}

TEST_CASE("cuda: words go both ways, from a thread without a context") {
  Cuda cuda;
  const CUstream stream = cuda.stream();
  const gpu::Place place = runtime().place_of_stream(stream, {});
  CHECK(place == gpu::Place{0, cuda.context});
  std::thread([&] {
    const gpu::Word word = runtime().make_word(), other = runtime().make_word();
    CHECK(word.host->load() == 0);
    using Op = gpu::WordOp;
    const Op ops[] = {
        {Op::Kind::write, word.device, 7}, {Op::Kind::wait, other.device, 3}, {Op::Kind::write, word.device, 8}};
    CHECK(runtime().enqueue_words(place, stream, ops) == 0);
    CHECK(comes_true([&] { return word.host->load() == 7; }));
    std::this_thread::sleep_for(5ms);
    CHECK(word.host->load() == 7);
    other.host->store(4);
    CHECK(runtime().synchronize(place, stream) == 0);
    CHECK(word.host->load() == 8);
    const std::vector<Op> many(9, Op{Op::Kind::write, word.device, 1});
    CHECK(runtime().enqueue_words(place, stream, many) != 0);
    runtime().free_word(word);
    runtime().free_word(other);
    CHECK(runtime().make_word().host->load() == 0);
  }).join();
}

TEST_CASE("cuda: copies bring the bytes from a thread without a context, many at once") {
  Cuda cuda;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (unsigned t = 0; t < 12; ++t) {
    threads.emplace_back([&, t] {
      const gpu::Place place = runtime().place_of(static_cast<int>(t % 2));
      CUdeviceptr address = 0;
      cuCtxSetCurrent(static_cast<CUcontext>(place.context));
      wrong += cuMemAlloc_v2(&address, 64 * KiB) != CUDA_SUCCESS;
      cuCtxSetCurrent(nullptr);
      std::vector<std::byte> out(64 * KiB, static_cast<std::byte>(t)), in(64 * KiB);
      for (int i = 0; i < 20; ++i) {
        wrong += runtime().copy_to_device(place, address, out.data(), out.size());
        wrong += runtime().copy_from_device(place, in.data(), address, in.size());
        wrong += in != out;
      }
      cuCtxSetCurrent(static_cast<CUcontext>(place.context));
      wrong += cuMemFree_v2(address) != CUDA_SUCCESS;
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("cuda: what the driver refuses is said with its code and words") {
  Cuda cuda;
  CHECK(runtime().words(CUDA_ERROR_INVALID_VALUE).find("CUDA_ERROR_INVALID_VALUE (1)") == 0);
  CHECK(runtime().words(12345).find("12345") != std::string::npos);
  CHECK(code_of([] { static_cast<void>(runtime().place_of(99)); }) == ENODEV);
  std::vector<std::byte> bytes(64 * KiB);
  REQUIRE(fake_cuda_fail("cuMemHostRegister_v2", 1, CUDA_ERROR_OUT_OF_MEMORY) == 0);
  CHECK(code_of([&] { runtime().pin(bytes.data(), bytes.size()); }) == ENOMEM);
  REQUIRE(fake_cuda_fail("cuMemHostGetDevicePointer_v2", 1, CUDA_ERROR_INVALID_VALUE) == 0);
  const std::uint64_t pins = fake_cuda_live("pins");
  CHECK(code_of([&] { runtime().pin(bytes.data(), bytes.size()); }) == EOPNOTSUPP);
  CHECK(fake_cuda_live("pins") == pins);
  CHECK(runtime().pin(bytes.data(), bytes.size()) != 0);
  runtime().unpin(bytes.data());
  CUdeviceptr address = 0;
  OK(cuMemAlloc_v2(&address, 1 * MiB));
  CHECK(code_of([&] { runtime().export_dmabuf(runtime().place_of(0), address, 1 * MiB, true); }) == EOPNOTSUPP);
  CHECK(runtime().export_dmabuf(runtime().place_of(0), address, 1 * MiB, false).get() >= 0);
  OK(cuMemFree_v2(address));
}

TEST_CASE("cuda: UGDS_GPUS and the number of connections are what the environment says") {
  Cuda cuda;
  CUdeviceptr address = 0;
  OK(cuMemAlloc_v2(&address, 4096));
  const char* connections = ::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  if (connections == nullptr) {
    CHECK(runtime().connections(0) == 8);
    for (const auto& [text, number] : {std::pair{"1", 1}, {"32", 32}, {"33", 8}, {"no", 8}}) {
      ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", text, 1);
      CHECK(runtime().connections(0) == number);
    }
    ::unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  }
  ::setenv("UGDS_GPUS", "1", 1);
  CHECK(code_of([&] { static_cast<void>(runtime().find(address)); }) == ENODEV);
  CHECK(code_of([] { static_cast<void>(runtime().place_of(0)); }) == ENODEV);
  CHECK(code_of([] { static_cast<void>(runtime().place_of(1)); }) == 0);
  ::unsetenv("UGDS_GPUS");
  CHECK(runtime().find(address));
  OK(cuMemFree_v2(address));
}
