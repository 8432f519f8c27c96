// SPDX-License-Identifier: Apache-2.0
//
// Memory goes: whatever still needs it is named, and never reaches it again.
#include <algorithm>

#include "emulator/impl.hpp"

namespace ugds::emulator {

void Controller::Impl::unmap(std::uint64_t iova) noexcept {
  const AddressSpace::Range* range = memory.find(iova);
  if (range == nullptr) {
    violations.add("unmap-unknown", "0x%llx is not the first byte of a mapping", static_cast<unsigned long long>(iova));
    return;
  }
  try {
    check_unused({iova, range->length});
  } catch (...) {
    fail_fatally();
  }
  auto touches = [&](std::uint64_t at) {
    return shadow != nullptr && at < iova + range->length && iova < at + page_size;
  };
  if (touches(shadow_iova) || touches(event_iova)) {
    // These are looked at without a translation. They cannot be any more.
    for (const std::uint16_t id : submission_ids)
      if (id != 0) submission[id]->doorbell = {doorbell_word(nvme::submission_doorbell(id, stride())), nullptr, 0};
    for (const std::uint16_t id : completion_ids)
      if (id != 0) completion[id]->doorbell = {doorbell_word(nvme::completion_doorbell(id, stride())), nullptr, 0};
    shadow = events = nullptr;
    fail_fatally();
  }
  memory.remove(iova);
}

void Controller::Impl::add_in_use(const Transfer::Piece& range, const char* what, std::uint32_t cid,
                                  std::uint32_t queue) {
  violations.add("unmap-in-use", "[0x%llx, +0x%llx) holds %s (command %u, queue %u)",
                 static_cast<unsigned long long>(range.iova), static_cast<unsigned long long>(range.bytes), what, cid,
                 queue);
}

void Controller::Impl::check_unused_by(const Command& command, const Transfer::Piece& range) {
  const auto check = [&](const Transfer::Piece& piece, const char* what) {
    if (overlap(piece, range)) add_in_use(range, what, command.entry.cid, command.sq);
  };
  for (const Transfer::Piece& piece : command.transfer.data) check(piece, "data");
  for (const Transfer::Piece& piece : command.transfer.lists) check(piece, "a PRP list");
  check(command.transfer.metadata, "metadata");
}

/// What stays in its queue until there is a slot for it names memory already.
void Controller::Impl::check_unused_by_queued(const SubmissionQueue& queue, const Transfer::Piece& range) {
  Command command;
  command.sq = queue.id;
  for (std::uint32_t at = queue.head; at != queue.tail; at = queue.after(at)) {
    command.transfer.clear();
    if (!memory.read(queue.ring.at(std::uint64_t{at} * sizeof command.entry), &command.entry, sizeof command.entry))
      return;  // it is reported when it is fetched
    prepare_io(command);
    check_unused_by(command, range);
  }
}

void Controller::Impl::check_unused(const Transfer::Piece& range) {
  // What the host has submitted and the controller has not looked at becomes commands, which name their memory.
  if (state == State::ready && !removed.load(std::memory_order_relaxed)) {
    for (const std::uint16_t id : submission_ids) {
      observe(*submission[id]);
      fetch(*submission[id], submission[id]->depth);
      if (state != State::ready || removed.load(std::memory_order_relaxed)) break;
      check_unused_by_queued(*submission[id], range);
    }
  }
  if (removed.load(std::memory_order_relaxed)) return;
  for (const Command* command : live) check_unused_by(*command, range);
  const auto check_ring = [&](const Ring& ring, std::uint64_t bytes, const char* what, std::uint32_t id) {
    for (std::uint64_t at = 0; at < bytes; at += page_size)
      if (overlap({ring.at(at), std::min(page_size, bytes - at)}, range)) return add_in_use(range, what, 0, id);
  };
  for (const std::uint16_t id : submission_ids)
    check_ring(submission[id]->ring, std::uint64_t{submission[id]->depth} * 64, "a submission queue", id);
  for (const std::uint16_t id : completion_ids)
    check_ring(completion[id]->ring, std::uint64_t{completion[id]->depth} * 16, "a completion queue", id);
  if (shadow != nullptr && (overlap({shadow_iova, page_size}, range) || overlap({event_iova, page_size}, range)))
    add_in_use(range, "shadow doorbells", 0, 0);
}

}  // namespace ugds::emulator
