// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <vector>

#include "queue/trace.hpp"

using namespace ugds;
using queue::Trace;
using queue::TraceRecord;

namespace {

constexpr std::uint8_t kRead = 2;

void stage(Trace& trace, std::uint32_t slot, std::uint64_t now) {
  trace.staged(slot, static_cast<std::uint16_t>(0x4000 | slot), kRead, 4096 * now, 4096, now - 1, now);
}

std::vector<TraceRecord> taken(Trace& trace) {
  std::vector<TraceRecord> out;
  trace.take(out);
  return out;
}

}  // namespace

TEST_CASE("trace: a record tells of a command's whole life") {
  Trace trace(4, 8, 3);
  trace.staged(5, 0x1235, 1, 1 << 20, 8192, 90, 100, queue::kTraceDurable);
  trace.rung(110);
  trace.retired(5, 0x281, 150);
  const auto records = taken(trace);
  REQUIRE(records.size() == 1);
  const TraceRecord& r = records[0];
  CHECK(r.submitted == 90);
  CHECK(r.staged == 100);
  CHECK(r.rung == 110);
  CHECK(r.completed == 150);
  CHECK(r.offset == 1 << 20);
  CHECK(r.bytes == 8192);
  CHECK(r.queue == 3);
  CHECK(r.cid == 0x1235);
  CHECK(r.status == 0x281);
  CHECK(r.opcode == 1);
  CHECK(r.flags == queue::kTraceDurable);
  CHECK(trace.dropped() == 0);
}

TEST_CASE("trace: commands that retire out of order keep the order of staging and their own times") {
  Trace trace(8, 8, 1);
  for (std::uint32_t slot = 0; slot < 4; ++slot) stage(trace, slot, 10 + slot);
  trace.rung(20);
  for (const std::uint32_t slot : {2u, 0u, 3u, 1u}) trace.retired(slot, static_cast<std::uint16_t>(slot), 30 + slot);
  const auto records = taken(trace);
  REQUIRE(records.size() == 4);
  for (std::uint32_t i = 0; i < 4; ++i) {
    CHECK(records[i].staged == 10 + i);
    CHECK(records[i].rung == 20);
    CHECK(records[i].completed == 30 + i);
    CHECK(records[i].status == i);
  }
}

TEST_CASE("trace: a doorbell stamps what was staged since the one before it") {
  Trace trace(8, 8, 1);
  stage(trace, 0, 10);
  stage(trace, 1, 11);
  trace.rung(12);
  stage(trace, 2, 13);
  trace.rung(14);
  trace.rung(15);
  for (std::uint32_t slot = 0; slot < 3; ++slot) trace.retired(slot, 0, 20);
  const auto records = taken(trace);
  REQUIRE(records.size() == 3);
  CHECK(records[0].rung == 12);
  CHECK(records[1].rung == 12);
  CHECK(records[2].rung == 14);
}

TEST_CASE("trace: what finds a full buffer is counted, and neither recorded nor taken for what had its slot") {
  Trace trace(2, 8, 1);
  stage(trace, 0, 10);
  stage(trace, 1, 11);
  trace.retired(0, 0, 12);
  stage(trace, 0, 13);
  stage(trace, 4, 14);
  CHECK(trace.dropped() == 2);
  trace.rung(15);
  trace.retired(0, 7, 16);
  trace.retired(4, 7, 17);
  trace.retired(1, 0, 18);
  const auto records = taken(trace);
  REQUIRE(records.size() == 2);
  CHECK(records[0].completed == 12);
  CHECK(records[0].status == 0);
  CHECK(records[1].completed == 18);
  CHECK(trace.dropped() == 2);
  stage(trace, 0, 20);  // there is room again
  trace.retired(0, 0, 21);
  CHECK(taken(trace).size() == 1);
  CHECK(trace.dropped() == 2);
}

TEST_CASE("trace: a command that was in flight when tracing began is passed over") {
  Trace trace(4, 8, 1);
  trace.retired(3, 0, 5);
  stage(trace, 2, 10);
  trace.retired(3, 0, 11);
  CHECK(taken(trace).empty());
  trace.retired(2, 0, 12);
  CHECK(taken(trace).size() == 1);
}

TEST_CASE("trace: a slot that is used again has a record of its own") {
  Trace trace(4, 2, 1);
  for (std::uint64_t turn = 0; turn < 3; ++turn) {
    stage(trace, 1, 10 * turn + 1);
    trace.rung(10 * turn + 2);
    trace.retired(1, static_cast<std::uint16_t>(turn), 10 * turn + 3);
  }
  const auto records = taken(trace);
  REQUIRE(records.size() == 3);
  for (std::uint64_t turn = 0; turn < 3; ++turn) {
    CHECK(records[turn].staged == 10 * turn + 1);
    CHECK(records[turn].rung == 10 * turn + 2);
    CHECK(records[turn].completed == 10 * turn + 3);
    CHECK(records[turn].status == turn);
  }
}

TEST_CASE("trace: what is in flight stays when the finished are taken, and is finished later") {
  Trace trace(4, 8, 1);
  for (std::uint32_t slot = 0; slot < 2; ++slot) stage(trace, slot, 10 + slot);
  trace.rung(15);
  stage(trace, 2, 16);  // no doorbell told of it yet
  stage(trace, 3, 17);
  trace.retired(0, 0, 18);
  trace.retired(3, 9, 18);  // stopped before it was rung
  auto records = taken(trace);
  REQUIRE(records.size() == 2);
  CHECK(records[0].staged == 10);
  CHECK(records[1].staged == 17);
  CHECK(records[1].rung == 0);
  CHECK(taken(trace).empty());
  stage(trace, 0, 20);
  trace.rung(21);
  trace.retired(2, 0, 22);
  trace.retired(1, 0, 23);
  records = taken(trace);
  REQUIRE(records.size() == 2);
  CHECK(records[0].staged == 11);
  CHECK(records[0].rung == 15);
  CHECK(records[0].completed == 23);
  CHECK(records[1].staged == 16);
  CHECK(records[1].rung == 21);
  CHECK(records[1].completed == 22);
  trace.retired(0, 0, 24);
  records = taken(trace);
  REQUIRE(records.size() == 1);
  CHECK(records[0].rung == 21);
}
