// SPDX-License-Identifier: Apache-2.0
//
// How requests on files are cut into parts, and what becomes of the kernel's answers.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "file/queue.hpp"

using namespace ugds;
using file::Bounces;
using file::File;
using file::Kind;
using file::Part;
using file::Request;
using Way = file::Part::Way;

namespace {

/// A file of our own, gone with its owner.
struct Temporary {
  std::string path;
  explicit Temporary(std::size_t size = 0) {
    char name[] = "/tmp/ugds-file-XXXXXX";
    const int made = ::mkstemp(name);
    REQUIRE(made >= 0);
    path = name;
    REQUIRE(::ftruncate(made, static_cast<off_t>(size)) == 0);
    ::close(made);
  }
  ~Temporary() { ::unlink(path.c_str()); }
};

struct Aligned {
  std::byte* data;
  explicit Aligned(std::size_t size) : data(static_cast<std::byte*>(std::aligned_alloc(4096, size))) {}
  ~Aligned() { std::free(data); }  // NOLINT
};

Request request(File& file, Kind kind, std::byte* memory, std::uint64_t offset, std::uint64_t bytes) {
  Request r;
  r.kind = kind;
  r.file = &file;
  r.memory = memory;
  r.offset = offset;
  r.bytes = bytes;
  return r;
}

/// What every plan keeps to, whatever the range and the memory.
void check_plan(const Request& r) {
  const File& file = *r.file;
  std::uint64_t at = r.offset;
  for (unsigned i = 0; i < r.part_count; ++i) {
    const Part& p = r.parts[i];
    CHECK(p.wanted_offset == at);
    CHECK(p.wanted == r.memory + (at - r.offset));
    at += p.wanted_bytes;
    if (p.way == Way::buffered || r.kind == Kind::write) {
      // No byte beside the request.
      CHECK(p.offset == p.wanted_offset);
      CHECK(p.bytes == p.wanted_bytes);
    } else {
      CHECK(p.offset <= p.wanted_offset);
      CHECK(p.offset + p.bytes >= p.wanted_offset + p.wanted_bytes);
    }
    if (p.way == Way::buffered) continue;
    CHECK(p.offset % file.offset_alignment() == 0);
    CHECK(p.bytes % file.offset_alignment() == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(p.memory) % file.memory_alignment() == 0);
    // A direct write shares no page with what is buffered.
    if (r.kind == Kind::write) CHECK(((p.offset | p.bytes) & 4095) == 0);
    if (p.way == Way::direct) CHECK(p.memory == p.wanted);
    if (p.way == Way::bounced) CHECK(p.memory >= r.bounce);
    if (p.way == Way::bounced) CHECK(p.memory + p.bytes <= r.bounce + Bounces::kSize);
  }
  CHECK(at == r.offset + r.bytes);
}

}  // namespace

TEST_CASE("file: every range and memory is cut into parts that the kernel takes, and covers itself") {
  const Temporary temporary(8 << 20);
  const auto file = File::open(temporary.path, {});
  if (file->direct() < 0) MESSAGE("this file system has no direct I/O: only buffered parts were seen");
  const Aligned memory((1 << 20) + 8192);
  std::mt19937_64 random(7);
  const std::uint64_t edges[] = {0, 1, 3, 511, 512, 513, 4095, 4096, 4097, 65536, 65537};
  for (int round = 0; round < 20'000; ++round) {
    Bounces bounces;
    const auto edge = [&] { return edges[random() % std::size(edges)]; };
    const std::uint64_t offset = (random() % 64) * 65536 + edge();
    const std::uint64_t bytes = std::min<std::uint64_t>(1 + edge() + (random() % 3) * 65536, file::kMostBytes);
    std::byte* const at = memory.data + (random() % 2) * 4096 + (random() % 3 == 0 ? edge() % 4096 : 0);
    Request r = request(*file, random() % 2 == 0 ? Kind::read : Kind::write, at, offset, bytes);
    file::plan(r, bounces);
    REQUIRE(r.part_count >= 1);
    check_plan(r);
    if (r.bounce != nullptr) bounces.give_back(r.bounce);
  }
}

