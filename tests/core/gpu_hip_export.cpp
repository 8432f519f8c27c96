// SPDX-License-Identifier: Apache-2.0
//
// DMA-BUFs of HIP memory: where in them the memory is, and that memory which left the GPU for it is refused.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "gpu/hip.hpp"
#include "gpu_fake_hip.hpp"

using namespace ugds;
using namespace ugds::gpu;
using namespace gpu_test;

namespace {

constexpr std::uint64_t kMiB = 1 << 20;

/// Memory of GPU 0 with known bytes in it.
struct Memory {
  explicit Memory(FakeHip& in, std::size_t bytes) : fake(in) {
    address = reinterpret_cast<Address>(fake.allocate(bytes, 0));
    fake.write(address, "at the start", 12);
    fake.write(address + kMiB, "a megabyte on", 13);
  }
  ~Memory() { fake.free(reinterpret_cast<void*>(address)); }
  FakeHip& fake;
  Address address = 0;
};

std::string bytes_at(int descriptor, std::uint64_t offset, std::size_t bytes) {
  std::string text(bytes, '\0');
  CHECK(pread(descriptor, text.data(), bytes, static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes));
  return text;
}

std::string refusal(HipRuntime& runtime, Address address, std::uint64_t size, bool pcie = false) {
  const Error error = error_of([&] { runtime.export_range(Place{0, nullptr}, address, size, pcie); });
  CHECK(error.code == EOPNOTSUPP);
  return error.message();
}

int open_descriptors() {
  int count = 0;
  for (int i = 0; i < 256; ++i) count += fcntl(i, F_GETFD) >= 0;
  return count;
}

}  // namespace

TEST_CASE("hip export: the memory is at the offset of the DMA-BUF that comes with it") {
  FakeHip& fake = fake_hip_library();
  const auto runtime = open_hip();
  fake.set_lead(3 * 4096);
  const Memory memory(fake, 2 * kMiB);
  for (const bool pcie : {false, true}) {
    const auto whole = runtime->export_range(Place{0, nullptr}, memory.address, 2 * kMiB, pcie);
    CHECK(whole.offset == 3 * 4096);
    CHECK(bytes_at(whole.descriptor.get(), whole.offset, 12) == "at the start");
    CHECK((fcntl(whole.descriptor.get(), F_GETFD) & FD_CLOEXEC) != 0);
  }
  CHECK(fake.calls("hsa_amd_portable_export_dmabuf") == 1);
  CHECK(fake.calls("hsa_amd_portable_export_dmabuf_v2") == 1);
  const auto part = runtime->export_range(Place{0, nullptr}, memory.address + kMiB, 65536, false);
  CHECK(bytes_at(part.descriptor.get(), part.offset, 13) == "a megabyte on");
}

TEST_CASE("hip export: without an offset it is given only where there is none") {
  FakeHip& fake = fake_hip_library();
  const auto runtime = open_hip();
  const Memory memory(fake, 2 * kMiB);
  const Descriptor whole = runtime->export_dmabuf(Place{0, nullptr}, memory.address, 2 * kMiB, false);
  CHECK(bytes_at(whole.get(), 0, 12) == "at the start");
  const int before = open_descriptors();
  const Error error = error_of([&] { runtime->export_dmabuf(Place{0, nullptr}, memory.address + kMiB, 65536, false); });
  CHECK(error.code == EOPNOTSUPP);
  CHECK(holds(error.message(), "1048576 bytes into the DMA-BUF"));
  CHECK(open_descriptors() == before);
}

TEST_CASE("hip export: memory that left the GPU for it is refused") {
  FakeHip& fake = fake_hip_library();
  const auto runtime = open_hip();
  for (const auto& [migration, words] : {std::pair(FakeMigration::to_host, "moved the memory to the host"),
                                         {FakeMigration::to_managed, "moved the memory to the host"},
                                         {FakeMigration::to_other_agent, "to another agent"},
                                         {FakeMigration::to_other_device, "that of GPU 1"}}) {
    const Memory memory(fake, 2 * kMiB);
    fake.set_migration(migration);
    const int before = open_descriptors();
    CHECK(holds(refusal(*runtime, memory.address, 2 * kMiB), words));
    CHECK(open_descriptors() == before);
    fake.set_migration(FakeMigration::none);
  }
  const Memory memory(fake, 2 * kMiB);
  fake.fail("hipPointerGetAttributes", 1, 1);
  CHECK(holds(refusal(*runtime, memory.address, 2 * kMiB), "not known any more"));
  // Where HSA does not say whose it is, HIP's word counts.
  fake.fail("hsa_amd_pointer_info", 1, 0x1001);
  CHECK(runtime->export_range(Place{0, nullptr}, memory.address, 2 * kMiB, false).descriptor);
}

