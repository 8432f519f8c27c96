// SPDX-License-Identifier: Apache-2.0
//
// Memory of rings and lists, in ordinary pages and in huge ones. Where no huge page is free, the tests that need one
// say so and check nothing: `sysctl vm.nr_hugepages=8` lets them run.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/backing.hpp"
#include "base/error.hpp"
#include "base/steps.hpp"
#include "device/device.hpp"
#include "fake_device.hpp"
#include "memory/host.hpp"
#include "nvme/prp.hpp"
#include "serve_client.hpp"

using namespace ugds;
using device::DmaMemory;
using Pages = DmaMemory::Pages;

namespace {

constexpr std::uint64_t kHugetlbfs = 0x958458f6;

/// A number of the kernel's pool of huge pages of 2 MiB; 0 where there is no such pool.
std::uint64_t huge_pages(const std::string& name) {
  std::uint64_t count = 0;
  std::ifstream("/sys/kernel/mm/hugepages/hugepages-2048kB/" + name) >> count;
  return count;
}
std::uint64_t free_huge_pages() { return huge_pages("free_hugepages") - huge_pages("resv_hugepages"); }

bool no_huge_page(std::uint64_t needed = 2) {
  if (free_huge_pages() >= needed) return false;
  MESSAGE("NOT TESTED: fewer than " << needed << " huge pages are free (sysctl vm.nr_hugepages=8)");
  return true;
}

std::size_t open_files() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

bool is_mapped(const void* address) {
  unsigned char present;
  return mincore(const_cast<void*>(address), 4096, &present) == 0;
}

bool is_zero(const DmaMemory& memory) {
  for (std::uint64_t i = 0; i < memory.size().value; ++i)
    if (memory.data()[i] != std::byte{0}) return false;
  return true;
}

/// What `body` gives in a child.
int in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    alarm(10);
    _exit(body());
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/// What holds for any memory that was made.
void check_sound(const DmaMemory& memory, testing::FakeDevice& device) {
  CHECK(reinterpret_cast<std::uintptr_t>(memory.data()) % DmaMemory::kAlignment == 0);
  CHECK(is_zero(memory));
  REQUIRE(device.mappings.size() == 1);
  CHECK(device.mappings.begin()->second == memory.size().value);
  for (std::uint64_t at = 0; at < memory.size().value; at += nvme::kPageSize)
    CHECK(device.at(memory.iova(at).value) == memory.data() + at);
  const Backing backing = find_backing(memory.data(), memory.size().value);
  CHECK(static_cast<bool>(backing) == device.memory_from_descriptor);
  CHECK(in_child([&] { return is_mapped(memory.data()) ? 1 : 0; }) == 0);
  CHECK(is_mapped(memory.data()));
}

/// Takes every huge page while it lives.
class Exhausted {
 public:
  Exhausted() {
    while (free_huge_pages() != 0 || huge_pages("nr_overcommit_hugepages") > huge_pages("surplus_hugepages")) {
      void* page = mmap(nullptr, 2_MiB, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | (21 << MAP_HUGE_SHIFT), -1, 0);
      if (page == MAP_FAILED) break;
      pages_.push_back(page);
      if (pages_.size() > 1024) break;
    }
  }
  ~Exhausted() {
    for (void* page : pages_) munmap(page, 2_MiB);
  }
  bool complete() const {
    if (free_huge_pages() == 0) return true;
    MESSAGE("NOT TESTED: there are too many huge pages to use all of them up");
    return false;
  }

 private:
  std::vector<void*> pages_;
};

}  // namespace

TEST_CASE("dma memory: ordinary pages are zeroed, aligned, not inherited, and huge only if that was asked for") {
  for (const bool shared : {false, true}) {
    testing::FakeDevice device;
    device.memory_from_descriptor = shared;
    {
      const DmaMemory memory(device, Bytes(3 * 4096 + 1), true);
      CHECK(memory.size().value == 4 * 4096);
      CHECK_FALSE(memory.huge());
      CHECK(std::string(memory.why_not_huge()) == "");
      check_sound(memory, device);
    }
    CHECK(device.mappings.empty());
  }
}

TEST_CASE("dma memory: where no huge page is free it is in ordinary ones, and says so") {
  const Exhausted all;
  if (!all.complete()) return;
  for (const bool shared : {false, true}) {
    testing::FakeDevice device;
    device.memory_from_descriptor = shared;
    const std::size_t before = open_files();
    {
      const DmaMemory memory(device, Bytes(32_KiB), true, Pages::huge);
      CHECK_FALSE(memory.huge());
      const std::string why = memory.why_not_huge();
      CHECK((why == "no huge page is free" || why == "the kernel has no huge pages of 2 MiB"));
      check_sound(memory, device);
      std::memset(memory.data(), 0xff, memory.size().value);  // no SIGBUS
    }
    CHECK(device.mappings.empty());
    CHECK(open_files() == before);
  }
}