TEST_CASE("file: where no memory for it is left, what is not aligned is buffered") {
  const Temporary temporary(1 << 20);
  const auto file = File::open(temporary.path, {});
  if (file->direct() < 0) return;
  const Aligned memory(1 << 20);
  Bounces bounces;
  std::vector<std::byte*> taken;
  while (std::byte* const one = bounces.take()) taken.push_back(one);
  CHECK(taken.size() == Bounces::kMost);
  Request r = request(*file, Kind::read, memory.data + 1, 0, 65536);
  file::plan(r, bounces);
  CHECK(r.part_count == 1);
  CHECK(r.parts[0].way == Way::buffered);
  r = request(*file, Kind::write, memory.data + 1, 0, 65536);
  file::plan(r, bounces);
  CHECK(r.parts[0].way == Way::buffered);
  for (std::byte* const one : taken) bounces.give_back(one);
  r = request(*file, Kind::read, memory.data + 1, 0, 65536);
  file::plan(r, bounces);
  CHECK(r.parts[0].way == Way::bounced);
  bounces.give_back(r.bounce);
}

TEST_CASE("file: what the kernel answers to a part") {
  const Temporary temporary(1 << 20);
  const auto file = File::open(temporary.path, {});
  if (file->direct() < 0) return;
  const Aligned memory(1 << 20);
  Bounces bounces;
  Request r = request(*file, Kind::read, memory.data, 0, 65536);
  const auto plan_again = [&] {
    file::plan(r, bounces);
    REQUIRE(r.part_count == 1);
    return &r.parts[0];
  };
  SUBCASE("not now: it is asked again, and not for ever") {
    Part* const p = plan_again();
    p->result = -EAGAIN;
    int asked = 0;
    while (!file::settle(*p)) REQUIRE(++asked < 1000);
    CHECK(asked > 10);
    CHECK(p->error == EAGAIN);
  }
  SUBCASE("a thread that asked has ended: another asks again; but not where it was cancelled") {
    Part* const p = plan_again();
    p->result = -ECANCELED;
    CHECK_FALSE(file::settle(*p));
    r.cancelled = true;
    CHECK(file::settle(*p));
    CHECK(p->error == ECANCELED);
  }
  SUBCASE("a part of it: the rest is asked for, and an answer of nothing is the end of the file") {
    Part* const p = plan_again();
    p->result = 8192;
    CHECK_FALSE(file::settle(*p));
    CHECK(p->done == 8192);
    p->result = 0;
    CHECK(file::settle(*p));
    file::conclude(r);
    CHECK(r.done == 8192);
    CHECK(r.error == 0);
  }
  SUBCASE("a direct read that ends inside a block has met the end of the file") {
    Part* const p = plan_again();
    p->result = 8192 + 100;
    CHECK(file::settle(*p));
    file::conclude(r);
    CHECK(r.done == 8292);
  }
  SUBCASE("an aligned direct request that is refused: buffered from then on") {
    Part* const p = plan_again();
    p->result = -EINVAL;
    CHECK_FALSE(file::settle(*p));
    CHECK(p->way == Way::buffered);
    p->result = 512;
    CHECK_FALSE(file::settle(*p));
    CHECK(file->direct() >= 0);
    p->result = static_cast<int>(p->bytes) - 512;
    CHECK(file::settle(*p));
    CHECK(file->direct() == -1);
    CHECK(file->why_buffered().find("refused") != std::string::npos);
  }
  SUBCASE("what the page cache refuses as well says nothing of direct requests") {
    Part* const p = plan_again();
    p->result = -EINVAL;
    CHECK_FALSE(file::settle(*p));
    p->result = -EFBIG;
    CHECK(file::settle(*p));
    CHECK(p->error == EFBIG);
    CHECK(file->direct() >= 0);
  }
  SUBCASE("an error is the request's, with what came before it") {
    r.offset = 100;
    r.bytes = 65536;
    file::plan(r, bounces);
    REQUIRE(r.part_count >= 1);
    Part& p = r.parts[0];
    p.result = -EIO;
    CHECK(file::settle(p));
    file::conclude(r);
    CHECK(r.error == EIO);
    CHECK(r.done == 0);
    if (r.bounce != nullptr) bounces.give_back(r.bounce);
  }
}

