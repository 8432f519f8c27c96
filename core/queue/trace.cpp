// SPDX-License-Identifier: Apache-2.0
#include "queue/trace.hpp"

#include <utility>

namespace ugds::queue {

void Trace::staged(std::uint32_t slot, std::uint16_t cid, std::uint8_t opcode, std::uint64_t offset,
                   std::uint32_t bytes, std::uint64_t submitted, std::uint64_t now, std::uint8_t flags) {
  if (count_ == records_.size()) {
    ++dropped_;  // and open_ says so: what had the slot before has retired
    return;
  }
  open_[slot] = static_cast<std::uint32_t>(count_);
  records_[count_++] = {.submitted = submitted,
                        .staged = now,
                        .offset = offset,
                        .bytes = bytes,
                        .queue = queue_,
                        .cid = cid,
                        .opcode = opcode,
                        .flags = flags};
}

void Trace::rung(std::uint64_t now) {
  for (; rung_ != count_; ++rung_) records_[rung_].rung = now;
}

void Trace::retired(std::uint32_t slot, std::uint16_t status, std::uint64_t now) {
  const std::uint32_t at = std::exchange(open_[slot], kNotRecorded);
  if (at == kNotRecorded) return;
  records_[at].status = status;
  records_[at].completed = now;
}

void Trace::take(std::vector<TraceRecord>& out) {
  // A record that is open says so, and for which slot, where its completion will be: ticks never reach that far.
  constexpr std::uint64_t open = std::uint64_t{1} << 63;
  for (std::uint32_t slot = 0; slot < open_.size(); ++slot) {
    if (open_[slot] != kNotRecorded) records_[open_[slot]].completed = open | slot;
  }
  std::size_t kept = 0, rung = 0;
  for (std::size_t at = 0; at != count_; ++at) {
    if (at == rung_) rung = kept;
    TraceRecord& record = records_[at];
    if ((record.completed & open) == 0) {
      out.push_back(record);
      continue;
    }
    open_[record.completed & ~open] = static_cast<std::uint32_t>(kept);
    records_[kept++] = record;
  }
  rung_ = rung_ == count_ ? kept : rung;
  count_ = kept;
}

}  // namespace ugds::queue
