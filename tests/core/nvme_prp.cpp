// SPDX-License-Identifier: Apache-2.0
//
// PRP construction against a model that is too simple to be wrong, through a walker written from the words of the
// specification (NVMe Base 2.0, 4.1.1) and not from the code under test.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "nvme/prp.hpp"

using namespace ugds::nvme;

namespace {

/// A run of bytes as the controller addresses it.
struct Run {
  std::uint64_t address, length;
  bool operator==(const Run&) const = default;
};

/// Appends bytes one after another, cut at every 4 KiB so that two lists of the same bytes compare equal.
void append(std::vector<Run>& runs, std::uint64_t address, std::uint64_t length) {
  while (length > 0) {
    const std::uint64_t piece = std::min(length, 4096 - address % 4096);
    runs.push_back({address, piece});
    address += piece;
    length -= piece;
  }
}

constexpr std::uint64_t kGuard = 0x6775617264677561, kUnwritten = 0xdeaddeaddeaddeac;
constexpr std::size_t kGuardWords = 8;

/// List pages at random addresses, each between guard words.
class Lists {
 public:
  Lists(std::uint32_t count, std::uint64_t page_size, std::mt19937_64& random) : words_(page_size / 8) {
    for (std::uint32_t i = 0; i < count; ++i) {
      std::vector<std::uint64_t> page(words_ + 2 * kGuardWords, kGuard);
      std::fill_n(page.begin() + kGuardWords, words_, kUnwritten);
      pages_.push_back(std::move(page));
      // Bit 62 keeps list pages apart from data pages.
      iovas_.push_back((random() % (std::uint64_t{1} << 40) * page_size) | std::uint64_t{1} << 62);
      by_iova_[iovas_.back()] = i;
    }
  }

  ListPage operator()(std::uint32_t i) {
    if (i != taken_ || i >= pages_.size()) {
      problem_ = "list page " + std::to_string(i) + " was asked for after " + std::to_string(taken_) + " others";
      return {spare_.data(), 0};
    }
    ++taken_;
    return {pages_[i].data() + kGuardWords, iovas_[i]};
  }

  /// The words of the list page at an address; nullptr where there is none.
  const std::uint64_t* at(std::uint64_t iova) const {
    const auto found = by_iova_.find(iova);
    return found == by_iova_.end() ? nullptr : pages_[found->second].data() + kGuardWords;
  }

  bool guards_intact() const {
    for (const auto& page : pages_)
      for (std::size_t i = 0; i < kGuardWords; ++i)
        if (page[i] != kGuard || page[page.size() - 1 - i] != kGuard) return false;
    return true;
  }
  std::size_t entries_written() const {
    std::size_t count = 0;
    for (const auto& page : pages_)
      count += static_cast<std::size_t>(
          std::count_if(page.begin() + kGuardWords, page.end() - kGuardWords, [](auto w) { return w != kUnwritten; }));
    return count;
  }
  std::uint32_t taken() const { return taken_; }
  const std::string& problem() const { return problem_; }