TEST_CASE("file: random requests in flight, by io_uring and by threads, leave the file as plain writes would") {
  for (const bool threads : {false, true}) {
    CAPTURE(threads);
    std::unique_ptr<file::Io> io;
    try {
      io = threads ? file::make_workers() : file::make_uring(64);
    } catch (const Failure& failure) {
      MESSAGE("not tested: " << failure.what());
      continue;
    }
    const Temporary temporary;
    const auto file = File::open(temporary.path, {});
    file::Queue queue(std::move(io));
    constexpr std::uint64_t kSlice = 97'001;  // no multiple of anything: neighbours share blocks
    constexpr unsigned kSlices = 16;
    std::mt19937_64 random(11);
    std::vector<std::byte> expected;
    std::vector<std::vector<std::byte>> memory(kSlices, std::vector<std::byte>(kSlice + 64));
    std::vector<Request> requests(kSlices);
    for (int round = 0; round < 40; ++round) {
      unsigned told = 0;
      for (unsigned i = 0; i < kSlices; ++i) {
        const std::uint64_t from = random() % 3000, bytes = 1 + random() % (kSlice - from);
        std::byte* const at = memory[i].data() + random() % 64;
        for (std::uint64_t b = 0; b < bytes; ++b) at[b] = static_cast<std::byte>(random());
        const std::uint64_t offset = i * kSlice + from;
        if (expected.size() < offset + bytes) expected.resize(offset + bytes);
        std::memcpy(expected.data() + offset, at, bytes);
        requests[i] = request(*file, Kind::write, at, offset, bytes);
        requests[i].durable = round == 0;
        queue.submit(requests[i]);
      }
      queue.push();
      while (told != kSlices) {
        queue.reap([&](Request& r) {
          CHECK(r.error == 0);
          CHECK(r.done == r.bytes);
          ++told;
        });
      }
    }
    CHECK(queue.in_flight() == 0);
    CHECK(file->size() == expected.size());
    std::vector<std::byte> found(expected.size());
    const int descriptor = ::open(temporary.path.c_str(), O_RDONLY);
    CHECK(::pread(descriptor, found.data(), found.size(), 0) == static_cast<ssize_t>(found.size()));
    ::close(descriptor);
    CHECK(std::memcmp(found.data(), expected.data(), found.size()) == 0);
  }
}

TEST_CASE("file: what cannot be opened says why") {
  const auto error_of = [](auto&& body) {
    try {
      body();
    } catch (const Failure& failure) {
      return failure.error();
    }
    return Error{};
  };
  CHECK(error_of([] { File::open("/nonexistent/file", {}); }).code == ENOENT);
  CHECK(error_of([] { File::open("/tmp", {}); }).code == EISDIR);
  CHECK(error_of([] { File::open("/dev/zero", {}); }).code == EINVAL);
  CHECK(error_of([] { File::adopt(1'000'000, {}); }).code == EBADF);
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  CHECK(error_of([&] { File::adopt(ends[0], {}); }).code == EINVAL);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST_CASE("file: a descriptor stays its owner's, keeps its access, and may be closed") {
  const Temporary temporary(4096);
  for (const int access : {O_RDONLY, O_WRONLY, O_RDWR}) {
    const int mine = ::open(temporary.path.c_str(), access);
    REQUIRE(mine >= 0);
    const auto file = File::adopt(mine, {});
    CHECK(file->readonly() == (access == O_RDONLY));
    CHECK(file->writeonly() == (access == O_WRONLY));
    CHECK((::fcntl(mine, F_GETFL) & O_DIRECT) == 0);
    ::close(mine);
    CHECK(file->size() == 4096);
  }
}
