// SPDX-License-Identifier: Apache-2.0
#include <set>

#include "emulator_host.hpp"

using namespace emulator_test;

namespace {

constexpr std::uint64_t kPage = 4096;

int map_error(Controller& c, void* at, std::uint64_t bytes, bool writable) {
  try {
    c.map(at, bytes, writable);
  } catch (const Failure& f) {
    return f.error().code;
  }
  return 0;
}

}  // namespace

TEST_CASE("map: IOVAs are congruent to the pointer, never pointers, never reused") {
  Host h("1MiB?pump=caller");
  Pages pages(1 << 20);
  std::set<std::uint64_t> seen;
  std::uint64_t previous_end = 0;
  for (std::uint64_t i = 0; i < 2000; ++i) {
    std::byte* at = pages.data() + i % 200 * kPage;
    const std::uint64_t bytes = (1 + i % 50) * kPage;
    const std::uint64_t iova = h.c.map(at, bytes, true);
    CHECK(iova % 65536 == reinterpret_cast<std::uintptr_t>(at) % 65536);
    CHECK(iova >= std::uint64_t{1} << 48);
    CHECK(iova + bytes < std::uint64_t{1} << 52);
    CHECK(iova >= previous_end + 65536);
    previous_end = iova + bytes;
    CHECK(seen.insert(iova).second);
    h.c.unmap(iova);
  }
  CHECK(h.c.counters().mapped_bytes == 0);
  CHECK(h.violation_count() == 0);
}

TEST_CASE("map: memory that is not there or not writable is refused") {
  Host h("1MiB?pump=caller");
  Pages pages(4 * kPage);
  CHECK(map_error(h.c, pages.data() + 8, kPage, true) == EINVAL);
  CHECK(map_error(h.c, pages.data(), 100, true) == EINVAL);
  CHECK(map_error(h.c, pages.data(), 0, true) == EINVAL);
  REQUIRE(mprotect(pages.data() + kPage, kPage, PROT_READ) == 0);
  CHECK(map_error(h.c, pages.data(), 2 * kPage, true) == EFAULT);
  CHECK(map_error(h.c, pages.data(), 2 * kPage, false) == 0);
  REQUIRE(munmap(pages.data() + 2 * kPage, kPage) == 0);
  CHECK(map_error(h.c, pages.data(), 3 * kPage, false) == EFAULT);
  CHECK(h.c.counters().mapped_ranges == 1);
}

TEST_CASE("map: many mappings cost memory only while they exist") {
  Host h("1MiB?pump=caller");
  Pages pages(64 << 20);
  auto resident = [] {
    long size = 0, rss = 0;
    std::FILE* f = std::fopen("/proc/self/statm", "r");
    REQUIRE(f != nullptr);
    REQUIRE(std::fscanf(f, "%ld %ld", &size, &rss) == 2);
    std::fclose(f);
    return static_cast<std::uint64_t>(rss) * kPage;
  };
  h.c.unmap(h.c.map(pages.data(), pages.size(), true));
  const std::uint64_t before = resident();
  for (int i = 0; i < 2000; ++i) h.c.unmap(h.c.map(pages.data(), pages.size(), true));
  for (int i = 0; i < 20000; ++i) h.c.unmap(h.c.map(pages.data(), kPage, true));
#if !defined(__SANITIZE_THREAD__)  // whose shadow of the table stays
  CHECK(resident() < before + (std::uint64_t{8} << 20));
#else
  CHECK(before > 0);
#endif
}