 private:
  std::size_t words_;
  std::uint32_t taken_ = 0;
  std::string problem_;
  std::vector<std::vector<std::uint64_t>> pages_;
  std::vector<std::uint64_t> iovas_;
  std::map<std::uint64_t, std::uint32_t> by_iova_;
  std::vector<std::uint64_t> spare_ = std::vector<std::uint64_t>(65536 / 8);
};

/// What a controller transfers for PRP1 and PRP2. `problem` says what it would have rejected.
std::vector<Run> walk(const SubmissionEntry& command, std::uint64_t length, std::uint64_t page_size, const Lists& lists,
                      std::string& problem) {
  std::vector<Run> runs;
  const auto offset_of = [&](std::uint64_t entry) { return entry % page_size; };
  // "The first PRP entry … may have a non-zero offset", in dwords.
  if (command.prp1 % 4 != 0) problem = "PRP1 is not aligned to a dword";
  const std::uint64_t in_first = std::min(length, page_size - offset_of(command.prp1));
  append(runs, command.prp1, in_first);
  std::uint64_t left = length - in_first;
  if (left == 0) {
    if (command.prp2 != 0) problem = "PRP2 is used, and the transfer lies in one page";
    return runs;
  }
  if (left <= page_size) {  // "the transfer crosses exactly one memory page boundary"
    if (offset_of(command.prp2) != 0) problem = "PRP2 has an offset";
    append(runs, command.prp2, left);
    return runs;
  }
  // "PRP2 is a PRP List pointer". "If more than one PRP List is needed, the last entry of a list page is a pointer to
  // the next", and it is a data page's entry where no more than that one page is left.
  std::uint64_t list = command.prp2;
  while (left > 0) {
    const std::uint64_t* entries = lists.at(list);
    if (entries == nullptr) {
      problem = "a list pointer leads nowhere";
      return runs;
    }
    const std::size_t slots = page_size / 8;
    for (std::size_t slot = 0; slot < slots && left > 0; ++slot) {
      const std::uint64_t entry = entries[slot];
      if (slot == slots - 1 && left > page_size) {
        list = entry;
        break;
      }
      if (offset_of(entry) != 0) {
        problem = "entry " + std::to_string(slot) + " has an offset";
        return runs;
      }
      const std::uint64_t piece = std::min(left, page_size);
      append(runs, entry, piece);
      left -= piece;
    }
  }
  return runs;
}

struct Case {
  std::uint64_t page_size;
  std::uint64_t lead;    ///< 4 KiB pages between the controller page's start and the registration's first
  std::uint64_t offset;  ///< from the start of the registration's first 4 KiB page
  std::uint64_t length;
};

/// Builds the PRPs of a case over memory whose pages lie at random addresses. "" or what is wrong.
std::string try_case(const Case& c, std::mt19937_64& random) {
  const std::uint64_t inside = c.page_size / 4096;
  const std::uint64_t needed = (c.offset + c.length + 4095) / 4096;
  std::vector<std::uint64_t> pages;
  std::uint64_t base = 0;
  for (std::uint64_t i = 0; i < needed; ++i) {
    if (i == 0 || (i + c.lead) % inside == 0) base = random() % (std::uint64_t{1} << 40) * c.page_size;
    pages.push_back(base + (i + c.lead) % inside * 4096);
  }

  std::vector<Run> expected;
  for (std::uint64_t byte = c.offset; byte < c.offset + c.length;) {
    const std::uint64_t piece = std::min(4096 - byte % 4096, c.offset + c.length - byte);
    expected.push_back({pages[byte / 4096] + byte % 4096, piece});
    byte += piece;
  }

  const std::uint64_t in_page = c.lead * 4096 + c.offset;
  const std::uint64_t spanned = pages_spanned(in_page, c.length, c.page_size);
  if (spanned != (in_page + c.length - 1) / c.page_size - in_page / c.page_size + 1) return "pages_spanned is wrong";
  const std::uint32_t needed_lists = list_pages_needed(spanned, c.page_size);

  Lists lists(needed_lists, c.page_size, random);
  SubmissionEntry command;
  command.prp1 = command.prp2 = kUnwritten;
  build_prps(command, PageAddresses{pages.data(), c.offset}, c.length, c.page_size,
             [&](std::uint32_t i) { return lists(i); });

  std::string problem = lists.problem();
  if (!problem.empty()) return problem;
  if (lists.taken() != needed_lists)
    return std::to_string(lists.taken()) + " list pages used, " + std::to_string(needed_lists) + " announced";
  if (!lists.guards_intact()) return "wrote outside a list page";
  const std::size_t entries = spanned > 2 ? spanned - 1 + (needed_lists - 1) : 0;
  if (lists.entries_written() != entries) return "wrote more or fewer list entries than the transfer has";
  const std::vector<Run> got = walk(command, c.length, c.page_size, lists, problem);
  if (!problem.empty()) return problem;
  if (got != expected) return "other bytes are transferred than were asked for";
  return "";
}

std::string describe(const Case& c) {
  std::ostringstream text;
  text << "page size " << c.page_size << ", lead " << c.lead << ", offset " << c.offset << ", length " << c.length;
  return text.str();
}

/// A transfer that touches `count` controller pages: it starts at `in_page` within the first and ends `short_by` before
/// the last one's end. Length 0 where there is none.
Case spanning(std::uint64_t page_size, std::uint64_t in_page, std::uint64_t count, std::uint64_t short_by) {
  const std::uint64_t end = count * page_size - short_by;
  return {page_size, in_page / 4096, in_page % 4096, end > in_page ? end - in_page : 0};
}

}  // namespace

