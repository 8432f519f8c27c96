// SPDX-License-Identifier: Apache-2.0
//
// The C API on GPU memory and streams, where a C program could not see or bring about what is asked.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <thread>

#include "capi/gpu.hpp"
#include "engine_gpu_host.hpp"
#include "ugds.h"

using namespace gpu_test;

namespace {

/// GPU memory that only the C API knows, from a multiple of 64 KiB on.
class CMemory {
 public:
  explicit CMemory(std::uint64_t size) { OK(cuMemAlloc_v2(&address_, size)); }
  ~CMemory() { CHECK(cuMemFree_v2(address_) == CUDA_SUCCESS); }
  CMemory(const CMemory&) = delete;
  void* get() const { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address_)); }
  CUdeviceptr address() const { return address_; }

 private:
  CUdeviceptr address_ = 0;
};

bool error_says(const char* words) {
  char text[512];
  uGDSGetLastError(text, sizeof text);
  return std::strstr(text, words) != nullptr;
}

}  // namespace

TEST_CASE("c-streams-again" * doctest::skip()) {
  // CUDA is there too, and is asked first.
  runtime();
  std::string why;
  gpu::Runtime* const hip = gpu::hip(&why);
  REQUIRE_MESSAGE(hip != nullptr, why);
  const gpu::Place place = hip->place_of(0);
  const gpu::StreamHandle stream = hip->make_stream(place);
  CHECK(uGDSStreamDeregister(stream).err == UGDS_INVALID_VALUE);
  REQUIRE(uGDSStreamRegisterEx(stream, 2).err == UGDS_SUCCESS);
  CHECK(uGDSStreamDeregister(stream).err == UGDS_SUCCESS);
  hip->destroy_stream(place, stream);
}

TEST_CASE("c streams: one of HIP is found where CUDA is present too") {
  CHECK(run_again("UGDS_HIP_LIBRARY=" UGDS_FAKE_HIP " UGDS_HSA_LIBRARY=" UGDS_FAKE_HIP, "c-streams-again") == 0);
}

TEST_CASE("c rdma: a buffer with a region can be closed in no way, and a region is given back by its own buffer") {
  setenv("UGDS_IBVERBS_LIBRARY", UGDS_FAKE_IBVERBS, 1);
  Cuda cuda;
  runtime();
  CMemory memory(1 * MiB), other(1 * MiB);
  int pd = 0;
  uGDSRDMARegion_t region{}, none{};
  REQUIRE(uGDSDriverOpen().err == UGDS_SUCCESS);
  REQUIRE(uGDSBufRegister(memory.get(), 1 * MiB, 0).err == UGDS_SUCCESS);
  REQUIRE(uGDSBufRegister(other.get(), 1 * MiB, 0).err == UGDS_SUCCESS);
  CHECK(uGDSRDMARegister(static_cast<char*>(memory.get()) + 4096, &pd, 1, &region).err == UGDS_MEMORY_NOT_REGISTERED);
  REQUIRE(uGDSRDMARegister(memory.get(), &pd, 1, &region).err == UGDS_SUCCESS);
  CHECK(uGDSBufDeregister(memory.get()).err == UGDS_RDMA_REGION_ACTIVE);
  CHECK(uGDSDriverClose().err == UGDS_RDMA_REGION_ACTIVE);
  CHECK(error_says("uGDSRDMAUnregister"));
  // The buffer is there yet, and so is the driver.
  CHECK(uGDSBufRegister(memory.get(), 1 * MiB, 0).err == UGDS_MEMORY_ALREADY_REGISTERED);
  CHECK(uGDSRDMAUnregister(other.get(), &region).err == UGDS_INVALID_VALUE);
  CHECK(error_says("another buffer"));
  CHECK(uGDSRDMAUnregister(nullptr, &region).err == UGDS_INVALID_VALUE);
  CHECK(uGDSRDMAUnregister(memory.get(), &none).err == UGDS_INVALID_VALUE);
  CHECK(uGDSRDMAUnregister(memory.get(), &region).err == UGDS_SUCCESS);
  CHECK(region.mr == nullptr);
  CHECK(uGDSDriverClose().err == UGDS_SUCCESS);
}

TEST_CASE("c rdma: no region is made of a buffer that is closed meanwhile") {
  setenv("UGDS_IBVERBS_LIBRARY", UGDS_FAKE_IBVERBS, 1);
  Cuda cuda;
  runtime();
  CMemory memory(1 * MiB);
  REQUIRE(uGDSDriverOpen().err == UGDS_SUCCESS);
  std::atomic<bool> has_region{false}, over{false};
  std::atomic<int> made{0}, wrong{0};
  std::thread maker([&] {
    cuCtxSetCurrent(cuda.context);
    int pd = 0;
    uGDSRDMARegion_t region{};
    while (!over) {
      if (uGDSRDMARegister(memory.get(), &pd, 1, &region).err != UGDS_SUCCESS) continue;
      has_region = true;
      ++made;
      std::this_thread::sleep_for(50us);
      has_region = false;
      wrong += uGDSRDMAUnregister(memory.get(), &region).err != UGDS_SUCCESS;
    }
  });
  for (int i = 0; i < 300; ++i) {
    REQUIRE(uGDSBufRegister(memory.get(), 1 * MiB, 0).err == UGDS_SUCCESS);
    std::this_thread::sleep_for(20us * (i % 4));
    while (uGDSBufDeregister(memory.get()).err != UGDS_SUCCESS) std::this_thread::yield();
    for (int look = 0; look < 20; ++look) {
      wrong += has_region;
      std::this_thread::sleep_for(10us);
    }
  }
  over = true;
  maker.join();
  CHECK(made > 0);
  CHECK(wrong == 0);
  CHECK(uGDSDriverClose().err == UGDS_SUCCESS);
}

