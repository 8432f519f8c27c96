// SPDX-License-Identifier: Apache-2.0
//
// What the fake CUDA driver does: memory, streams, events, kernels. What it refuses is in fake_cuda_refusals.cpp, what
// stalls in fake_cuda_hazards.cpp. Others' tests are worth what these hold.
#include <sys/mman.h>

#include <cstring>
#include <set>
#include <vector>

#include "fake_cuda_host.hpp"

using namespace fake_cuda_test;

namespace {

constexpr std::size_t mib = 1 << 20;

std::uint8_t pattern(std::uint64_t i, std::uint64_t seed) {
  return static_cast<std::uint8_t>(((seed + i * 2654435761) >> 16) & 0xff);
}

}  // namespace

TEST_CASE("fake cuda: the processor that touches device memory crashes, and copies reach it") {
  Gpu gpu;
  const auto device = gpu.allocate(mib);
  const std::vector<char> written(mib, 'x');
  OK(cuMemcpyHtoD_v2(device, written.data(), mib));
  CHECK(in_child([&] { return int{*reinterpret_cast<volatile char*>(device)}; }) == SIGSEGV);
  CHECK(in_child([&] {
          *reinterpret_cast<volatile char*>(device + mib - 1) = 1;
          return 0;
        }) == SIGSEGV);
  CHECK(in_child([&] { return int{*reinterpret_cast<volatile char*>(gpu.word(0))}; }) == 1000);
  std::vector<char> read(mib, 'y');
  OK(cuMemcpyDtoH_v2(read.data(), device, mib));
  CHECK(read == written);
  std::memset(read.data(), 0, 10);
  CHECK(fake_cuda_peek(read.data(), device + 5, 10) == 0);
  CHECK(read == written);
  CHECK(fake_cuda_poke(device + mib - 1, "ab", 2) == -1);
}

TEST_CASE("fake cuda: a freed address comes back with another buffer number") {
  Gpu gpu;
  std::set<unsigned long long> numbers;
  CUdeviceptr first = 0;
  for (int i = 0; i < 10; i++) {
    CUdeviceptr address = 0;
    OK(cuMemAlloc_v2(&address, 3 * mib));
    if (i == 0) first = address;
    CHECK(address == first);
    numbers.insert(attribute<unsigned long long>(CU_POINTER_ATTRIBUTE_BUFFER_ID, address + mib));
    OK(cuMemFree_v2(address));
    int value = 0;
    CHECK(cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) == CUDA_ERROR_INVALID_VALUE);
  }
  CHECK(numbers.size() == 10);
  CHECK(numbers.count(0) == 0);
}

TEST_CASE("fake cuda: small allocations share a page of the GPU's, large ones begin at 2 MiB") {
  Gpu gpu;
  const auto a = gpu.allocate(700), b = gpu.allocate(1), large = gpu.allocate(mib), larger = gpu.allocate(3 * mib + 1);
  CHECK(b == a + 1024);
  CHECK(large % (2 * mib) == 0);
  CHECK(larger == large + 2 * mib);
  CUdeviceptr base = 0;
  std::size_t size = 0;
  OK(cuMemGetAddressRange_v2(&base, &size, a + 699));
  CHECK(base == a);
  CHECK(size == 700);
  CHECK(cuMemGetAddressRange_v2(&base, &size, a + 700) == CUDA_ERROR_NOT_FOUND);
  CHECK(cuMemGetAddressRange_v2(&base, &size, at(gpu.word(0))) == CUDA_ERROR_NOT_FOUND);
}

