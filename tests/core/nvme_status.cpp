// SPDX-License-Identifier: Apache-2.0
//
// Status codes in words and as errno. Every code that the library's tables know is listed here with what a caller gets,
// typed from the specification's tables: a row that is lost or misplaced fails.
#include <doctest/doctest.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "nvme/status.hpp"

using namespace ugds::nvme;

namespace {

struct Expectation {
  std::uint16_t status;
  int code;
  const char* words;  ///< some of them
};

const std::vector<Expectation> kKnown = {
    {0x000, 0, "success"},
    {0x001, EOPNOTSUPP, "invalid command opcode"},
    {0x002, EINVAL, "invalid field"},
    {0x003, EPROTO, "command identifier conflict"},
    {0x004, EIO, "data transfer error"},
    {0x005, ECANCELED, "power loss"},
    {0x006, EIO, "internal error"},
    {0x007, ECANCELED, "abort requested"},
    {0x008, ECANCELED, "submission queue deleted"},
    {0x00b, EINVAL, "invalid namespace"},
    {0x00c, EPROTO, "command sequence error"},
    {0x013, EINVAL, "PRP offset invalid"},
    {0x015, EACCES, "operation denied"},
    {0x01d, EBUSY, "sanitize in progress"},
    {0x020, EROFS, "write protected"},
    {0x021, EINTR, "interrupted"},
    {0x022, EAGAIN, "transient transport error"},
    {0x080, ERANGE, "LBA out of range"},
    {0x081, ENOSPC, "capacity exceeded"},
    {0x082, EAGAIN, "namespace not ready"},
    {0x083, EBUSY, "reservation conflict"},
    {0x084, EBUSY, "format in progress"},
    {0x100, EINVAL, "completion queue invalid"},
    {0x101, EINVAL, "invalid queue identifier"},
    {0x102, EINVAL, "invalid queue size"},
    {0x103, EBUSY, "abort command limit exceeded"},
    {0x108, EINVAL, "invalid interrupt vector"},
    {0x10c, EINVAL, "invalid queue deletion"},
    {0x10d, EINVAL, "not saveable"},
    {0x180, EINVAL, "conflicting attributes"},
    {0x182, EROFS, "read only range"},
    {0x1b9, ENOSPC, "zone is full"},
    {0x280, EIO, "write fault"},
    {0x281, EIO, "unrecovered read error"},
    {0x282, EILSEQ, "guard check"},
    {0x283, EILSEQ, "application tag"},
    {0x284, EILSEQ, "reference tag"},
    {0x285, EIO, "compare failure"},
    {0x286, EACCES, "access denied"},
    {0x287, EIO, "deallocated"},
    {0x300, EIO, "internal path error"},
    {0x303, EAGAIN, "asymmetric access transition"},
    {0x370, EIO, "host pathing error"},
    {0x371, ECANCELED, "aborted by host"},
};

std::string hexadecimal(std::uint16_t status) {
  char text[16];
  std::snprintf(text, sizeof text, "(0x%03x)", status);
  return text;
}

}  // namespace

TEST_CASE("status: known codes have their words, their number and their errno") {
  for (const auto& [status, code, words] : kKnown) {
    const std::string text = status_words(status);
    CHECK_MESSAGE(text.find(words) != std::string::npos, text << " does not say \"" << words << "\"");
    CHECK_MESSAGE(text.find(hexadecimal(status)) != std::string::npos,
                  text << " does not give " << hexadecimal(status));
    CHECK_MESSAGE(status_errno(status) == code, text << " becomes errno " << status_errno(status));
  }
}

TEST_CASE("status: words name the status type") {
  CHECK(std::string(status_words(0x002)).starts_with("generic: "));
  CHECK(std::string(status_words(0x101)).starts_with("command specific: "));
  CHECK(std::string(status_words(0x281)).starts_with("media error: "));
  CHECK(std::string(status_words(0x371)).starts_with("path: "));
  CHECK(std::string(status_words(0x7c0)).starts_with("vendor specific: "));
  CHECK(std::string(status_words(0x4c0)).starts_with("reserved status type: "));
}

TEST_CASE("status: every one of the 2048 statuses has words with its number, and only success is no error") {
  for (std::uint16_t status = 0; status < 0x800; ++status) {
    const std::string text = status_words(status);
    REQUIRE_MESSAGE(text.find(hexadecimal(status)) != std::string::npos, text);
    REQUIRE_MESSAGE((status_errno(status) == 0) == (status == 0), text);
    REQUIRE(text.size() < 72);  // fits ugds::Error::status_words
    REQUIRE(status_hint(status) != nullptr);
  }
}

TEST_CASE("status: an unknown code is EIO and says its type and number") {
  CHECK(std::string(status_words(0x7ab)) == "vendor specific: code 0xab (0x7ab)");
  CHECK(status_errno(0x7ab) == EIO);
  CHECK(std::string(status_words(0x0ff)) == "generic: code 0xff (0x0ff)");
  CHECK(status_errno(0x0ff) == EIO);
}

TEST_CASE("status: the words of an unknown code are the calling thread's own") {
  const char* mine = status_words(0x7ab);
  std::thread([] { CHECK(std::string(status_words(0x7cd)) == "vendor specific: code 0xcd (0x7cd)"); }).join();
  CHECK(std::string(mine) == "vendor specific: code 0xab (0x7ab)");
}

TEST_CASE("status: what a person can act on has a hint, what they cannot has none") {
  for (const std::uint16_t with_hint :
       std::initializer_list<std::uint16_t>{0x281, 0x280, 0x020, 0x080, 0x081, 0x013, 0x004})
    CHECK_MESSAGE(std::strlen(status_hint(with_hint)) > 0, status_words(with_hint));
  for (const std::uint16_t without : std::initializer_list<std::uint16_t>{0x000, 0x007, 0x7ab})
    CHECK(std::strlen(status_hint(without)) == 0);
}

TEST_CASE("status: a status is made of its type and code") {
  CHECK(make_status(StatusType::media, 0x81) == status::unrecovered_read_error);
  CHECK(make_status(StatusType::command_specific, 0x02) == status::invalid_queue_size);
  CHECK(make_status(StatusType::generic, 0) == status::success);
  CHECK(make_status(StatusType::vendor, 0xff) == 0x7ff);
}