TEST_CASE("dma memory: a process that may open no file more gets ordinary pages") {
  testing::FakeDevice device;
  rlimit limit;
  REQUIRE(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  const rlimit none{0, limit.rlim_max};
  REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
  const DmaMemory memory(device, Bytes(32_KiB), true, Pages::huge);
  REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  CHECK_FALSE(memory.huge());
  CHECK(std::string(memory.why_not_huge()) == "there are as many open files as there may be");
  check_sound(memory, device);
}

TEST_CASE("dma memory: huge pages are zeroed, aligned, not inherited, all there, and given back") {
  if (no_huge_page()) return;
  for (const bool shared : {false, true}) {
    testing::FakeDevice device;
    device.memory_from_descriptor = shared;
    const std::uint64_t free = free_huge_pages();
    const std::size_t files = open_files();
    for (const std::uint64_t size : {32_KiB, 2_MiB, 2_MiB + 4_KiB}) {
      const std::uint64_t count = (size + 2_MiB - 1) / 2_MiB;
      const DmaMemory memory(device, Bytes(size), true, Pages::huge);
      REQUIRE(memory.huge());
      CHECK(std::string(memory.why_not_huge()) == "");
      CHECK(memory.size().value == size);
      CHECK(reinterpret_cast<std::uintptr_t>(memory.data()) % 2_MiB == 0);
      CHECK(huge_pages("free_hugepages") == free - count);  // allocated, and not only promised
      CHECK(huge_pages("resv_hugepages") == 0);
      CHECK(open_files() == files + (shared ? 1 : 0));
      check_sound(memory, device);
      if (shared) {
        struct statfs system;
        REQUIRE(fstatfs(find_backing(memory.data(), size).descriptor, &system) == 0);
        CHECK(static_cast<std::uint64_t>(system.f_type) == kHugetlbfs);
      }
      std::memset(memory.data(), 0xff, count * 2_MiB);  // for the next one to be zeroed
    }
    CHECK(device.mappings.empty());
    CHECK(free_huge_pages() == free);
    CHECK(open_files() == files);
  }
}

TEST_CASE("dma memory: inside a huge page physical addresses are consecutive") {
  if (no_huge_page()) return;
  testing::FakeDevice device;
  const DmaMemory memory(device, Bytes(2_MiB), true, Pages::huge);
  REQUIRE(memory.huge());
  std::vector<std::uint64_t> frames(512);
  const Descriptor map(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  const auto at = static_cast<off_t>(reinterpret_cast<std::uintptr_t>(memory.data()) / 4096 * 8);
  static_cast<void>(std::to_integer<int>(*static_cast<volatile std::byte*>(memory.data())));
  REQUIRE(pread(map.get(), frames.data(), frames.size() * 8, at) == static_cast<ssize_t>(frames.size() * 8));
  constexpr std::uint64_t kFrame = (std::uint64_t{1} << 55) - 1;
  if ((frames[0] & kFrame) == 0) {
    MESSAGE("NOT TESTED: physical addresses are shown to root alone");
    return;
  }
  for (std::size_t i = 0; i < frames.size(); ++i) CHECK((frames[i] & kFrame) == (frames[0] & kFrame) + i);
}

TEST_CASE("dma memory: a huge page that cannot be mapped to the device is given back, and ordinary pages are") {
  if (no_huge_page()) return;
  testing::FakeDevice device;
  device.failing_maps = 1;
  const std::uint64_t free = free_huge_pages();
  {
    const DmaMemory memory(device, Bytes(32_KiB), true, Pages::huge);
    CHECK_FALSE(memory.huge());
    CHECK(std::string(memory.why_not_huge()) == "the huge page could not be mapped to the device");
    CHECK(free_huge_pages() == free);
    check_sound(memory, device);
  }
  device.failing_maps = 2;
  CHECK_THROWS_AS(DmaMemory(device, Bytes(32_KiB), true, Pages::huge), Failure);
  CHECK(device.mappings.empty());
  CHECK(free_huge_pages() == free);
}

TEST_CASE(
    "dma memory: what the device does not see as contiguous fails with ENOMEM, holds nothing, and less may work") {
  for (const Pages pages : {Pages::ordinary, Pages::huge}) {
    for (const bool shared : {false, true}) {
      testing::FakeDevice device;
      device.memory_from_descriptor = shared;
      device.contiguous = false;
      const std::uint64_t free = free_huge_pages();
      const std::size_t files = open_files();
      try {
        const DmaMemory memory(device, Bytes(8192), true, pages);
        FAIL("not contiguous, and not refused");
      } catch (const Failure& failure) {
        CHECK(failure.error().code == ENOMEM);
        CHECK(std::string(failure.error().cause).find("contiguous") != std::string::npos);
      }
      CHECK(device.mappings.empty());
      CHECK(open_files() == files);
      CHECK(free_huge_pages() == free);
      const DmaMemory page(device, Bytes(4096), true, pages), lists(device, Bytes(8192), false, pages);
      CHECK(device.mappings.size() == 2);
    }
  }
}

TEST_CASE("dma memory: each step of its set-up fails once and leaves nothing") {
  for (const bool shared : {false, true}) {
    testing::FakeDevice device;
    device.memory_from_descriptor = shared;
    testing::record_steps();
    { const DmaMemory memory(device, Bytes(8192), true, Pages::huge); }
    const std::vector<std::string> steps = testing::recorded_steps();
    CHECK(steps == std::vector<std::string>{"dma memory: allocate", "dma memory: huge pages", "dma memory: map"});
    const std::uint64_t free = free_huge_pages();
    const std::size_t files = open_files();
    for (std::uint64_t nth = 0; nth < steps.size(); ++nth) {
      testing::arm_step(nth);
      CHECK_THROWS_AS(DmaMemory(device, Bytes(8192), true, Pages::huge), Failure);
      CHECK(testing::disarm_steps());
      CHECK(device.mappings.empty());
      CHECK(open_files() == files);
      CHECK(free_huge_pages() == free);
    }
  }
}

TEST_CASE("dma memory: huge pages are mapped to this process's devices and to another's server, aligned as any") {
  if (no_huge_page()) return;
  const serve_test::Folder folder;
  serve::Server server("emulated:1MiB", folder.at("s"));
  for (const std::string& uri : {std::string("emulated:1MiB?pump=caller"), "vfio-user:" + server.path()}) {
    const auto device = device::open(uri, parse_uri(uri));
    const DmaMemory memory(*device, Bytes(2_MiB + 32_KiB), true, Pages::huge);
    REQUIRE(memory.huge());
    CHECK(memory.iova(0).value % DmaMemory::kAlignment == 0);
    CHECK(memory.iova(2_MiB + 4095).value == memory.iova(0).value + 2_MiB + 4095);
  }
  serve_test::await_idle(server);
  CHECK(server.controller().counters().mapped_ranges == 0);
  CHECK(server.controller().violations().empty());
}

TEST_CASE("dma memory: a device's own is taken where there is some, and given back") {
  testing::FakeDevice device;
  device.own_memory = true;
  {
    const DmaMemory rings(device, Bytes(12000), true, Pages::huge);
    CHECK(rings.size() == Bytes(12288));
    CHECK_FALSE(rings.huge());
    CHECK(rings.why_not_huge() == std::string("the kernel's own memory for DMA"));
    CHECK(is_zero(rings));
    CHECK(device.at(rings.iova(8192).value) == rings.data() + 8192);
    CHECK(device.mappings.size() == 1);
  }
  CHECK(device.mappings.empty());
}

TEST_CASE("dma memory: where a device's own is used up, only what need not be contiguous is in other memory") {
  testing::FakeDevice device;
  device.own_memory = device.fail_allocate = true;
  CHECK_THROWS_AS(DmaMemory(device, Bytes(8192), true), Failure);
  CHECK(device.mappings.empty());
  const DmaMemory lists(device, Bytes(8192), false);
  CHECK(reinterpret_cast<std::uintptr_t>(lists.data()) % DmaMemory::kAlignment == 0);
  CHECK(device.mappings.size() == 1);
}

TEST_CASE("dma memory: what is moved stays what it is") {
  testing::FakeDevice device;
  DmaMemory first(device, Bytes(8192), true, Pages::huge);
  const bool huge = first.huge();
  const std::string why = first.why_not_huge();
  std::byte* const data = first.data();
  DmaMemory second(std::move(first));
  CHECK_FALSE(static_cast<bool>(first));  // NOLINT: what is left is an empty one
  CHECK_FALSE(first.huge());
  CHECK(second.data() == data);
  CHECK(second.huge() == huge);
  CHECK(second.why_not_huge() == why);
  second = DmaMemory();
  CHECK(device.mappings.empty());
  CHECK_FALSE(is_mapped(data));
}

TEST_CASE("shared memory: signals that come all the while do not make its allocation fail") {
  struct sigaction action {
  }, before{};
  action.sa_handler = [](int) {};
  REQUIRE(sigaction(SIGALRM, &action, &before) == 0);
  const itimerval often{{0, 300}, {0, 300}}, never{};
  setitimer(ITIMER_REAL, &often, nullptr);
  int made = 0, huge = 0;
  const int wanted = no_huge_page(8) ? 0 : 20;
  try {
    for (int i = 0; i < 3; ++i) made += memory::HostMemory(64_MiB).size() == 64_MiB;
    for (int i = 0; i < wanted; ++i) huge += memory::HostMemory(16_MiB).huge_pages();
  } catch (const Failure& failure) {
    MESSAGE(failure.what());
  }
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &before, nullptr);
  CHECK(made == 3);
  CHECK(huge == wanted);
}
