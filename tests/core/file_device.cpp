// SPDX-License-Identifier: Apache-2.0
//
// Files as handles: the engine's own paths over them.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <thread>

#include "base/clock.hpp"
#include "device/file.hpp"
#include "engine/batch.hpp"
#include "engine/table.hpp"
#include "engine_host.hpp"

using namespace engine_test;

namespace {

struct Path {
  std::string text;
  explicit Path(std::uint64_t size = 0) {
    char name[] = "/tmp/ugds-device-XXXXXX";
    const int made = ::mkstemp(name);
    REQUIRE(made >= 0);
    REQUIRE(::ftruncate(made, static_cast<off_t>(size)) == 0);
    ::close(made);
    text = name;
  }
  ~Path() { ::unlink(text.c_str()); }
};

}  // namespace

TEST_CASE("file: a handle reads and writes any range, by one command and by many, and grows the file") {
  for (const std::string query : {"", "?direct=off", "?io=threads", "?interrupts=1", "?mode=latency"}) {
    CAPTURE(query);
    const Path path;
    Handle handle("file:" + path.text + query, {});
    Buffer out(5 << 20), in(5 << 20, 3);
    out.fill(3);
    for (const std::uint64_t size : {1ul, 511ul, 4096ul, 65536ul, 1000'003ul, 4'500'000ul}) {
      const std::uint64_t offset = 7919;
      REQUIRE(write(handle, out, offset, size, 5) == static_cast<std::int64_t>(size));
      std::memset(in.data(), 0xee, in.size());
      REQUIRE(read(handle, in, offset, size, 1) == static_cast<std::int64_t>(size));
      REQUIRE(std::memcmp(in.data() + 1, out.data() + 5, size) == 0);
      REQUIRE(in.data()[0] == std::byte{0xee});
      REQUIRE(in.data()[1 + size] == std::byte{0xee});
      REQUIRE(handle.capacity() == offset + size);
    }
    // The end of the file, and beyond.
    const std::uint64_t end = handle.capacity();
    CHECK(read(handle, in, end - 10, 100) == 10);
    CHECK(read(handle, in, end, 100) == 0);
    CHECK(read(handle, in, end + (1 << 20), 3 << 20) == 0);
    CHECK(read(handle, in, 0, 5 << 20) == static_cast<std::int64_t>(end));
    CHECK(engine::run(handle, {.opcode = Opcode::flush}) == 0);
    CHECK(engine::discard(handle, 8192, 4096) == 4096);
    CHECK(read(handle, in, 8192, 4096) == 4096);
    CHECK(std::all_of(in.data(), in.data() + 4096, [](std::byte b) { return b == std::byte{0}; }));
  }
}

TEST_CASE("file: the operating system's errors are the request's") {
  const Path path(8192);
  Handle handle("file:" + path.text + "?readonly=1", {});
  Buffer buffer(4096);
  CHECK(write(handle, buffer, 0, 4096) == -EBADF);
  CHECK(last_error().message().find("write") != std::string::npos);
  CHECK(last_error().hint[0] != '\0');
  CHECK(read(handle, buffer, 0, 4096) == 4096);
  CHECK(handle.state() == State::ready);
}

TEST_CASE("file: a pool serves many files by one controller, each in a place of its own") {
  const Path first(10'000), second(20'000);
  Handle handle("file:?pool=1", {});
  auto& pool = dynamic_cast<device::FileDevice&>(handle.device());
  const std::uint64_t a = pool.attach(file::File::open(first.text, {}));
  const std::uint64_t b = pool.attach(file::File::open(second.text, {}));
  CHECK(a != b);
  Buffer out(4096), in(4096);
  out.fill(1);
  CHECK(write(handle, out, b + 100, 1000) == 1000);
  CHECK(read(handle, in, b + 100, 1000) == 1000);
  CHECK(std::memcmp(in.data(), out.data(), 1000) == 0);
  CHECK(read(handle, in, a + 100, 1000) == 1000);
  CHECK(in.data()[0] == std::byte{0});
  CHECK(read(handle, in, a + 9'999, 1000) == 1);
  pool.detach(b);
  CHECK(read(handle, in, b, 1000) == -EBADF);
  CHECK(pool.attach(file::File::open(second.text, {})) == b);
  CHECK(read(handle, in, b + 100, 1000) == 1000);
}

TEST_CASE("file: threads and batches share a file, and every result is told once") {
  for (const std::string query : {"", "?io=threads&interrupts=1"}) {
    const Path path(1 << 20);
    Handle handle("file:" + path.text + query, {});
    std::atomic<unsigned> right{0};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        Buffer mine(20'000);
        for (unsigned i = 0; i < 60; ++i) {
          std::memset(mine.data(), static_cast<int>(t * 61 + i), mine.size());
          const std::uint64_t offset = t * 20'000;
          if (write(handle, mine, offset, 20'000) != 20'000) continue;
          std::memset(mine.data(), 0xff, mine.size());
          if (read(handle, mine, offset, 20'000) != 20'000) continue;
          right += std::all_of(mine.data(), mine.data() + 20'000,
                               [&](std::byte b) { return b == static_cast<std::byte>(t * 61 + i); });
        }
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK(right == 240);
    CHECK(handle.in_flight() == 0);
  }
}

/// Memory whose pages come only when the test says so: what reads into it hangs in the kernel.
struct Hanging {
  int descriptor = -1;
  std::byte* memory = nullptr;
  static constexpr std::size_t kSize = 65536;
  Hanging() {
    descriptor = static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC));
    if (descriptor < 0) return;
    uffdio_api api{.api = UFFD_API, .features = 0, .ioctls = 0};
    memory =
        static_cast<std::byte*>(::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    uffdio_register area{};
    area.range = {reinterpret_cast<std::uintptr_t>(memory), kSize};
    area.mode = UFFDIO_REGISTER_MODE_MISSING;
    if (::ioctl(descriptor, UFFDIO_API, &api) != 0 || ::ioctl(descriptor, UFFDIO_REGISTER, &area) != 0) {
      ::close(descriptor);
      descriptor = -1;
    }
  }
  void let_go() {
    uffdio_zeropage zero{};
    zero.range = {reinterpret_cast<std::uintptr_t>(memory), kSize};
    ::ioctl(descriptor, UFFDIO_ZEROPAGE, &zero);
    uffdio_range range{reinterpret_cast<std::uintptr_t>(memory), kSize};
    ::ioctl(descriptor, UFFDIO_UNREGISTER, &range);
  }
  ~Hanging() {
    if (descriptor >= 0) ::close(descriptor);
    if (memory != nullptr) ::munmap(memory, kSize);
  }
};

TEST_CASE(
    "file: a read that the kernel does not end times out, holds its memory, and lets go of it when it has ended") {
  Hanging hanging;
  if (hanging.descriptor < 0) {
    MESSAGE("not tested: userfaultfd is not to be had");
    return;
  }
  const Path path(1 << 20);
  Policy policy;
  policy.deadline_ns = 100'000'000;
  auto* const handle = new Handle("file:" + path.text + "?io=threads&direct=off", policy);
  auto& registry = memory::Registry::instance();
  const auto reference = registry.add(hanging.memory, Hanging::kSize, memory::Kind::host, false);
  const std::uint64_t start = monotonic_ns();
  CHECK(engine::run(*handle, {Opcode::read, reference, 0, 4096, 0}) == -ETIMEDOUT);
  CHECK(monotonic_ns() - start < 10'000'000'000);
  CHECK(handle->state() == State::wedged);
  CHECK(registry.close(reference) == EBUSY);
  CHECK_FALSE(handle->force_stop());
  hanging.let_go();
  bool stopped = false;
  for (int i = 0; i < 100 && !stopped; ++i) stopped = handle->force_stop();
  CHECK(stopped);
  CHECK(registry.close(reference) == 0);
  delete handle;
}
