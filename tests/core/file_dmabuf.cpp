// SPDX-License-Identifier: Apache-2.0
//
// The layout is compared byte for byte with that of the patch series' own text: struct io_uring_rsrc_update2 (offset,
// flags, data, tags, nr, resv2) and struct io_uring_regbuf_desc (type, flags, size, uaddr, dmabuf_fd, target_fd, and
// six reserved words).
#include <doctest/doctest.h>

#include <cstring>
#include <vector>

#include "file/dmabuf.hpp"

using namespace ugds::file;

namespace {

std::vector<unsigned char> bytes_of(const void* what, std::size_t size) {
  std::vector<unsigned char> out(size);
  std::memcpy(out.data(), what, size);
  return out;
}

}  // namespace

TEST_CASE("file: a DMA-BUF's registration is laid out as the patch series says") {
  const dmabuf::Description made = dmabuf::describe(0x01020304, 0x11121314);
  std::vector<unsigned char> expected(80, 0);
  expected[0] = 2;  // IO_REGBUF_TYPE_DMABUF
  for (int i = 0; i < 4; ++i) expected[24 + i] = static_cast<unsigned char>(4 - i);
  for (int i = 0; i < 4; ++i) expected[28 + i] = static_cast<unsigned char>(0x14 - i);
  CHECK(bytes_of(&made, sizeof made) == expected);

  const dmabuf::Update asked = dmabuf::update(7, made);
  expected.assign(32, 0);
  expected[0] = 7;
  expected[4] = 2;  // IORING_RSRC_UPDATE_EXTENDED
  const auto* const at = &made;
  std::memcpy(expected.data() + 8, &at, 8);
  expected[24] = 1;
  CHECK(bytes_of(&asked, sizeof asked) == expected);
}

TEST_CASE("file: the kernel is asked, and a refusal has words") {
  const dmabuf::Answer answer = dmabuf::probe();
  CHECK_FALSE(answer.words.empty());
  if (answer.known) MESSAGE("this kernel knows DMA-BUFs: " << answer.words);
}