TEST_CASE("fake cuda: attributes tell device, managed, pinned and unknown memory apart") {
  Gpu gpu;
  const auto device = gpu.allocate(1000);
  CHECK(attribute<unsigned>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, device + 999) == CU_MEMORYTYPE_DEVICE);
  CHECK(attribute<int>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, device) == 0);
  CHECK(attribute<CUcontext>(CU_POINTER_ATTRIBUTE_CONTEXT, device) == gpu.context);
  CHECK(attribute<CUdeviceptr>(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, device + 9) == device);
  CHECK(attribute<std::size_t>(CU_POINTER_ATTRIBUTE_RANGE_SIZE, device + 9) == 1000);
  CHECK(attribute<int>(CU_POINTER_ATTRIBUTE_IS_MANAGED, device) == 0);
  void* host = nullptr;
  CHECK(cuPointerGetAttribute(&host, CU_POINTER_ATTRIBUTE_HOST_POINTER, device) == CUDA_ERROR_INVALID_VALUE);

  const auto pinned = at(gpu.word(3));
  CHECK(attribute<unsigned>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pinned) == CU_MEMORYTYPE_HOST);
  CHECK(attribute<CUdeviceptr>(CU_POINTER_ATTRIBUTE_DEVICE_POINTER, pinned) == pinned);
  CHECK(attribute<void*>(CU_POINTER_ATTRIBUTE_HOST_POINTER, pinned) == gpu.word(3));

  CUdeviceptr managed = 0;
  OK(cuMemAllocManaged(&managed, 4096, CU_MEM_ATTACH_GLOBAL));
  CHECK(attribute<int>(CU_POINTER_ATTRIBUTE_IS_MANAGED, managed) == 1);
  *reinterpret_cast<volatile char*>(managed) = 1;  // this one the processor may touch
  OK(cuMemFree_v2(managed));

  int which[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_BUFFER_ID};
  unsigned type = 7;
  int ordinal = 7;
  unsigned long long id = 7;
  void* data[] = {&type, &ordinal, &id};
  OK(cuPointerGetAttributes(3, which, data, at(&gpu)));
  CHECK(type == 0);
  CHECK(ordinal == CU_DEVICE_INVALID);
  CHECK(id == 0);
  OK(cuPointerGetAttributes(3, which, data, device));
  CHECK(type == CU_MEMORYTYPE_DEVICE);
  CHECK(ordinal == 0);
}

