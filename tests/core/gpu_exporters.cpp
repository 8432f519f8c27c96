// SPDX-License-Identifier: Apache-2.0
//
// The providers of DMA-BUFs: in which order they are asked, for which range, and what is not believed.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <vector>

#include "fake_device.hpp"
#include "gpu/exporters.hpp"
#include "gpu_fake_hip.hpp"
#include "memory/gpu_buffer.hpp"

using namespace ugds;
using namespace ugds::gpu;
using namespace gpu_test;

namespace {

constexpr std::uint64_t kGranule = 64 << 10;
constexpr Address kBase = 0x700000000000 + 4096;  // inside a granule
constexpr std::uint64_t kSize = 10 * kGranule + 100;

/// A runtime that exports memfds, of the size that is asked for plus `extra`, or refuses.
class Made final : public Runtime {
 public:
  struct Asked {
    Address address;
    std::uint64_t size;
    bool pcie;
  };
  Backend is = Backend::cuda;
  std::vector<Asked> asked;
  int pcie_code = 0, plain_code = 0;
  long extra = 0;
  bool gives_none = false;

  Descriptor export_dmabuf(const Place& place, Address address, std::uint64_t size, bool pcie) override {
    CHECK(place == Place{3, this});
    asked.push_back({address, size, pcie});
    if (const int code = pcie ? pcie_code : plain_code; code != 0) fail(code, "export", "no such mapping", "buy one");
    if (gives_none) return Descriptor();
    Descriptor made(memfd_create("made up", MFD_CLOEXEC));
    REQUIRE(ftruncate(made.get(), static_cast<off_t>(size) + extra) == 0);
    return made;
  }

  Backend backend() const override { return is; }
  const char* name() const override { return "made up"; }
  std::string driver() const override { return ""; }
  int device_count() const override { return 1; }
  std::string device_name(int) const override { return ""; }
  std::string words(int) const override { return ""; }
  std::optional<Allocation> find(Address) override { return {}; }
  bool is_alive(const Allocation&, Address) noexcept override { return true; }
  Address pin(void*, std::uint64_t) override { return 0; }
  void unpin(void*) noexcept override {}
  Word make_word() override { return {}; }
  void free_word(const Word&) noexcept override {}
  Place place_of(int) override { return {}; }
  StreamHandle make_stream(const Place&) override { return nullptr; }
  void destroy_stream(const Place&, StreamHandle) noexcept override {}
  bool has_words(int) override { return false; }
  int connections(int) override { return 1; }
  void load_kernels(const Place&) override {}
  bool kernels_see_devices(int) override { return false; }
  int enqueue_words(const Place&, StreamHandle, std::span<const WordOp>) noexcept override { return 0; }
  int enqueue_to_device(const Place&, StreamHandle, Address, const void*, std::uint64_t) noexcept override { return 0; }
  int enqueue_from_device(const Place&, StreamHandle, void*, Address, std::uint64_t) noexcept override { return 0; }
  int enqueue_copies(const Place&, StreamHandle, Address, std::uint32_t, std::uint64_t) noexcept override { return 0; }
  bool is_idle(const Place&, StreamHandle) noexcept override { return false; }
  int poll(const Place&, StreamHandle, bool& ended) noexcept override {
    ended = false;
    return 0;
  }
  int enqueue_pieces(const Place&, StreamHandle, const Pieces&) noexcept override { return 0; }
  int enqueue_call(const Place&, StreamHandle, void (*)(void*), void*) noexcept override { return 0; }
  int is_capturing(const Place&, StreamHandle, bool&) noexcept override { return 0; }
  int synchronize(const Place&, StreamHandle) noexcept override { return 0; }
  int copy_to_device(const Place&, Address, const void*, std::uint64_t) noexcept override { return 0; }
  int copy_from_device(const Place&, void*, Address, std::uint64_t) noexcept override { return 0; }
};

struct Asking {
  Made runtime;
  std::vector<Refusal> refusals;
  Allocation allocation{kBase, kSize, 1, Place{3, &runtime}};
  std::optional<Exported> export_range(Address address, std::uint64_t size) {
    return export_memory(runtime, allocation, address, size, refusals);
  }
};

}  // namespace

