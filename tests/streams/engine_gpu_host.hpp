// SPDX-License-Identifier: Apache-2.0
//
// What tests of GPU memory and streams share: the fake CUDA driver behind the library's own runtime, memory of it with
// guards at both ends, and streams that are waited for within a bound.
#pragma once

#include <stdlib.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "engine/staged.hpp"
#include "engine/staging.hpp"
#include "engine/stream.hpp"
#include "engine/stream_worker.hpp"
#include "engine_host.hpp"
#include "fake_cuda_host.hpp"
#include "gpu/runtime.hpp"
#include "memory/gpu_buffer.hpp"

namespace gpu_test {

using namespace engine_test;
using namespace std::chrono_literals;
using engine::Staging;
using engine::Stream;
using engine::StreamCall;
using engine::StreamResult;
using fake_cuda_test::comes_true;
using memory::Demand;

constexpr std::uint64_t KiB = 1024, MiB = 1024 * KiB;

/// Before anybody looks for a driver.
inline const int named = ::setenv("UGDS_CUDA_LIBRARY", fake_cuda_path(), 1);

inline gpu::Runtime& runtime() {
  std::string why;
  gpu::Runtime* found = gpu::cuda(&why);
  REQUIRE_MESSAGE(found != nullptr, why);
  return *found;
}

/// What ugds_fill leaves.
inline std::byte pattern(std::uint64_t i, std::uint64_t seed) {
  return static_cast<std::byte>((seed + i * 2654435761U) >> 16);
}

/// A GPU's context, current while this lives.
class Cuda {
 public:
  explicit Cuda(int device = 0) : device_(device) {
    fake_cuda_reset();
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxPushCurrent_v2(context));
    OK(cuModuleLoadData(&module_,
                        ".version 7.0\n.target sm_70\n.visible .entry ugds_spin(\n.visible .entry ugds_fill(\n"
                        ".visible .entry ugds_check("));
  }
  ~Cuda() {
    for (CUstream stream : streams_) {
      finish(stream);
      CHECK(cuStreamDestroy_v2(stream) == CUDA_SUCCESS);
    }
    CHECK_MESSAGE(fake_cuda_misuse() == 0, std::string(fake_cuda_misuse_text()));
    cuModuleUnload(module_);
    cuCtxPopCurrent_v2(nullptr);
    cuDevicePrimaryCtxRelease_v2(device_);
    fake_cuda_reset();
  }
  Cuda(const Cuda&) = delete;

  CUstream stream() {
    CUstream made = nullptr;
    OK(cuStreamCreate(&made, CU_STREAM_NON_BLOCKING));
    return streams_.emplace_back(made);
  }
  /// Waits for the stream, and not for ever.
  static void finish(CUstream stream) {
    const bool over = comes_true([&] { return cuStreamQuery(stream) == CUDA_SUCCESS; });
    CHECK_MESSAGE(over, "the stream is held for ever");
    if (!over) fake_cuda_release_waits();
  }
  template <class... Numbers>
  void launch(const char* kernel, CUstream on, Numbers... numbers) {
    CUfunction function = nullptr;
    OK(cuModuleGetFunction(&function, module_, kernel));
    std::uint64_t values[] = {static_cast<std::uint64_t>(numbers)...};
    void* parameters[sizeof...(numbers)];
    for (std::size_t i = 0; i < sizeof...(numbers); i++) parameters[i] = &values[i];
    OK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, on, parameters, nullptr));
  }

  CUcontext context = nullptr;

 private:
  int device_;
  CUmodule module_ = nullptr;
  std::vector<CUstream> streams_;
};

/// Registered memory of a GPU, 64 KiB of guard on either side of it.
class GpuMemory {
 public:
  static constexpr std::uint64_t kGuard = 64 * KiB;
  static constexpr std::byte kMark{0xa5};

