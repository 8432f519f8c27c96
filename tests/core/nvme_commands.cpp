// SPDX-License-Identifier: Apache-2.0
//
// Commands and entries, encoded as the specification's figures draw them.
#include <doctest/doctest.h>

#include <array>
#include <cstring>

#include "nvme/commands.hpp"

using namespace ugds;
using namespace ugds::nvme;

namespace {

/// The sixteen dwords of a submission entry.
std::array<std::uint32_t, 16> dwords(const SubmissionEntry& entry) {
  std::array<std::uint32_t, 16> words;
  std::memcpy(words.data(), &entry, sizeof entry);
  return words;
}

using Words = std::array<std::uint32_t, 16>;

}  // namespace

TEST_CASE("commands: Identify") {
  CHECK(dwords(identify(Cns::ns, 7, Iova(0x1'2345'6000))) == Words{0x06, 7, 0, 0, 0, 0, 0x2345'6000, 1, 0, 0, 0x00});
  CHECK(dwords(identify(Cns::controller, 0, Iova(0x1000)))[10] == 1);
  CHECK(dwords(identify(Cns::active_namespaces, 0, Iova(0x1000)))[10] == 2);
  CHECK(dwords(identify(Cns::descriptors, 1, Iova(0x1000)))[10] == 3);
}

TEST_CASE("commands: features") {
  CHECK(dwords(set_features(Feature::volatile_write_cache, 1)) == Words{0x09, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x06, 1});
  CHECK(dwords(get_features(Feature::arbitration)) == Words{0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x01});
}

TEST_CASE("commands: the number of queues is asked for from zero, and never beyond what is legal") {
  CHECK(set_number_of_queues(1).cdw11 == 0);
  CHECK(set_number_of_queues(0).cdw11 == 0);
  CHECK(set_number_of_queues(8).cdw11 == 0x0007'0007);
  CHECK(set_number_of_queues(65534).cdw11 == 0xfffd'fffd);
  CHECK(set_number_of_queues(0xffffffff).cdw11 == 0xfffd'fffd);
  CHECK(set_number_of_queues(8).cdw10 == 0x07);
}

TEST_CASE("commands: granted pairs are the smaller of both kinds") {
  CHECK(granted_queue_pairs(0x0007'0007) == 8);
  CHECK(granted_queue_pairs(0x0000'0007) == 1);
  CHECK(granted_queue_pairs(0x0007'0000) == 1);
  CHECK(granted_queue_pairs(0xffff'ffff) == 65536);
}

TEST_CASE("commands: queues are made and deleted") {
  CHECK(dwords(create_completion_queue(3, 256, Iova(0x9000), true, 5)) ==
        Words{0x05, 0, 0, 0, 0, 0, 0x9000, 0, 0, 0, 0x00ff'0003, 0x0005'0003});
  CHECK(create_completion_queue(3, 256, Iova(0x9000), false, 5).cdw11 == 1);
  CHECK(create_completion_queue(3, 65536, Iova(0x9000), false, 0).cdw10 == 0xffff'0003);
  CHECK(dwords(create_submission_queue(4, 2, Iova(0xa000), 3)) ==
        Words{0x01, 0, 0, 0, 0, 0, 0xa000, 0, 0, 0, 0x0001'0004, 0x0003'0001});
  CHECK(dwords(delete_submission_queue(4)) == Words{0x00, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4});
  CHECK(dwords(delete_completion_queue(3)) == Words{0x04, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3});
}

TEST_CASE("commands: Abort names the queue and the command, and its result says whether it aborted") {
  CHECK(dwords(nvme::abort(2, 0xbeef)) == Words{0x08, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xbeef'0002});
  CHECK(was_aborted(0));
  CHECK(!was_aborted(1));
  CHECK(was_aborted(0xfffffffe));
}

TEST_CASE("commands: Doorbell Buffer Config carries both pages") {
  CHECK(dwords(doorbell_buffer_config(Iova(0x1'0000'1000), Iova(0x2'0000'2000))) ==
        Words{0x7c, 0, 0, 0, 0, 0, 0x1000, 1, 0x2000, 2});
}

TEST_CASE("commands: Read, Write and Write Zeroes carry a 64-bit address and a count from zero") {
  CHECK(dwords(block_command(Opcode::read, 1, Lba(0x1234'5678'9abc'def0), 8)) ==
        Words{0x02, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0x9abc'def0, 0x1234'5678, 7});
  CHECK(block_command(Opcode::write, 2, Lba(0), 1, kForceUnitAccess).cdw12 == 0x4000'0000);
  CHECK(block_command(Opcode::write_zeroes, 2, Lba(0), 65536, kDeallocate).cdw12 == 0x0200'ffff);
  CHECK(block_command(Opcode::write_zeroes, 2, Lba(0), 1).opcode == 0x08);
}

TEST_CASE("commands: Flush and Dataset Management") {
  CHECK(dwords(flush(3)) == Words{0x00, 3});
  CHECK(dwords(flush(kAllNamespaces))[1] == 0xffff'ffff);
  CHECK(dwords(dataset_management(1, 256, kDsmDeallocate, Iova(0x7000))) ==
        Words{0x09, 1, 0, 0, 0, 0, 0x7000, 0, 0, 0, 255, 4});
}

TEST_CASE("commands: the identifier, and whatever a command does not use, is zero") {
  for (const SubmissionEntry& entry : {flush(1), block_command(Opcode::read, 1, Lba(5), 1), nvme::abort(1, 2)}) {
    CHECK(entry.cid == 0);
    CHECK(entry.flags == 0);
    CHECK(entry.metadata == 0);
    CHECK(entry.cdw13 == 0);
    CHECK(entry.cdw15 == 0);
  }
}

TEST_CASE("entries: a completion's last dword holds identifier, phase, status and do-not-retry") {
  // DNR, status type 2 code 0x81, phase 1, identifier 0x1234.
  constexpr CompletionWord word{0x8503'1234};
  CHECK(word.cid() == 0x1234);
  CHECK(word.phase());
  CHECK(word.status() == 0x281);
  CHECK(word.do_not_retry());
  // The two bits of "command retry delay" and "more" are no part of the status.
  constexpr CompletionWord more{0x7000'0000};
  CHECK(more.status() == 0);
  CHECK(!more.do_not_retry());
  for (const std::uint16_t status : std::initializer_list<std::uint16_t>{0x000, 0x002, 0x281, 0x7ff})
    for (const bool phase : {false, true})
      for (const bool final : {false, true}) {
        const auto made = CompletionWord::make(0xabcd, phase, status, final);
        CHECK(made.cid() == 0xabcd);
        CHECK(made.phase() == phase);
        CHECK(made.status() == status);
        CHECK(made.do_not_retry() == final);
      }
}

TEST_CASE("entries: fields lie at the bytes of the specification") {
  SubmissionEntry entry;
  entry.opcode = 1;
  entry.flags = 2;
  entry.cid = 0x0403;
  entry.nsid = 5;
  entry.metadata = 0x6'0000'0007;
  entry.prp1 = 0x8'0000'0009;
  entry.prp2 = 0xa'0000'000b;
  entry.cdw15 = 15;
  CHECK(dwords(entry) == Words{0x0403'0201, 5, 0, 0, 7, 6, 9, 8, 11, 10, 0, 0, 0, 0, 0, 15});
}
