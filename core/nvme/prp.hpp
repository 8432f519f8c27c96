// SPDX-License-Identifier: Apache-2.0
//
// PRP construction (NVMe Base 2.0, 4.1.1). A transfer touches one or more memory pages of the controller's size:
//   one page    PRP1, with its offset in the page; PRP2 is 0
//   two pages   PRP2 is the second page
//   more        PRP2 points to a list of the pages after the first. A list page that is not the last ends in a pointer
//               to the next; the last holds entries up to its end, so a list of exactly one page's entries has no
//               pointer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/units.hpp"
#include "nvme/entries.hpp"

namespace ugds::nvme {

/// The unit in which registrations keep addresses: the smallest controller page, which is also the host's.
inline constexpr std::uint64_t kPageSize = 4096;
inline constexpr unsigned kPageShift = 12;

/// Memory pages that `length` bytes touch, from `offset` within the first.
constexpr std::uint64_t pages_spanned(std::uint64_t offset, std::uint64_t length, std::uint64_t page_size) {
  return length == 0 ? 0 : ((offset & (page_size - 1)) + length + page_size - 1) / page_size;
}

/// List pages that a transfer over `pages` memory pages needs: none up to two.
constexpr std::uint32_t list_pages_needed(std::uint64_t pages, std::uint64_t page_size) {
  if (pages <= 2) return 0;
  std::uint64_t entries = pages - 1;
  const std::uint64_t capacity = page_size / sizeof(std::uint64_t);
  std::uint32_t lists = 1;
  while (entries > capacity) {
    entries -= capacity - 1;
    ++lists;
  }
  return lists;
}
static_assert(list_pages_needed(2, 4096) == 0 && list_pages_needed(3, 4096) == 1);
static_assert(list_pages_needed(513, 4096) == 1 && list_pages_needed(514, 4096) == 2);
static_assert(list_pages_needed(1 + 511 + 512, 4096) == 2 && list_pages_needed(1 + 511 + 513, 4096) == 3);

/// The memory of a transfer as the controller sees it: addresses in units of kPageSize, from the page that holds the
/// registration's first byte.
struct PageAddresses {
  const std::uint64_t* pages;  ///< page i is at IOVA pages[i]
  std::uint64_t offset;        ///< of the transfer's first byte, from the start of pages[0]

  std::uint64_t at(std::uint64_t byte) const {
    const std::uint64_t position = offset + byte;
    return pages[position >> kPageShift] + (position & (kPageSize - 1));
  }
};

/// A list page that a command owns.
struct ListPage {
  std::uint64_t* entries;
  std::uint64_t iova;
};

/// Fills PRP1, PRP2 and the lists. `lists(i)` gives the command's i-th list page, i below list_pages_needed().
/// `length` is at least 1. `page_size` is CC.MPS's; where it exceeds kPageSize, the addresses inside one controller
/// page are contiguous, which the registration has checked.
template <class Lists>
inline void build_prps(SubmissionEntry& entry, const PageAddresses& memory, std::uint64_t length,
                       std::uint64_t page_size, Lists&& lists) {
  const std::uint64_t first = memory.at(0);
  entry.prp1 = first;
  std::uint64_t done = page_size - (first & (page_size - 1));
  if (done >= length) {
    entry.prp2 = 0;
    return;
  }
  if (length - done <= page_size) {
    entry.prp2 = memory.at(done);
    return;
  }
  const std::size_t capacity = page_size / sizeof(std::uint64_t);
  const std::size_t step = page_size >> kPageShift;
  // From the second page on, addresses are those of whole pages.
  const std::uint64_t* from = memory.pages + ((memory.offset + done) >> kPageShift);
  std::uint64_t left = (length - done + page_size - 1) / page_size;
  std::uint32_t list = 0;
  ListPage page = lists(list);
  entry.prp2 = page.iova;
  while (left > capacity) {
    for (std::size_t i = 0; i < capacity - 1; ++i) page.entries[i] = from[i * step];
    const ListPage next = lists(++list);
    page.entries[capacity - 1] = next.iova;
    page = next;
    from += (capacity - 1) * step;
    left -= capacity - 1;
  }
  for (std::size_t i = 0; i < left; ++i) page.entries[i] = from[i * step];
}

}  // namespace ugds::nvme