TEST_CASE("exporters: the range is rounded outwards to 64 KiB, but not over the allocation's ends") {
  Asking a;
  const Address inner = 0x700000000000 + 3 * kGranule;
  auto exported = a.export_range(inner + 5, 10);
  REQUIRE(exported);
  CHECK(a.runtime.asked.back().address == inner);
  CHECK(a.runtime.asked.back().size == kGranule);
  CHECK(exported->offset == 5);
  CHECK(exported->length == 10);
  CHECK(exported->provider == "cuda-pcie");
  CHECK(exported->descriptor);

  exported = a.export_range(inner - 1, 2);
  CHECK(a.runtime.asked.back().address == inner - kGranule);
  CHECK(a.runtime.asked.back().size == 2 * kGranule);
  CHECK(exported->offset == kGranule - 1);

  exported = a.export_range(kBase + 7, 1);
  CHECK(a.runtime.asked.back().address == kBase);
  CHECK(a.runtime.asked.back().size == kGranule - 4096);
  CHECK(exported->offset == 7);

  exported = a.export_range(kBase, kSize);
  CHECK(a.runtime.asked.back().address == kBase);
  CHECK(a.runtime.asked.back().size == kSize);
  CHECK(exported->offset == 0);
  CHECK(exported->length == kSize);
  CHECK(a.refusals.empty());
}

TEST_CASE("exporters: a range that the allocation does not hold is an error") {
  Asking a;
  for (const auto& [address, size] : {std::pair<Address, std::uint64_t>(kBase, 0),
                                      {kBase - 1, 10},
                                      {kBase, kSize + 1},
                                      {kBase + kSize, 1},
                                      {kBase + kSize + 1, 1},
                                      {kBase + 10, ~std::uint64_t{0} - 5}}) {
    CHECK(error_of([&, from = address, bytes = size] { a.export_range(from, bytes); }).code == EINVAL);
  }
  CHECK(a.runtime.asked.empty());
}

TEST_CASE("exporters: CUDA's are asked in order, and every refusal is kept") {
  Asking a;
  a.runtime.pcie_code = EOPNOTSUPP;
  auto exported = a.export_range(kBase, kSize);
  REQUIRE(exported);
  CHECK(exported->provider == "cuda");
  REQUIRE(a.runtime.asked.size() == 2);
  CHECK(a.runtime.asked[0].pcie);
  CHECK_FALSE(a.runtime.asked[1].pcie);
  REQUIRE(a.refusals.size() == 1);
  CHECK(a.refusals[0].provider == "cuda-pcie");
  CHECK(a.refusals[0].code == EOPNOTSUPP);
  CHECK(a.refusals[0].words == "no such mapping; buy one");

  a.refusals.clear();
  a.runtime.plain_code = EPERM;
  CHECK_FALSE(a.export_range(kBase, kSize));
  REQUIRE(a.refusals.size() == 3);
  CHECK(a.refusals[1].provider == "cuda");
  CHECK(a.refusals[1].code == EPERM);
  CHECK(a.refusals[2].provider == "nvidia-peermem");
  CHECK(a.refusals[2].code == EOPNOTSUPP);
  CHECK(holds(a.refusals[2].words, "ugds_drv"));
}

TEST_CASE("exporters: a descriptor that is too small, or none, is refused") {
  Asking a;
  a.runtime.extra = -1;
  CHECK_FALSE(a.export_range(kBase, kSize));
  REQUIRE(a.refusals.size() == 3);
  CHECK(a.refusals[0].code == EPROTO);
  CHECK(holds(a.refusals[0].words, std::to_string(kSize - 1).c_str()));
  a.runtime.extra = 1;
  CHECK(a.export_range(kBase, kSize));
  a.runtime.gives_none = true;
  a.refusals.clear();
  CHECK_FALSE(a.export_range(kBase, kSize));
  CHECK(holds(a.refusals[1].words, "no descriptor"));
}

