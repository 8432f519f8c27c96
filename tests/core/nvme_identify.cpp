// SPDX-License-Identifier: Apache-2.0
//
// Identify data by byte offset, as the specification's tables number them.
#include <doctest/doctest.h>

#include <array>
#include <cstring>

#include "nvme/identify.hpp"

using namespace ugds::nvme;

namespace {

template <class Structure>
Structure with_bytes(std::size_t offset, std::initializer_list<std::uint8_t> bytes) {
  std::array<std::uint8_t, kIdentifySize> page{};
  std::copy(bytes.begin(), bytes.end(), page.begin() + static_cast<std::ptrdiff_t>(offset));
  Structure structure;
  std::memcpy(&structure, page.data(), sizeof structure);
  return structure;
}

}  // namespace

TEST_CASE("identify: controller fields lie at the bytes of the specification") {
  CHECK(with_bytes<IdentifyController>(0, {0x86, 0x80}).vid == 0x8086);
  CHECK(with_bytes<IdentifyController>(4, {'S'}).serial[0] == 'S');
  CHECK(with_bytes<IdentifyController>(24, {'M'}).model[0] == 'M');
  CHECK(with_bytes<IdentifyController>(64, {'F'}).firmware[0] == 'F');
  CHECK(with_bytes<IdentifyController>(77, {5}).mdts == 5);
  CHECK(with_bytes<IdentifyController>(78, {0x34, 0x12}).cntlid == 0x1234);
  CHECK(with_bytes<IdentifyController>(80, {0, 0, 2, 0}).ver == 0x20000);
  CHECK((with_bytes<IdentifyController>(256, {0x00, 0x01}).oacs & oacs::doorbell_buffer_config) != 0);
  CHECK(with_bytes<IdentifyController>(258, {3}).acl == 3);
  CHECK(with_bytes<IdentifyController>(512, {0x66}).sqes == 0x66);
  CHECK(with_bytes<IdentifyController>(513, {0x44}).cqes == 0x44);
  CHECK(with_bytes<IdentifyController>(514, {0, 4}).maxcmd == 1024);
  CHECK(with_bytes<IdentifyController>(516, {16, 0, 0, 0}).nn == 16);
  CHECK((with_bytes<IdentifyController>(520, {0x04, 0}).oncs & oncs::dataset_management) != 0);
  CHECK((with_bytes<IdentifyController>(520, {0x08, 0}).oncs & oncs::write_zeroes) != 0);
  CHECK(with_bytes<IdentifyController>(525, {1}).vwc == 1);
}

TEST_CASE("identify: namespace fields lie at the bytes of the specification") {
  CHECK(with_bytes<IdentifyNamespace>(0, {0, 0, 1}).nsze == 0x10000);
  CHECK(with_bytes<IdentifyNamespace>(8, {0, 0, 1}).ncap == 0x10000);
  CHECK(with_bytes<IdentifyNamespace>(16, {0, 0, 1}).nuse == 0x10000);
  CHECK(with_bytes<IdentifyNamespace>(25, {3}).nlbaf == 3);
  CHECK(with_bytes<IdentifyNamespace>(26, {0x12}).flbas == 0x12);
  CHECK(with_bytes<IdentifyNamespace>(33, {1}).dlfeat == 1);
  const auto format = with_bytes<IdentifyNamespace>(128 + 4 * 63, {8, 0, 12, 2}).formats[63];
  CHECK(format.metadata == 8);
  CHECK(format.data_power == 12);
  CHECK(format.performance == 2);
}

TEST_CASE("identify: the format index has six bits where more than sixteen formats exist, and four otherwise") {
  for (std::uint32_t index = 0; index < 64; ++index) {
    const auto flbas = static_cast<std::uint8_t>((index & 15) | (index >> 4) << 5);
    CHECK(format_index(flbas, 63) == index);
    CHECK(format_index(flbas, 16) == index);
    CHECK(format_index(flbas, 15) == (index & 15));
    // Bit 4 is about metadata, and no part of the index.
    CHECK(format_index(static_cast<std::uint8_t>(flbas | 0x10), 63) == index);
    CHECK(metadata_interleaved(static_cast<std::uint8_t>(flbas | 0x10)));
    CHECK(!metadata_interleaved(flbas));
  }
}

TEST_CASE("identify: text is padded with spaces, cut to its field, and read without its padding") {
  char field[8];
  set_text(field, "abc");
  CHECK(std::memcmp(field, "abc     ", 8) == 0);
  CHECK(get_text(field, 8) == "abc");
  set_text(field, "123456789");
  CHECK(get_text(field, 8) == "12345678");
  set_text(field, "");
  CHECK(get_text(field, 8).empty());
}

TEST_CASE("identify: text that no specification allows is made printable") {
  const char odd[8] = {'a', '\n', '\x1b', 'b', '\x80', '\0', '\0', '\0'};
  CHECK(get_text(odd, sizeof odd) == "a??b");
  const char zeros[4] = {};
  CHECK(get_text(zeros, sizeof zeros).empty());
}
