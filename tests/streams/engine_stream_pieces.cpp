// SPDX-License-Identifier: Apache-2.0
//
// Requests that one launch holds and copies: what its kernel is told to do is right for every size and alignment.
#include <algorithm>
#include <array>
#include <random>

#include "engine/stream_plan.hpp"
#include "engine_gpu_host.hpp"

using namespace gpu_test;

TEST_CASE("stream pieces: even pieces cover the request once, and go round in the area") {
  std::mt19937_64 random(11);
  for (int turn = 0; turn < 2000; ++turn) {
    const std::uint64_t area = (2 + random() % 63) * 128 * KiB;
    const std::uint64_t bytes = 1 + random() % (turn % 2 == 0 ? area : 40 * MiB);
    const auto plan = engine::StreamPlan::even(bytes, area);
    CAPTURE(area);
    CAPTURE(bytes);
    std::uint64_t at = 0;
    for (std::uint32_t i = 0; i < plan.count; ++i) {
      const auto piece = plan.piece(i);
      REQUIRE(piece.begin == at);
      REQUIRE(piece.bytes != 0);
      REQUIRE(piece.at + piece.bytes <= std::max(area, bytes <= area ? bytes : 0));
      REQUIRE(piece.at % 16 == 0);
      // Whoever had the place before is through when it is free.
      if (piece.needs != 0) {
        REQUIRE(plan.piece(piece.needs - 1).at == piece.at);
        REQUIRE(piece.needs <= i);
      }
      for (std::uint32_t j = piece.needs; j < i; ++j) REQUIRE(plan.piece(j).at != piece.at);
      at += piece.bytes;
    }
    REQUIRE(at == bytes);
  }
}

TEST_CASE("stream pieces: reads of every size and alignment, of an idle stream and of a busy one, bound now and late") {
  Cuda cuda;
  Open open("emulated:64MiB?lba=512");
  Buffer host(20 * MiB);
  host.fill(3);
  REQUIRE(write(open.handle, host, 0, 20 * MiB) == 20 * MiB);
  const CUstream stream = cuda.stream();
  GpuMemory target(20 * MiB, Demand::staged);
  const std::vector<std::byte> mark(20 * MiB, GpuMemory::kMark);
  const auto& counters = open.handle.stream_worker().counters();
  for (const std::uint64_t size : {512ul, 4096ul, 128 * KiB, 128 * KiB + 512, 1 * MiB, 1 * MiB + 512, 9 * MiB + 1536}) {
    for (const std::uint64_t at : {0ul, 4ul, 16ul, 1028ul, 64 * KiB}) {
      for (const bool late : {false, true}) {
        for (const bool busy : {false, true}) {
          CAPTURE(size);
          CAPTURE(at);
          CAPTURE(late);
          target.poke(0, mark.data(), at + size + 4096);
          REQUIRE(comes_true([&] { return stream_of(stream).idle(); }));
          const std::uint64_t held = counters.held_by_kernel;
          if (busy) cuda.launch("ugds_spin", stream, 300'000);
          const std::int64_t values[] = {512, static_cast<std::int64_t>(size), static_cast<std::int64_t>(at)};
          StreamCall call;
          if (late) call.late = {&values[0], &values[1], &values[2]};
          // Late, the buffer begins where the registration does, and the size may be smaller than what was said.
          Asked before(open.handle, stream, {reading(target, 0, 512, at)});
          Asked asked(open.handle, stream, {late ? reading(target, 0, 20 * MiB) : reading(target, 512, size, at)},
                      call);
          CHECK(before.result() == 512);
          CHECK(asked.result() == static_cast<std::int64_t>(size));
          cuda.finish(stream);
          CHECK(counters.held_by_kernel == held + (at % 16 == 0 ? 2 : late ? 1 : 0));
          CHECK(target.same(host.data() + 512, size, at) == size);
          CHECK(target.bytes(0, at) == std::vector<std::byte>(at, GpuMemory::kMark));
          CHECK(target.bytes(at + size, 4096) == std::vector<std::byte>(4096, GpuMemory::kMark));
        }
      }
    }
  }
}