TEST_CASE("prp: every shape of transfer addresses exactly the bytes that were asked for") {
  std::mt19937_64 random(1);
  int tried = 0;
#if defined(__SANITIZE_THREAD__)  // there is one
  constexpr std::uint64_t kLargest = 4096;
#else
  constexpr std::uint64_t kLargest = 65536;
#endif
  for (std::uint64_t page_size = 4096; page_size <= kLargest; page_size *= 2) {
    const std::uint64_t slots = page_size / 8;
    const std::uint64_t offsets[] = {
        0, 4, 512, 2048, 4092, page_size / 2, page_size - 4096, page_size - 512, page_size - 4};
    const std::uint64_t counts[] = {1,
                                    2,
                                    3,
                                    4,
                                    17,
                                    511,
                                    512,
                                    513,
                                    514,
                                    515,
                                    1023,
                                    1024,
                                    1025,
                                    1026,
                                    slots - 1,
                                    slots,
                                    slots + 1,
                                    slots + 2,
                                    2 * slots - 1,
                                    2 * slots,
                                    2 * slots + 1,
                                    2 * slots + 2,
                                    3 * slots - 2,
                                    3 * slots - 1,
                                    3 * slots};
    for (const std::uint64_t count : counts) {
      for (const std::uint64_t offset : offsets) {
        // Long lists of large pages cost time and differ in nothing but their count.
        if (count * (page_size / 4096) > 5000 && offset != 0 && offset != page_size - 4) continue;
        for (const std::uint64_t short_by : {std::uint64_t{0}, std::uint64_t{4}, page_size / 2, page_size - 4}) {
          const Case c = spanning(page_size, offset, count, short_by);
          if (c.length == 0) continue;
          const std::string wrong = try_case(c, random);
          REQUIRE_MESSAGE(wrong.empty(), wrong << ": " << describe(c));
          ++tried;
        }
      }
    }
  }
  CHECK(tried > (kLargest == 4096 ? 500 : 2000));
}

TEST_CASE("prp: random transfers over random pages address exactly the bytes that were asked for") {
  constexpr std::uint64_t kSeed = 20240229;
  std::mt19937_64 random(kSeed);
  for (int i = 0; i < 5000; ++i) {
    const std::uint64_t page_size = std::uint64_t{4096} << random() % 5;
    // Lengths of every magnitude: a dword to some three list pages of 4 KiB.
    const std::uint64_t length = (random() % (std::uint64_t{4} << random() % 21) / 4 + 1) * 4;
    const Case c{page_size, random() % (page_size / 4096), random() % 1024 * 4, length};
    // A transfer may begin far into a registration, too.
    const std::uint64_t skipped = random() % 4 == 0 ? random() % 32 * 4096 : 0;
    const Case moved{c.page_size, c.lead, c.offset + skipped, c.length};
    const std::string wrong = try_case(moved, random);
    REQUIRE_MESSAGE(wrong.empty(), wrong << ": " << describe(moved) << " (seed " << kSeed << ", case " << i << ")");
  }
}