TEST_CASE("c rdma: a child of a fork has none of its parent's regions, and is not held up by them") {
  setenv("UGDS_IBVERBS_LIBRARY", UGDS_FAKE_IBVERBS, 1);
  Cuda cuda;
  runtime();
  CMemory memory(1 * MiB);
  REQUIRE(uGDSDriverOpen().err == UGDS_SUCCESS);
  REQUIRE(uGDSBufRegister(memory.get(), 1 * MiB, 0).err == UGDS_SUCCESS);
  int pd = 0;
  uGDSRDMARegion_t region{};
  REQUIRE(uGDSRDMARegister(memory.get(), &pd, 1, &region).err == UGDS_SUCCESS);
  std::atomic<bool> over{false};
  std::thread busy([&] {
    uGDSRDMARegion_t none{};
    while (!over) uGDSRDMAUnregister(memory.get(), &none);
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      alarm(5);
      _exit(uGDSRDMAUnregister(memory.get(), &region).err == UGDS_INVALID_VALUE ? 0 : 1);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
  }
  over = true;
  busy.join();
  CHECK(uGDSRDMAUnregister(memory.get(), &region).err == UGDS_SUCCESS);
  CHECK(uGDSDriverClose().err == UGDS_SUCCESS);
}

TEST_CASE("c errors: what is short or busy for now has a code that says so") {
  CHECK(capi::code_of(ENOBUFS) == UGDS_OUT_OF_MEMORY);
  CHECK(capi::code_of(EAGAIN) == UGDS_BUSY);
}

TEST_CASE("c memory: threads read into the same unregistered memory at once, and it may be registered meanwhile") {
  Cuda cuda;
  runtime();
  CMemory memory(1 * MiB);
  REQUIRE(uGDSDriverOpen().err == UGDS_SUCCESS);
  std::string uri = "emulated:16MiB";
  uGDSDescr_t descr{};
  descr.type = UGDS_HANDLE_TYPE_USERSPACE_FS;
  descr.handle.handle = uri.data();
  uGDSHandle_t fh = nullptr;
  REQUIRE(uGDSHandleRegister(&fh, &descr).err == UGDS_SUCCESS);
  const std::uint64_t before = memory::Registry::instance().open_registrations();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      cuCtxSetCurrent(cuda.context);
      for (int i = 0; i < 100; ++i) wrong += uGDSRead(fh, memory.get(), 256 * KiB, 0, 64 * KiB) != 256 * KiB;
    });
  }
  // A part of it that no request begins in.
  void* const part = static_cast<char*>(memory.get()) + 128 * KiB;
  for (int i = 0; i < 100; ++i) {
    wrong += uGDSBufRegister(part, 64 * KiB, 0).err != UGDS_SUCCESS;
    wrong += uGDSBufDeregister(part).err != UGDS_SUCCESS;
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(memory::Registry::instance().open_registrations() == before);
  CHECK(uGDSHandleDeregisterEx(fh, 1).err == UGDS_SUCCESS);
  CHECK(uGDSDriverClose().err == UGDS_SUCCESS);
}

TEST_CASE(
    "c memory: what a request left in flight on unregistered memory is closed when the device is through with it") {
  Cuda cuda;
  runtime();
  Open open("emulated:16MiB");
  CMemory memory(1 * MiB);
  auto& registry = memory::Registry::instance();
  const std::uint64_t before = registry.open_registrations();
  for (const bool ends : {true, false}) {
    CAPTURE(ends);
    memory::Ledger ledger;
    registry.add_ledger(ledger);
    memory::Reference left;
    {
      const capi::TemporaryBuffer one(memory.get(), 1 * MiB, open.handle.geometry().number);
      const capi::TemporaryBuffer two(memory.get(), 1 * MiB, open.handle.geometry().number);
      CHECK_FALSE(registry.find(memory.get()));
      left = one.reference();
      REQUIRE(memory::hold(ledger, left) == memory::Hold::held);
    }
    CHECK(registry.open_registrations() == before + 1);
    { const capi::TemporaryBuffer other(memory.get(), 1 * MiB, open.handle.geometry().number); }
    CHECK(registry.open_registrations() == before + 1);
    CHECK(left.registration->generation() == left.generation);
    // The command comes after all, or the device is stopped and its queues go.
    if (ends) {
      ledger.remove(left.registration->index());
      { const capi::TemporaryBuffer other(memory.get(), 1 * MiB, open.handle.geometry().number); }
      CHECK(registry.open_registrations() == before);
    }
    registry.remove_ledger(ledger);
    CHECK(registry.open_registrations() == before);
  }
}
