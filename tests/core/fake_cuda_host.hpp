// SPDX-License-Identifier: Apache-2.0
//
// What the tests of the fake CUDA driver share: a GPU made current, streams that wait for words, and attempts that may
// not end before something else happens.
#pragma once

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "cuda_driver.h"
#include "fake_cuda.h"

namespace fake_cuda_test {

using namespace std::chrono_literals;

#define OK(call) REQUIRE((call) == CUDA_SUCCESS)

inline CUdeviceptr at(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

/// GPU 0's context is current while this lives. What a test leaves behind is found by its end.
class Gpu {
 public:
  explicit Gpu(int connections = 8) {
    fake_cuda_reset();
    fake_cuda_set("connections", connections);
    OK(cuInit(0));
    for (const char* name : kinds) before_.push_back(fake_cuda_live(name));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxPushCurrent_v2(context));
    OK(cuMemHostAlloc(&page_, words * 64, CU_MEMHOSTALLOC_PORTABLE));
  }
  ~Gpu() {
    fake_cuda_release_waits();
    for (CUstream stream : streams_) {
      CHECK(cuStreamSynchronize(stream) == CUDA_SUCCESS);
      CHECK(cuStreamDestroy_v2(stream) == CUDA_SUCCESS);
    }
    for (CUdeviceptr address : allocations_) CHECK(cuMemFree_v2(address) == CUDA_SUCCESS);
    CHECK(cuMemFreeHost(page_) == CUDA_SUCCESS);
    CHECK(cuCtxPopCurrent_v2(nullptr) == CUDA_SUCCESS);
    CHECK(cuDevicePrimaryCtxRelease_v2(0) == CUDA_SUCCESS);
    for (std::size_t i = 0; i < std::size(kinds); i++) {
      CAPTURE(kinds[i]);
      CHECK(fake_cuda_live(kinds[i]) == before_[i]);
    }
    fake_cuda_reset();
  }
  Gpu(const Gpu&) = delete;

  /// A word that streams and the processor share, on a cache line of its own.
  std::uint64_t* word(int i) const { return static_cast<std::uint64_t*>(page_) + 8 * i; }
  std::atomic_ref<std::uint64_t> value(int i) const { return std::atomic_ref(*word(i)); }
  CUdeviceptr allocate(std::size_t size) {
    CUdeviceptr address = 0;
    OK(cuMemAlloc_v2(&address, size));
    return allocations_.emplace_back(address);
  }
  CUstream stream(unsigned flags = CU_STREAM_NON_BLOCKING) {
    CUstream made = nullptr;
    OK(cuStreamCreateWithPriority(&made, flags, -5));
    return streams_.emplace_back(made);
  }
  /// The kernel, as a module that was just loaded has it.
  CUfunction kernel(const char* name) {
    CUmodule loaded = nullptr;
    OK(cuModuleLoadData(&loaded,
                        ".version 7.0\n.target sm_70\n.visible .entry ugds_spin(\n.entry ugds_fill(\n"
                        ".visible .entry ugds_check (\n.visible .entry\nugds_copy(.entry other("));
    CUfunction function = nullptr;
    OK(cuModuleGetFunction(&function, loaded, name));
    return function;
  }
  template <class... Numbers>
  CUresult launch(CUfunction function, CUstream on, Numbers... numbers) {
    std::uint64_t values[] = {static_cast<std::uint64_t>(numbers)...};
    void* parameters[sizeof...(numbers)];
    for (std::size_t i = 0; i < sizeof...(numbers); i++) parameters[i] = &values[i];
    return cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, on, parameters, nullptr);
  }

  CUcontext context = nullptr;
  static constexpr int words = 256;
  static constexpr const char* kinds[] = {"allocations", "host_allocations", "pins",   "streams",
                                          "events",      "contexts",         "graphs", "waiting"};

 private:
  void* page_ = nullptr;
  std::vector<std::uint64_t> before_;
  std::vector<CUstream> streams_;
  std::vector<CUdeviceptr> allocations_;
};

template <class Condition>
bool comes_true(Condition&& condition) {
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(200us);
  }
  return true;
}

/// A call, or several, in a thread of their own that has the context.
class Attempt {
 public:
  Attempt(CUcontext context, std::function<void()> what)
      : thread_([this, context, what = std::move(what)] {
          cuCtxSetCurrent(context);
          what();
          over_ = true;
        }) {}
  ~Attempt() { thread_.join(); }
  bool ends() const {
    return comes_true([this] { return over_.load(); });
  }
  /// Not by now, and it would have had time.
  bool is_stuck() const {
    std::this_thread::sleep_for(15ms);
    return !over_;
  }

 private:
  std::atomic<bool> over_{false};
  std::thread thread_;
};

template <class T>
T attribute(int which, CUdeviceptr address) {
  T value{};
  CHECK(cuPointerGetAttribute(&value, which, address) == CUDA_SUCCESS);
  return value;
}

/// How a child ended that runs `what`: the signal, or 1000 and its status.
template <class What>
int in_child(What&& what) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    // Not the handlers of the test runner or of a sanitizer, which would write a report.
    ::signal(SIGSEGV, SIG_DFL);
    ::signal(SIGBUS, SIG_DFL);
    ::_exit(what());
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFSIGNALED(status) ? WTERMSIG(status) : 1000 + WEXITSTATUS(status);
}

}  // namespace fake_cuda_test