TEST_CASE("hip export: a refusal carries the runtime's code and words") {
  FakeHip& fake = fake_hip_library();
  const auto runtime = open_hip();
  const Memory memory(fake, 2 * kMiB);
  const std::string beyond = refusal(*runtime, memory.address, 3 * kMiB);
  CHECK(holds(beyond, "4099: the requested allocation is not valid"));
  CHECK(holds(beyond, "PCI_P2PDMA"));
  fake.fail("hsa_amd_portable_export_dmabuf_v2", 1, 0x1008);
  CHECK(holds(refusal(*runtime, memory.address, kMiB, true), "failed: 4104"));
  fake.set_exported_number(-1);
  CHECK(holds(refusal(*runtime, memory.address, kMiB), "gave no descriptor"));
  fake.reset();
  fake.fail("hipGetDevice", 1, 3);
  CHECK(holds(refusal(*runtime, memory.address, kMiB), "hipSetDevice"));
}

TEST_CASE("hip export: without HSA's function, HIP's own does for whole allocations") {
  FakeHip& fake = fake_hip_library();
  Variable library("UGDS_HSA_LIBRARY", "libm.so.6");
  const auto runtime = open_hip();
  const Memory memory(fake, 2 * kMiB);
  for (const bool pcie : {false, true}) {
    const auto whole = runtime->export_range(Place{0, nullptr}, memory.address, 2 * kMiB, pcie);
    CHECK(whole.offset == 0);
    CHECK(bytes_at(whole.descriptor.get(), 0, 12) == "at the start");
  }
  CHECK(fake.calls("hipMemGetHandleForAddressRange") == 2);
  CHECK(holds(refusal(*runtime, memory.address + kMiB, kMiB), "whole allocations alone"));
  CHECK(holds(refusal(*runtime, memory.address, kMiB), "whole allocations alone"));
  CHECK(holds(refusal(*runtime, memory.address + kMiB, 2 * kMiB), "whole allocations alone"));
  fake.fail("hipMemGetAddressRange", 1, 1);
  CHECK(holds(refusal(*runtime, memory.address, 2 * kMiB), "hipMemGetAddressRange failed"));
  fake.fail("hipMemGetHandleForAddressRange", 1, 801);
  CHECK(holds(refusal(*runtime, memory.address, 2 * kMiB), "hipErrorNotSupported"));
  fake.set_lead(4096);
  const Memory inside(fake, 2 * kMiB);
  const int before = open_descriptors();
  CHECK(holds(refusal(*runtime, inside.address, 2 * kMiB), "without saying where"));
  CHECK(open_descriptors() == before);
}

TEST_CASE("hip export: where HSA cannot be initialised it is not asked") {
  FakeHip& fake = fake_hip_library();
  fake.fail("hsa_init", 1, 0x1000);
  const auto runtime = open_hip();
  const Memory memory(fake, 2 * kMiB);
  CHECK(runtime->export_range(Place{0, nullptr}, memory.address, 2 * kMiB, false).descriptor);
  CHECK(fake.calls("hsa_amd_portable_export_dmabuf") == 0);
}

TEST_CASE("hip export: an old ROCm lacks words and exports, and says so") {
  FakeHip& fake = fake_hip_library(UGDS_FAKE_HIP_OLD);
  const auto runtime = open_hip();
  const Memory memory(fake, 2 * kMiB);
  CHECK_FALSE(runtime->has_words(0));
  const Error error = error_of([&] { runtime->make_word(); });
  CHECK(error.code == EOPNOTSUPP);
  CHECK(holds(error.message(), "hipExtMallocWithFlags"));
  const WordOp ops[] = {{WordOp::Kind::write, memory.address, 1}};
  CHECK(runtime->enqueue_words(Place{0, nullptr}, nullptr, ops) == 801);
  CHECK(holds(refusal(*runtime, memory.address, kMiB), "neither HSA nor HIP has a function"));
  CHECK(holds(refusal(*runtime, memory.address, kMiB, true), "with the PCIe mapping"));
  char byte = 3;
  CHECK(runtime->copy_to_device(Place{0, nullptr}, memory.address, &byte, 1) == 0);
  fake_hip_library();
}