namespace {

/// PRPs of `count` whole 4 KiB pages at 0x1000, 0x3000, 0x5000, …, and lists at 0xa0000, 0xb0000, ….
struct Whole {
  explicit Whole(std::uint64_t count) : lists(4, std::vector<std::uint64_t>(512, 0)) {
    std::vector<std::uint64_t> pages;
    for (std::uint64_t i = 0; i < count; ++i) pages.push_back(page(i));
    build_prps(command, PageAddresses{pages.data(), 0}, count * 4096, 4096, [&](std::uint32_t i) {
      used = std::max(used, i + 1);
      return ListPage{lists.at(i).data(), list(i)};
    });
  }
  static std::uint64_t page(std::uint64_t i) { return 0x1000 + i * 0x2000; }
  static std::uint64_t list(std::uint32_t i) { return 0xa0000 + i * 0x10000u; }

  SubmissionEntry command;
  std::uint32_t used = 0;
  std::vector<std::vector<std::uint64_t>> lists;
};

}  // namespace

TEST_CASE("prp: one page leaves PRP2 zero, two pages need no list") {
  CHECK(Whole(1).command.prp1 == 0x1000);
  CHECK(Whole(1).command.prp2 == 0);
  CHECK(Whole(2).command.prp2 == 0x3000);
  CHECK(Whole(2).used == 0);
}

TEST_CASE("prp: a list that fills its page exactly ends in a data page, not in a pointer") {
  const Whole at_512(512), at_513(513);
  CHECK(at_512.used == 1);
  CHECK(at_512.lists[0][510] == Whole::page(511));
  CHECK(at_512.lists[0][511] == 0);
  CHECK(at_513.used == 1);
  CHECK(at_513.command.prp2 == Whole::list(0));
  CHECK(at_513.lists[0][0] == Whole::page(1));
  CHECK(at_513.lists[0][511] == Whole::page(512));
}

TEST_CASE("prp: one page more than a list holds moves the last entry to a second list") {
  const Whole at_514(514);
  CHECK(at_514.used == 2);
  CHECK(at_514.lists[0][510] == Whole::page(511));
  CHECK(at_514.lists[0][511] == Whole::list(1));
  CHECK(at_514.lists[1][0] == Whole::page(512));
  CHECK(at_514.lists[1][1] == Whole::page(513));
  CHECK(at_514.lists[1][2] == 0);
}

TEST_CASE("prp: the second list follows the same rule at its own end") {
  const Whole at_1023(1023), at_1024(1024), at_1025(1025);
  CHECK(at_1023.used == 2);
  CHECK(at_1023.lists[1][510] == Whole::page(1022));
  CHECK(at_1023.lists[1][511] == 0);
  CHECK(at_1024.used == 2);
  CHECK(at_1024.lists[1][511] == Whole::page(1023));
  CHECK(at_1025.used == 3);
  CHECK(at_1025.lists[1][511] == Whole::list(2));
  CHECK(at_1025.lists[2][0] == Whole::page(1023));
  CHECK(at_1025.lists[2][1] == Whole::page(1024));
}

TEST_CASE("prp: the number of list pages grows by one for every 511 pages after the first 513") {
  CHECK(list_pages_needed(0, 4096) == 0);
  CHECK(list_pages_needed(1, 4096) == 0);
  for (std::uint64_t pages = 3; pages < 6000; ++pages) {
    // Each list but the last holds 511 pages, the last up to 512.
    std::uint64_t lists = 1;
    while (1 + 511 * (lists - 1) + 512 < pages) ++lists;
    REQUIRE(list_pages_needed(pages, 4096) == lists);
  }
  CHECK(list_pages_needed(8193, 65536) == 1);
  CHECK(list_pages_needed(8194, 65536) == 2);
}

TEST_CASE("prp: pages spanned counts the page of the first and of the last byte") {
  CHECK(pages_spanned(0, 0, 4096) == 0);
  CHECK(pages_spanned(0, 4096, 4096) == 1);
  CHECK(pages_spanned(0, 4097, 4096) == 2);
  CHECK(pages_spanned(4095, 1, 4096) == 1);
  CHECK(pages_spanned(4095, 2, 4096) == 2);
  CHECK(pages_spanned(4096 + 4, 4092, 4096) == 1);
  CHECK(pages_spanned(65532, 8, 65536) == 2);
}