TEST_CASE("exporters: one that is added comes first, for its backend alone, and can be taken away") {
  Asking a;
  Address asked_for = 0;
  std::uint64_t offset = 0;
  register_exporter("helper", Backend::cuda,
                    [&](Runtime&, const Allocation& allocation, Address address, std::uint64_t size) {
                      CHECK(allocation.base == kBase);
                      asked_for = address;
                      Descriptor made(memfd_create("helper", MFD_CLOEXEC));
                      REQUIRE(ftruncate(made.get(), static_cast<off_t>(size + 4096)) == 0);
                      return ExportedRange{std::move(made), offset};
                    });
  offset = 4096;
  auto exported = a.export_range(kBase + 9, 100);
  REQUIRE(exported);
  CHECK(exported->provider == "helper");
  CHECK(asked_for == kBase);
  CHECK(exported->offset == 4096 + 9);
  CHECK(a.runtime.asked.empty());

  offset = 4097;  // it would end behind the descriptor's end
  exported = a.export_range(kBase + 9, 100);
  CHECK(exported->provider == "cuda-pcie");
  CHECK(a.refusals.back().provider == "helper");
  offset = ~std::uint64_t{0};
  CHECK(a.export_range(kBase + 9, 100)->provider == "cuda-pcie");

  a.runtime.is = Backend::hip;
  CHECK(a.export_range(kBase, 100)->provider == "hsa");
  a.runtime.is = Backend::cuda;
  register_exporter("helper", Backend::cuda, [](Runtime&, const Allocation&, Address, std::uint64_t) -> ExportedRange {
    fail(ENOSYS, "export", "not loaded");
  });
  a.refusals.clear();
  CHECK(a.export_range(kBase, 100)->provider == "cuda-pcie");
  REQUIRE(a.refusals.size() == 1);
  CHECK(a.refusals[0].words == "not loaded");
  register_exporter("helper", Backend::cuda, nullptr);
  a.refusals.clear();
  CHECK(a.export_range(kBase, 100)->provider == "cuda-pcie");
  CHECK(a.refusals.empty());
}

TEST_CASE("exporters: HIP's memory is found at the offset that HSA gives") {
  FakeHip& fake = fake_hip_library();
  const auto runtime = open_hip();
  fake.set_lead(5 * 4096);
  const auto memory = reinterpret_cast<Address>(fake.allocate(1 << 20, 1));
  fake.write(memory + 100000, "here", 4);
  const Allocation allocation = *runtime->find(memory);
  std::vector<Refusal> refusals;
  const auto exported = export_memory(*runtime, allocation, memory + 100000, 4, refusals);
  REQUIRE(exported);
  CHECK(exported->provider == "hsa");
  CHECK(exported->offset == 5 * 4096 + 100000);
  CHECK(exported->length == 4);
  std::string text(4, '\0');
  CHECK(pread(exported->descriptor.get(), text.data(), 4, static_cast<off_t>(exported->offset)) == 4);
  CHECK(text == "here");

  fake.set_exported_size(4096);
  CHECK_FALSE(export_memory(*runtime, allocation, memory + 100000, 4, refusals));
  REQUIRE(refusals.size() == 1);
  CHECK(refusals[0].provider == "hsa");
  CHECK(refusals[0].code == EPROTO);
  fake.set_exported_size(0);
  fake.set_migration(FakeMigration::to_host);
  CHECK_FALSE(export_memory(*runtime, allocation, memory + 100000, 4, refusals));
  CHECK(holds(refusals[1].words, "to the host"));
  fake.free(reinterpret_cast<void*>(memory));
}

TEST_CASE("exporters: where no DMA-BUF leads to the GPU's memory the NVIDIA driver's own interface is asked") {
  Made runtime;
  runtime.pcie_code = runtime.plain_code = EOPNOTSUPP;
  const Allocation allocation{16 * kGranule, 16 * kGranule, 1, Place{3, &runtime}};
  memory::GpuBuffer buffer(runtime, allocation, allocation.base);
  const auto map = [&](device::Device& device, std::uint64_t address, std::uint64_t* pages, std::string& why) {
    return buffer.map(device, address, Bytes(8192), device::Access::read_write, pages, why);
  };
  ugds::testing::FakeDevice device;
  std::uint64_t pages[2] = {};
  std::string why;
  // A device that has no such way is not asked, and the reason is the exporters'.
  CHECK(error_of([&] { map(device, allocation.base, pages, why); }).code == EOPNOTSUPP);
  CHECK(device.nvidia.second == 0);
  CHECK(holds(why, "no exporter gives a DMA-BUF"));
  // Its pages are of 64 KiB; ours are the part of them that was asked for.
  device.pins_nvidia = true;
  const auto mapping = map(device, allocation.base + 2 * kGranule - 4096, pages, why);
  CHECK(device.nvidia == std::pair<std::uint64_t, std::uint64_t>(allocation.base + kGranule, 2 * kGranule));
  CHECK(mapping.length == Bytes(2 * kGranule));
  CHECK(pages[0] == mapping.token + kGranule - 4096);
  CHECK(pages[1] == mapping.token + kGranule);
  device.unmap(mapping);
  // The same where there is a DMA-BUF that cannot be mapped. What both say is kept.
  runtime.plain_code = 0;
  device.fail_descriptors = device.fail_map = true;
  CHECK(error_of([&] { map(device, allocation.base, pages, why); }).code == ENOSPC);
  CHECK(holds(why, "no way leads there"));
  CHECK(holds(why, "no more mappings"));
}
