// SPDX-License-Identifier: Apache-2.0
//
// What the fake CUDA driver refuses, and what tests can tell it to.
#include <fcntl.h>
#include <sys/stat.h>

#include <functional>
#include <string>

#include "fake_cuda_host.hpp"

using namespace fake_cuda_test;

namespace {

constexpr std::size_t mib = 1 << 20;

}  // namespace

TEST_CASE("fake cuda: a kernel that leaves its memory spoils the context until it is made anew") {
  Gpu gpu;
  // On a GPU of its own, which nothing else in the process uses.
  CUcontext context = nullptr;
  OK(cuDevicePrimaryCtxRetain(&context, 1));
  OK(cuCtxPushCurrent_v2(context));
  CUdeviceptr device = 0;
  OK(cuMemAlloc_v2(&device, 100));
  OK(gpu.launch(gpu.kernel("ugds_fill"), nullptr, device, 101, 1));
  CHECK(cuStreamSynchronize(nullptr) == CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(cuMemAlloc_v2(&device, 100) == CUDA_ERROR_ILLEGAL_ADDRESS);
  OK(cuDevicePrimaryCtxRelease_v2(1));
  CHECK(cuMemAlloc_v2(&device, 100) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
  OK(cuDevicePrimaryCtxRetain(&context, 1));
  OK(cuMemAlloc_v2(&device, 100));
  OK(cuMemFree_v2(device));
  OK(cuDevicePrimaryCtxRelease_v2(1));
  OK(cuCtxPopCurrent_v2(nullptr));
}

TEST_CASE("fake cuda: a context that is released with work in it ends that, waits too") {
  Gpu gpu;
  CUcontext context = nullptr, again = nullptr;
  OK(cuDevicePrimaryCtxRetain(&context, 1));
  OK(cuDevicePrimaryCtxRetain(&again, 1));
  CHECK(again == context);
  OK(cuCtxPushCurrent_v2(context));
  CUstream stream = nullptr;
  OK(cuStreamCreate(&stream, CU_STREAM_DEFAULT));
  OK(cuStreamWaitValue64_v2(stream, at(gpu.word(0)), 1, 0));
  OK(cuStreamWriteValue64_v2(stream, at(gpu.word(1)), 1, 0));
  OK(cuDevicePrimaryCtxRelease_v2(1));
  CHECK(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY);
  OK(cuDevicePrimaryCtxRelease_v2(1));
  CHECK(gpu.value(1) == 0);
  CHECK(cuDevicePrimaryCtxRelease_v2(1) == CUDA_ERROR_INVALID_CONTEXT);
  OK(cuCtxPopCurrent_v2(nullptr));
}

TEST_CASE("fake cuda: what must not be captured is refused and spoils the capture") {
  Gpu gpu;
  const auto device = gpu.allocate(4096);
  const auto stream = gpu.stream(CU_STREAM_DEFAULT), other = gpu.stream();
  const auto status_of = [](CUstream s) {
    int status = 9;
    CHECK(cuStreamIsCapturing(s, &status) == CUDA_SUCCESS);
    return status;
  };
  CUgraph graph = nullptr;
  CHECK(status_of(stream) == CU_STREAM_CAPTURE_STATUS_NONE);
  CHECK(cuStreamBeginCapture_v2(nullptr, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);

  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  CHECK(status_of(stream) == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  OK(cuStreamWriteValue64_v2(stream, at(gpu.word(0)), 1, 0));
  OK(cuStreamSynchronize(other));
  OK(cuStreamEndCapture(stream, &graph));
  OK(cuStreamSynchronize(stream));
  CHECK(gpu.value(0) == 0);  // it was recorded, and did not run
  CHECK(fake_cuda_live("graphs") == 1);
  OK(cuGraphDestroy(graph));

  const std::function<CUresult()> spoilers[] = {
      [&] { return cuStreamSynchronize(stream); }, [&] { return cuStreamQuery(stream); },
      [&] { return cuMemHostUnregister(&gpu); },   [&] { return cuCtxSynchronize(); },
      [&] { return cuMemFree_v2(device); },
  };
  for (const auto& spoil : spoilers) {
    OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CHECK(spoil() == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(status_of(stream) == CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    CHECK(cuStreamWriteValue64_v2(stream, at(gpu.word(0)), 1, 0) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK(cuStreamEndCapture(stream, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  }

  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  int status = 0;
  CHECK(cuStreamIsCapturing(nullptr, &status) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  CUdeviceptr allocated = 0;
  OK(cuMemAlloc_v2(&allocated, 10));
  CHECK(cuMemcpyHtoD_v2(allocated, "a", 1) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  CHECK(cuStreamEndCapture(stream, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

  OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  {
    const Attempt elsewhere(gpu.context, [&] {
      OK(cuThreadExchangeStreamCaptureMode(&mode));
      OK(cuMemFree_v2(allocated));
    });
  }
  CHECK(mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
  CHECK(status_of(stream) == CU_STREAM_CAPTURE_STATUS_ACTIVE);

  CUevent event = nullptr;  // another stream joins the capture by waiting for an event of it
  OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  OK(cuEventRecord(event, stream));
  OK(cuStreamWaitEvent(other, event, 0));
  CHECK(status_of(other) == CU_STREAM_CAPTURE_STATUS_ACTIVE);
  OK(cuStreamEndCapture(stream, &graph));
  CHECK(status_of(other) == CU_STREAM_CAPTURE_STATUS_NONE);
  CHECK(cuEventQuery(event) == CUDA_ERROR_CAPTURED_EVENT);
  OK(cuEventDestroy_v2(event));
  OK(cuGraphDestroy(graph));
}

TEST_CASE("fake cuda: misuse gives the driver's code, is counted and told in words") {
  Gpu gpu;
  const auto device = gpu.allocate(4096);
  const auto stream = gpu.stream();
  std::uint64_t expected = 0;
  char pageable[16] = {};
  const auto is_misuse = [&](CUresult code, int wanted, const char* word) {
    CAPTURE(fake_cuda_misuse_text());
    CHECK(code == wanted);
    CHECK(fake_cuda_misuse() == ++expected);
    CHECK(std::string(fake_cuda_misuse_text()).find(word) != std::string::npos);
  };
  is_misuse(cuMemcpyHtoDAsync_v2(device, pageable, 16, stream), CUDA_ERROR_INVALID_VALUE, "not pinned");
  is_misuse(cuMemcpyDtoHAsync_v2(pageable, device, 16, stream), CUDA_ERROR_INVALID_VALUE, "not pinned");
  is_misuse(cuMemcpyHtoD_v2(device + 4090, pageable, 16), CUDA_ERROR_INVALID_VALUE, "over the end");
  is_misuse(cuMemcpyDtoDAsync_v2(device, at(pageable), 16, stream), CUDA_ERROR_INVALID_VALUE, "no memory");
  is_misuse(cuMemcpyHtoD_v2(device, reinterpret_cast<void*>(device), 16), CUDA_ERROR_INVALID_VALUE, "is GPU memory");
  is_misuse(cuStreamWriteValue64_v2(stream, at(pageable), 1, 0), CUDA_ERROR_INVALID_VALUE, "word");
  is_misuse(cuStreamWaitValue64_v2(stream, at(gpu.word(0)) + 4, 1, 0), CUDA_ERROR_INVALID_VALUE, "aligned");
  is_misuse(cuMemFree_v2(device + 512), CUDA_ERROR_INVALID_VALUE, "freed");
  is_misuse(cuMemFreeHost(gpu.word(1)), CUDA_ERROR_INVALID_VALUE, "freed");
  is_misuse(cuStreamQuery(reinterpret_cast<CUstream>(1234)), CUDA_ERROR_INVALID_HANDLE, "stream");
  CUstream gone = nullptr;
  OK(cuStreamCreate(&gone, 0));
  OK(cuStreamDestroy_v2(gone));
  is_misuse(cuStreamSynchronize(gone), CUDA_ERROR_INVALID_HANDLE, "does not exist");
  is_misuse(cuCtxSetCurrent(reinterpret_cast<CUcontext>(1234)), CUDA_ERROR_INVALID_CONTEXT, "context");

  int seen = 0;
  OK(cuLaunchHostFunc(
      stream,
      [](void* code) {
        CUdeviceptr address = 0;
        *static_cast<int*>(code) = cuMemAlloc_v2(&address, 1);
      },
      &seen));
  OK(cuStreamSynchronize(stream));
  is_misuse(seen, CUDA_ERROR_UNKNOWN, "inside a host function");
}

TEST_CASE("fake cuda: streams and kernels of another GPU than the current context's are refused, copies are not") {
  Gpu gpu;
  const auto device = gpu.allocate(4096);
  const auto stream = gpu.stream();
  const auto fill = gpu.kernel("ugds_fill");
  CUcontext context = nullptr, of_stream = nullptr;
  OK(cuDevicePrimaryCtxRetain(&context, 1));
  OK(cuCtxPushCurrent_v2(context));
  CHECK(gpu.launch(fill, stream, device, 10, 1) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(cuStreamWriteValue64_v2(stream, at(gpu.word(0)), 1, 0) == CUDA_ERROR_INVALID_HANDLE);
  OK(cuMemcpyHtoDAsync_v2(device, gpu.word(0), 8, stream));
  OK(cuStreamSynchronize(stream));
  OK(cuStreamGetCtx(stream, &of_stream));
  CHECK(of_stream == gpu.context);
  CUdevice ordinal = -1;
  OK(cuCtxGetDevice(&ordinal));
  CHECK(ordinal == 1);
  CUdeviceptr there = 0;
  OK(cuMemAlloc_v2(&there, 10));
  CHECK(attribute<int>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, there) == 1);
  OK(cuMemFree_v2(there));
  OK(cuCtxPopCurrent_v2(&of_stream));
  CHECK(of_stream == context);
  OK(cuDevicePrimaryCtxRelease_v2(1));
}

TEST_CASE("fake cuda: a thread without a context, and a child of a fork, are told so") {
  Gpu gpu;
  std::thread([&] {
    CUdeviceptr address = 0;
    CUcontext current = gpu.context;
    CHECK(cuMemAlloc_v2(&address, 10) == CUDA_ERROR_INVALID_CONTEXT);
    CHECK(cuStreamSynchronize(nullptr) == CUDA_ERROR_INVALID_CONTEXT);
    CHECK(cuCtxPopCurrent_v2(&current) == CUDA_ERROR_INVALID_CONTEXT);
    CHECK(cuCtxGetCurrent(&current) == CUDA_SUCCESS);
    CHECK(current == nullptr);
    unsigned type = 0;
    CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at(gpu.word(0))) == CUDA_SUCCESS);
    CHECK(cuCtxSetCurrent(gpu.context) == CUDA_SUCCESS);
    CHECK(cuStreamSynchronize(nullptr) == CUDA_SUCCESS);
  }).join();
  CHECK(in_child([] {
          int count = 0;
          return cuDeviceGetCount(&count);
        }) == 1000 + CUDA_ERROR_NOT_INITIALIZED);
}

TEST_CASE("fake cuda: memory is exported as a descriptor of its size, without the PCIe mapping as on the H200") {
  Gpu gpu;
  const auto device = gpu.allocate(2 * mib + 5000);
  int file = -1;
  const auto share = [&](CUdeviceptr address, std::size_t size, unsigned long long flags) {
    return cuMemGetHandleForAddressRange(&file, address, size, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, flags);
  };
  CHECK(share(device, mib, CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE) == CUDA_ERROR_NOT_SUPPORTED);
  CHECK(share(device + 512, 4096, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(share(device, 2 * mib + 5000, 0) == CUDA_ERROR_INVALID_VALUE);
  CHECK(share(device, 2 * mib + 3 * 4096, 0) == CUDA_ERROR_INVALID_VALUE);
  OK(share(device + 65536, 2 * mib - 65536 + 2 * 4096, 0));
  struct stat about {};
  CHECK(::fstat(file, &about) == 0);
  CHECK(about.st_size == 2 * mib - 65536 + 2 * 4096);
  CHECK((::fcntl(file, F_GETFD) & FD_CLOEXEC) != 0);
  ::close(file);
  fake_cuda_set("dmabuf_pcie", 1);
  OK(share(device, mib, CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE));
  ::close(file);
  CHECK(fake_cuda_live("exports") == 2);
  fake_cuda_set("dmabuf", 0);
  CHECK(share(device, mib, 0) == CUDA_ERROR_NOT_SUPPORTED);
  int supported = 1;
  OK(cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, 0));
  CHECK(supported == 0);
}

TEST_CASE("fake cuda: tests set traits, let calls fail, and count them") {
  Gpu gpu;
  const auto stream = gpu.stream();
  const auto device = gpu.allocate(4096);
  int count = 0;
  const double gpus = fake_cuda_get("gpus");
  fake_cuda_set("gpus", 5);
  OK(cuDeviceGetCount(&count));
  CHECK(count == 5);
  CHECK(fake_cuda_set("no such trait", 1) == -1);
  CHECK(fake_cuda_get("gpus") == 5);

  CHECK(fake_cuda_fail("cuDeviceGetCount", 2, 999) == 0);
  CHECK(fake_cuda_fail("cuNothing", 1, 999) == -1);
  OK(cuDeviceGetCount(&count));
  CHECK(cuDeviceGetCount(&count) == 999);
  OK(cuDeviceGetCount(&count));
  CHECK(fake_cuda_calls("cuDeviceGetCount") == 4);
  CHECK(fake_cuda_fail("cuMemAlloc_v2", 0, CUDA_ERROR_OUT_OF_MEMORY) == 0);
  CUdeviceptr address = 0;
  for (int i = 0; i < 3; i++) CHECK(cuMemAlloc_v2(&address, 10) == CUDA_ERROR_OUT_OF_MEMORY);

  fake_cuda_set("stream_words", 0);
  CHECK(cuStreamWriteValue64_v2(stream, at(gpu.word(0)), 1, 0) == CUDA_ERROR_NOT_SUPPORTED);
  OK(cuDeviceGetAttribute(&count, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 0));
  CHECK(count == 0);

  fake_cuda_set("copy_microseconds", 3000);
  fake_cuda_set("copy_bytes_per_second", 1e6);
  auto start = std::chrono::steady_clock::now();
  OK(cuMemcpyHtoDAsync_v2(device, gpu.word(0), 4000, stream));
  CHECK(std::chrono::steady_clock::now() - start < 7ms);
  OK(cuStreamSynchronize(stream));
  CHECK(std::chrono::steady_clock::now() - start >= 7ms);
  fake_cuda_reset();
  CHECK(fake_cuda_get("copy_microseconds") == 0);
  CHECK(fake_cuda_calls(nullptr) == 0);
  CHECK(fake_cuda_get("gpus") == gpus);
  CHECK(std::string(fake_cuda_path()).find("libfake_cuda.so") != std::string::npos);
}