TEST_CASE("fake cuda: host memory is pinned by the page, once") {
  Gpu gpu;
  void* memory = ::mmap(nullptr, 4 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* host = static_cast<char*>(memory);
  OK(cuMemHostRegister_v2(host, 5000, 0));
  CHECK(fake_cuda_live("pins") == 1);
  CHECK(cuMemHostRegister_v2(host + 6000, 10, 0) == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  OK(cuMemHostRegister_v2(host + 8192, 10, 0));
  CUdeviceptr device = 0;
  OK(cuMemHostGetDevicePointer_v2(&device, host + 4999, 0));
  CHECK(device == at(host + 4999));
  CHECK(cuMemHostGetDevicePointer_v2(&device, host + 5000, 0) == CUDA_ERROR_INVALID_VALUE);
  OK(cuMemHostUnregister(host));
  OK(cuMemHostUnregister(host + 8192));
  CHECK(cuMemHostUnregister(host) == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  ::munmap(memory, 4 * 4096);
  CHECK(cuMemHostRegister_v2(host, 4096, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(fake_cuda_live("pins") == 0);
}

TEST_CASE("fake cuda: a stream does its work in order, and words show that it happened") {
  Gpu gpu;
  const auto device = gpu.allocate(4096), other = gpu.allocate(4096);
  const auto stream = gpu.stream();
  CUstreamBatchMemOpParams ops[2] = {};
  ops[0].word = {CU_STREAM_MEM_OP_WRITE_VALUE_64, at(gpu.word(0)), 1, 0, 0};
  ops[1].word = {CU_STREAM_MEM_OP_WAIT_VALUE_64, at(gpu.word(1)), 5, CU_STREAM_WAIT_VALUE_GEQ, 0};
  OK(cuStreamBatchMemOp_v2(stream, 2, ops, 0));
  OK(cuMemsetD8Async(device, 9, 4096, stream));
  OK(cuMemcpyHtoDAsync_v2(device, gpu.word(2), 8, stream));
  OK(cuMemcpyDtoDAsync_v2(other, device, 4096, stream));
  OK(cuMemcpyDtoHAsync_v2(gpu.word(8), other, 16, stream));
  OK(cuStreamWriteValue64_v2(stream, at(gpu.word(4)), 3, 0));
  CHECK(comes_true([&] { return gpu.value(0) == 1; }));
  CHECK(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY);
  *gpu.word(2) = 0x1234;  // not atomic: the words order it, and the thread sanitizer would say if they did not
  gpu.value(1).store(6, std::memory_order_release);
  CHECK(comes_true([&] { return gpu.value(4).load(std::memory_order_acquire) == 3; }));
  CHECK(*gpu.word(8) == 0x1234);
  CHECK(gpu.word(8)[1] == 0x0909090909090909);
  OK(cuStreamSynchronize(stream));
  CHECK(cuStreamQuery(stream) == CUDA_SUCCESS);
}

TEST_CASE("fake cuda: a wait for a word ends as its flag says, with numbers that wrap") {
  struct Case {
    unsigned flag;
    std::uint64_t value, before, after;
    bool is_64;
  };
  const Case cases[] = {{CU_STREAM_WAIT_VALUE_GEQ, 10, 9, 11, true},
                        {CU_STREAM_WAIT_VALUE_GEQ, 2, ~std::uint64_t{0}, 2, true},
                        {CU_STREAM_WAIT_VALUE_GEQ, 0x80000000, 0x7fffffff, 0x80000000, false},
                        {CU_STREAM_WAIT_VALUE_EQ, 10, 11, 10, true},
                        {CU_STREAM_WAIT_VALUE_AND, 6, 9, 4, true},
                        {CU_STREAM_WAIT_VALUE_NOR, 0xf, ~std::uint64_t{0xf}, 1, true}};
  for (const Case& c : cases) {
    CAPTURE(c.flag);
    CAPTURE(c.value);
    Gpu gpu;
    const auto stream = gpu.stream();
    gpu.value(0) = c.before;
    CUstreamBatchMemOpParams op{};
    op.word = {c.is_64 ? CU_STREAM_MEM_OP_WAIT_VALUE_64 : CU_STREAM_MEM_OP_WAIT_VALUE_32, at(gpu.word(0)), c.value,
               c.flag, 0};
    OK(cuStreamBatchMemOp_v2(stream, 1, &op, 0));
    std::this_thread::sleep_for(3ms);
    CHECK(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY);
    gpu.value(0) = c.after;
    OK(cuStreamSynchronize(stream));
  }
}

TEST_CASE("fake cuda: the legacy stream waits for blocking streams and they for it, others do not") {
  Gpu gpu;
  const auto blocking = gpu.stream(CU_STREAM_DEFAULT), also = gpu.stream(CU_STREAM_DEFAULT), free = gpu.stream();
  OK(cuStreamWaitValue64_v2(blocking, at(gpu.word(0)), 1, 0));
  OK(cuStreamWriteValue64_v2(nullptr, at(gpu.word(1)), 1, 0));
  OK(cuStreamWriteValue64_v2(also, at(gpu.word(2)), 1, 0));
  OK(cuStreamWriteValue64_v2(reinterpret_cast<CUstream>(2), at(gpu.word(3)), 1, 0));
  OK(cuStreamWriteValue64_v2(free, at(gpu.word(4)), 1, 0));
  OK(cuStreamSynchronize(free));
  std::this_thread::sleep_for(5ms);
  for (int i = 1; i < 4; i++) CHECK(gpu.value(i) == 0);
  gpu.value(0) = 1;
  OK(cuStreamSynchronize(also));
  CHECK(gpu.value(1) == 1);
  OK(cuStreamSynchronize(reinterpret_cast<CUstream>(2)));
  for (int i = 1; i < 5; i++) CHECK(gpu.value(i) == 1);
}

TEST_CASE("fake cuda: events order streams and tell times") {
  Gpu gpu;
  const auto first = gpu.stream(), second = gpu.stream();
  CUevent start = nullptr, end = nullptr;
  OK(cuEventCreate(&start, CU_EVENT_DEFAULT));
  OK(cuEventCreate(&end, CU_EVENT_DEFAULT));
  float milliseconds = -1;
  CHECK(cuEventElapsedTime(&milliseconds, start, end) == CUDA_ERROR_INVALID_HANDLE);
  OK(cuEventQuery(start));
  OK(cuEventRecord(start, first));
  OK(cuStreamWaitValue64_v2(first, at(gpu.word(0)), 1, 0));
  OK(cuEventRecord(end, first));
  OK(cuStreamWaitEvent(second, end, 0));
  OK(cuStreamWriteValue64_v2(second, at(gpu.word(1)), 1, 0));
  OK(cuEventSynchronize(start));
  std::this_thread::sleep_for(4ms);
  CHECK(gpu.value(1) == 0);
  CHECK(cuEventQuery(end) == CUDA_ERROR_NOT_READY);
  CHECK(cuEventElapsedTime_v2(&milliseconds, start, end) == CUDA_ERROR_NOT_READY);
  gpu.value(0) = 1;
  OK(cuEventSynchronize(end));
  OK(cuStreamSynchronize(second));
  CHECK(gpu.value(1) == 1);
  OK(cuEventElapsedTime(&milliseconds, start, end));
  CHECK(milliseconds >= 4);
  OK(cuEventDestroy_v2(start));
  OK(cuEventDestroy_v2(end));
}

TEST_CASE("fake cuda: kernels fill, check, spin, and copy by an order that is read when they run") {
  Gpu gpu;
  const auto device = gpu.allocate(1000);
  const auto stream = gpu.stream();
  OK(gpu.launch(gpu.kernel("ugds_fill"), stream, device, 1000, 77));
  std::uint8_t bytes[1000];
  OK(cuStreamSynchronize(stream));
  OK(cuMemcpyDtoH_v2(bytes, device, 1000));
  for (std::size_t i = 0; i < 1000; i++) CHECK(bytes[i] == pattern(i, 77));

  const auto check = gpu.kernel("ugds_check");
  CHECK(fake_cuda_poke(device + 500, "\x55\x56", 2) == 0);
  OK(gpu.launch(check, stream, device, 1000, 77, at(gpu.word(0))));
  OK(gpu.launch(check, stream, device, 500, 77, at(gpu.word(1))));
  OK(gpu.launch(check, stream, device, 1000, 77, at(gpu.word(0))));
  OK(cuStreamSynchronize(stream));
  const std::uint64_t wrong = 2U - (bytes[500] == 0x55) - (bytes[501] == 0x56);
  CHECK(gpu.value(0) == 2 * wrong);
  CHECK(gpu.value(1) == 0);

  const auto copy = gpu.kernel("ugds_copy");
  OK(gpu.launch(copy, stream, at(gpu.word(9))));  // of no bytes: loads it
  OK(cuStreamSynchronize(stream));
  OK(cuStreamWaitValue64_v2(stream, at(gpu.word(8)), 1, 0));
  OK(gpu.launch(copy, stream, at(gpu.word(9))));
  const std::uint64_t order[] = {device, at(gpu.word(16)), 16};
  std::memcpy(gpu.word(9), order, sizeof order);
  gpu.value(8).store(1, std::memory_order_release);
  OK(cuStreamSynchronize(stream));
  CHECK(std::memcmp(gpu.word(16), bytes, 16) == 0);

  const auto start = std::chrono::steady_clock::now();
  OK(gpu.launch(gpu.kernel("ugds_spin"), stream, 5'000'000));
  OK(cuStreamSynchronize(stream));
  CHECK(std::chrono::steady_clock::now() - start >= 5ms);
}

TEST_CASE("fake cuda: a module offers the kernels that its text has as entries") {
  Gpu gpu;
  CUmodule loaded = nullptr;
  CUfunction function = nullptr;
  CHECK(cuModuleLoadData(&loaded, "no text of that kind") == CUDA_ERROR_INVALID_IMAGE);
  OK(cuModuleLoadData(&loaded, ".version 7.0\n// ugds_fill\n.visible .entry ugds_spin(.param .u64 n)"));
  OK(cuModuleGetFunction(&function, loaded, "ugds_spin"));
  CHECK(cuModuleGetFunction(&function, loaded, "ugds_fill") == CUDA_ERROR_NOT_FOUND);
  OK(cuModuleUnload(loaded));
  CHECK(gpu.launch(function, nullptr, 1) == CUDA_ERROR_INVALID_HANDLE);
}