  explicit GpuMemory(std::uint64_t size, Demand demand = Demand::none) : size_(size) {
    OK(cuMemAlloc_v2(&base_, size + 2 * kGuard));
    const std::vector<std::byte> mark(size + 2 * kGuard, kMark);
    REQUIRE(fake_cuda_poke(base_, mark.data(), mark.size()) == 0);
    const auto found = runtime().find(address());
    REQUIRE(found);
    reference_ = memory::Registry::instance().add_gpu(
        address(), size, false, std::make_unique<memory::GpuBuffer>(runtime(), *found, address()), demand);
  }
  ~GpuMemory() {
    if (base_ != 0) {
      std::vector<std::byte> guard(kGuard);
      for (const std::uint64_t at : {std::uint64_t{base_}, address() + size_}) {
        CHECK(fake_cuda_peek(guard.data(), at, kGuard) == 0);
        CHECK(std::count(guard.begin(), guard.end(), kMark) == static_cast<std::ptrdiff_t>(kGuard));
      }
    }
    // A stream's thread lets go of it when it is run again, which takes a while on a busy machine.
    CHECK(comes_true([&] { return engine::close_registration(reference_) == 0; }));
    free();
  }
  GpuMemory(const GpuMemory&) = delete;

  void free() {
    if (base_ != 0) CHECK(cuMemFree_v2(std::exchange(base_, 0)) == CUDA_SUCCESS);
  }
  std::uint64_t address() const { return base_ + kGuard; }
  std::uint64_t size() const { return size_; }
  const memory::Reference& reference() const { return reference_; }
  std::vector<std::byte> bytes(std::uint64_t at, std::uint64_t size) const {
    std::vector<std::byte> copy(size);
    CHECK(fake_cuda_peek(copy.data(), address() + at, size) == 0);
    return copy;
  }
  void poke(std::uint64_t at, const void* from, std::uint64_t size) {
    CHECK(fake_cuda_poke(address() + at, from, size) == 0);
  }
  /// Where the memory first differs, or `size`.
  std::uint64_t same(const void* as, std::uint64_t size, std::uint64_t at = 0) const {
    const auto mine = bytes(at, size);
    const auto* theirs = static_cast<const std::byte*>(as);
    return static_cast<std::uint64_t>(std::mismatch(mine.begin(), mine.end(), theirs).first - mine.begin());
  }

 private:
  CUdeviceptr base_ = 0;
  std::uint64_t size_;
  memory::Reference reference_;
};

inline Transfer reading(const GpuMemory& m, std::uint64_t offset, std::uint64_t size, std::uint64_t at = 0) {
  return {Opcode::read, m.reference(), offset, size, at};
}
inline Transfer writing(const GpuMemory& m, std::uint64_t offset, std::uint64_t size, std::uint64_t at = 0) {
  return {Opcode::write, m.reference(), offset, size, at};
}

inline Stream& stream_of(CUstream stream) { return Stream::of(runtime(), stream, runtime().place_of(0)); }

/// One submission, and what becomes of it.
class Asked {
 public:
  Asked(Handle& handle, CUstream stream, std::vector<Transfer> requests, StreamCall call = {})
      : result_(StreamResult::make()), requests_(std::move(requests)) {
    call.requests = requests_;
    call.result = result_;
    submitted = stream_of(stream).submit(handle, call, {});
  }
  ~Asked() { result_->release(); }
  Asked(const Asked&) = delete;
  /// Bytes or -errno, when it has ended.
  std::int64_t result() {
    REQUIRE(submitted == 0);
    if (!comes_true([&] { return result_->done(); })) {
      FAIL_CHECK("the request does not end");
      return -1;
    }
    result_->look();
    return result_->result();
  }
  const Error& error() const { return result_->error(); }
  std::int64_t submitted = 0;

 private:
  StreamResult* result_;
  std::vector<Transfer> requests_;
};

inline void fail_block(Handle& handle, std::uint64_t offset, int opcode = 2) {
  emulator::Fault fault;
  fault.status = nvme::status::unrecovered_read_error;
  fault.lba = offset / 4096;
  fault.blocks = 1;
  fault.opcode = opcode;
  controller_of(handle).inject(fault);
}

/// This program again, with other surroundings, for one test.
inline int run_again(const std::string& environment, const std::string& test) {
  const std::string command = environment + " timeout 60 /proc/" + std::to_string(::getpid()) + "/exe --no-skip -tc='" +
                              test + "' >/dev/null 2>&1";
  return std::system(command.c_str());  // NOLINT: the words are ours
}

constexpr Demand kRoutes[] = {Demand::direct, Demand::staged};

}  // namespace gpu_test
