// SPDX-License-Identifier: Apache-2.0
//
// GPU memory of the fake CUDA driver, registered, and streams on it. The fake's memory cannot be touched by the
// processor: whoever would is ended by it.
#pragma once

#include <cstdlib>
#include <random>
#include <vector>

#include "engine/staged.hpp"
#include "engine/stream.hpp"
#include "engine/stream_worker.hpp"
#include "engine/table.hpp"
#include "engine/unaligned.hpp"
#include "engine_host.hpp"
#include "fake_cuda_host.hpp"
#include "gpu/runtime.hpp"

namespace engine_test {

using engine::Stream;
using engine::StreamCall;
using engine::StreamResult;
using memory::Demand;

inline gpu::Runtime& fake_runtime() {
  static gpu::Runtime* const runtime = [] {
    setenv("UGDS_CUDA_LIBRARY", fake_cuda_path(), 1);
    std::string why;
    gpu::Runtime* found = gpu::cuda(&why);
    REQUIRE_MESSAGE(found != nullptr, why);
    return found;
  }();
  return *runtime;
}

using Data = std::vector<std::byte>;

inline Data data_of(std::size_t size, unsigned seed) {
  Data data(size);
  std::mt19937 random(seed);
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  return data;
}

/// An allocation of GPU 0 with a registration of its middle: guard bytes lie before and after.
class GpuMemory {
 public:
  static constexpr std::uint64_t kGuard = 64 * 1024;

  explicit GpuMemory(std::uint64_t size, Demand demand = Demand::none) : size_(size) {
    fake_runtime();
    CUcontext context = nullptr;
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuMemAlloc_v2(&memory_, size + 2 * kGuard));
    put(Data(size + 2 * kGuard, std::byte{0x5a}), 0);
    gpu::Allocation allocation;
    gpu::Runtime* owner = gpu::owner_of(reinterpret_cast<const void*>(memory_), allocation);
    REQUIRE(owner == &fake_runtime());
    reference_ = memory::Registry::instance().add_gpu(
        memory_ + kGuard, size, false, std::make_unique<memory::GpuBuffer>(*owner, allocation, memory_ + kGuard),
        demand);
  }
  ~GpuMemory() {
    if (reference_) CHECK(engine::close_registration(reference_) == 0);
    if (memory_ != 0) CHECK(cuMemFree_v2(memory_) == CUDA_SUCCESS);
  }
  GpuMemory(const GpuMemory&) = delete;

  const memory::Reference& reference() const { return reference_; }
  std::uint64_t size() const { return size_; }
  CUdeviceptr address() const { return memory_ + kGuard; }
  void set(const Data& data, std::uint64_t at = 0) { put(data, kGuard + at); }
  Data get(std::uint64_t at, std::uint64_t size) const {
    Data data(size);
    REQUIRE(fake_cuda_peek(data.data(), memory_ + kGuard + at, size) == 0);
    return data;
  }
  bool is_guarded() const {
    Data before(kGuard), after(kGuard);
    REQUIRE(fake_cuda_peek(before.data(), memory_, kGuard) == 0);
    REQUIRE(fake_cuda_peek(after.data(), memory_ + kGuard + size_, kGuard) == 0);
    const Data guard(kGuard, std::byte{0x5a});
    return before == guard && after == guard;
  }
  /// Under its registration.
  void free() {
    OK(cuMemFree_v2(memory_));
    memory_ = 0;
  }

 private:
  void put(const Data& data, std::uint64_t at) { REQUIRE(fake_cuda_poke(memory_ + at, data.data(), data.size()) == 0); }

  std::uint64_t size_;
  CUdeviceptr memory_ = 0;
  memory::Reference reference_{};
};

class GpuStream {
 public:
  GpuStream() : runtime_(fake_runtime()), place_(runtime_.place_of(0)) {
    stream_ = runtime_.make_stream(place_);
    ours_ = &Stream::of(runtime_, stream_, place_);
  }
  ~GpuStream() {
    fake_cuda_release_waits();
    synchronize();
    CHECK(fake_cuda_test::comes_true([&] { return ours_->idle(); }));
    runtime_.destroy_stream(place_, stream_);
  }
  GpuStream(const GpuStream&) = delete;

  Stream& ours() { return *ours_; }
  CUstream get() const { return static_cast<CUstream>(stream_); }
  int synchronize() { return runtime_.synchronize(place_, stream_); }

  std::int64_t submit(Handle& handle, const StreamCall& call) { return ours_->submit(handle, call, {}); }
  std::int64_t move(Handle& handle, Opcode opcode, const GpuMemory& memory, std::uint64_t offset, std::uint64_t size,
                    std::uint64_t at, StreamResult* result = nullptr) {
    const Transfer transfer{opcode, memory.reference(), offset, size, at};
    return submit(handle, {.requests = std::span(&transfer, 1), .result = result});
  }

 private:
  gpu::Runtime& runtime_;
  gpu::Place place_;
  gpu::StreamHandle stream_ = nullptr;
  Stream* ours_ = nullptr;
};

/// What a device has, by host memory.
inline Data stored(Handle& handle, std::uint64_t offset, std::uint64_t size) {
  Buffer buffer(size);
  REQUIRE(read(handle, buffer, offset, size) == static_cast<std::int64_t>(size));
  return {buffer.data(), buffer.data() + size};
}
inline void store(Handle& handle, std::uint64_t offset, const Data& data) {
  Buffer buffer(data.size());
  std::copy(data.begin(), data.end(), buffer.data());
  REQUIRE(write(handle, buffer, offset, data.size()) == static_cast<std::int64_t>(data.size()));
}

/// A reference for as long as it lives.
struct Result {
  StreamResult* result = StreamResult::make();
  ~Result() { result->release(); }
  StreamResult* operator->() const { return result; }
};

}  // namespace engine_test
