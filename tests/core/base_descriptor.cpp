// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <utility>

#include "base/backing.hpp"
#include "base/descriptor.hpp"

using namespace ugds;

namespace {
bool is_open(int number) { return fcntl(number, F_GETFD) >= 0; }
int any() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }
}  // namespace

TEST_CASE("descriptor: closed with its owner, whoever that is by then") {
  int number = any();
  {
    Descriptor first(number);
    Descriptor second(std::move(first));
    CHECK_FALSE(first);
    CHECK(second.get() == number);
    first = std::move(second);
    CHECK(first.get() == number);
    CHECK(is_open(number));
  }
  CHECK_FALSE(is_open(number));
  const int a = any(), b = any();
  Descriptor one(a);
  one = Descriptor(b);
  CHECK_FALSE(is_open(a));
  CHECK(is_open(b));
  one.reset();
  CHECK_FALSE(is_open(b));
  one.reset();
}

TEST_CASE("descriptor: a child of a fork has none of them, and the parent has all") {
  Descriptor first(any()), second(any()), third(any());
  Descriptor kept(std::move(second));
  third.reset();
  const pid_t child = fork();
  if (child == 0) {
    const bool closed = !is_open(first.get()) && !first && !kept;
    _exit(closed && Descriptor(any()) ? 0 : 1);
  }
  int status = 1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(is_open(first.get()));
  CHECK(is_open(kept.get()));
}

TEST_CASE("backing: found for the whole of a range, inside one, and for nothing else") {
  const Descriptor memory = make_shared_memory(64 << 10);
  REQUIRE(memory);
  auto* const at =
      static_cast<std::byte*>(mmap(nullptr, 64 << 10, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0));
  CHECK_FALSE(find_backing(at, 4096));
  remember_backing(at, 64 << 10, memory.get());
  CHECK(find_backing(at, 64 << 10).descriptor == memory.get());
  CHECK(find_backing(at + 8192, 4096).offset == 8192);
  CHECK_FALSE(find_backing(at, (64 << 10) + 1));
  CHECK_FALSE(find_backing(at - 1, 2));
  CHECK_FALSE(find_backing(at + (64 << 10), 1));
  CHECK(ftruncate(memory.get(), 4096) != 0);  // whoever maps it relies on its size
  forget_backing(at);
  CHECK_FALSE(find_backing(at, 4096));
  munmap(at, 64 << 10);
}
