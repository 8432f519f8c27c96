// SPDX-License-Identifier: Apache-2.0
//
// Requests on files straight to a GPU's memory, by the io_uring interface that is proposed for DMA-BUFs ("dmabuf backed
// registered buffers", not in mainline as of Linux 7.3): the layout of a registration and of a request, and the
// question whether the running kernel knows them.
//
// Nothing here is used for a request. A completion of full length is no proof that the bytes went where they should: on
// some platforms a write between two root ports was told to be done and was not. So the route is only to be taken where
// a qualification has passed on the machine, in both directions, and never because the kernel accepts it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace ugds::file::dmabuf {

/// io_uring_register's operation that updates registered buffers (IORING_REGISTER_BUFFERS_UPDATE).
inline constexpr unsigned kUpdateBuffers = 16;
/// In Update::flags: `data` points to Descriptions, and not to iovecs. Kernels without the proposal want 0 there.
inline constexpr std::uint32_t kExtended = 1u << 1;

enum class Type : std::uint32_t { empty = 0, address = 1, dmabuf = 2 };

/// What a slot of the buffer table is to hold.
struct Description {
  Type type = Type::empty;
  std::uint32_t flags = 0;
  std::uint64_t size = 0;     ///< of an address; a DMA-BUF is taken whole, at most 1 GiB of it, and this is 0
  std::uint64_t address = 0;  ///< the same
  std::int32_t dmabuf = 0;    ///< its descriptor
  std::int32_t target = 0;    ///< of the file or block device that requests with this buffer will be on
  std::array<std::uint64_t, 6> reserved{};
};
static_assert(sizeof(Description) == 80 && offsetof(Description, size) == 8 && offsetof(Description, dmabuf) == 24);
static_assert(offsetof(Description, target) == 28 && offsetof(Description, reserved) == 32);

struct Update {
  std::uint32_t offset = 0;  ///< the first slot
  std::uint32_t flags = 0;
  std::uint64_t data = 0;  ///< address of the descriptions
  std::uint64_t tags = 0;
  std::uint32_t count = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(Update) == 32 && offsetof(Update, data) == 8 && offsetof(Update, count) == 24);

/// A DMA-BUF for requests on `target`.
constexpr Description describe(int dmabuf, int target) {
  return {.type = Type::dmabuf, .dmabuf = dmabuf, .target = target};
}
/// Of one slot.
inline Update update(std::uint32_t slot, const Description& description) {
  return {.offset = slot, .flags = kExtended, .data = reinterpret_cast<std::uintptr_t>(&description), .count = 1};
}

/// What the running kernel says.
struct Answer {
  bool known = false;  ///< it has the interface; nothing more is said by that
  std::string words;   ///< why not, or what is still missing
};
/// Asks, without any memory or file. Thread-safe.
Answer probe() noexcept;

}  // namespace ugds::file::dmabuf
