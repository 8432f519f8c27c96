// SPDX-License-Identifier: Apache-2.0
#include "queue/queue_pair.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/fence.hpp"
#include "base/steps.hpp"

namespace ugds::queue {

QueuePair::QueuePair(device::Device& device, const Shape& shape, Doorbell submission, Doorbell completion)
    : depth_(shape.depth),
      submission_doorbell_(submission),
      completion_doorbell_(completion),
      shape_(shape),
      submission_memory_(device, Bytes(shape.depth * sizeof(nvme::SubmissionEntry)), true),
      completion_memory_(device, Bytes(shape.completion_depth * sizeof(nvme::CompletionEntry)), true) {
  if (shape.list_pages != 0) {
    // A list page is a page of the controller's, and contiguous; pages need not be beside each other.
    list_memory_ =
        device::DmaMemory(device, Bytes(shape.list_pages * shape.page_size), shape.page_size > nvme::kPageSize);
  }
  setup_step("queue pair: slots");
  command_slots_.resize(std::bit_ceil(shape.depth));  // any masked identifier is a slot's
  id_slots_.resize(std::bit_ceil(shape.depth));
  id_mask_ = static_cast<std::uint32_t>(id_slots_.size()) - 1;
  next_list_.resize(shape.list_pages);
  commands_ = command_slots_.data();
  free_ids_ = id_slots_.data();
  submission_ = reinterpret_cast<nvme::SubmissionEntry*>(submission_memory_.data());
  completion_ = reinterpret_cast<nvme::CompletionEntry*>(completion_memory_.data());
  initialise_rings();
}

QueuePair::~QueuePair() = default;

void QueuePair::initialise_rings() {
  std::memset(submission_memory_.data(), 0, submission_memory_.size().value);
  std::memset(completion_memory_.data(), 0, completion_memory_.size().value);
  tail_ = rung_tail_ = head_ = 0;
  set_next_turn();
  phase_ = 1;
  // One ring entry stays free, so that full and empty differ: as many identifiers as entries less one.
  free_count_.store(depth_ - 1, std::memory_order_relaxed);
  next_free_ = 0;
  for (std::uint32_t i = 0; i < depth_ - 1; ++i) free_ids_[i] = static_cast<std::uint16_t>(i);
  distrusted_.store(false, std::memory_order_relaxed);
  free_lists_ = static_cast<std::int32_t>(next_list_.size()) - hidden_lists_;
  for (std::size_t i = 0; i < next_list_.size(); ++i) {
    next_list_[i] = i + 1 < next_list_.size() ? static_cast<std::uint16_t>(i + 1) : Command::kNoList;
  }
  first_list_ = next_list_.empty() ? Command::kNoList : 0;
}

std::uint16_t QueuePair::take_lists(std::uint32_t count) {
  const std::uint16_t first = first_list_;
  std::uint16_t last = first;
  for (std::uint32_t i = 1; i < count; ++i) last = next_list_[last];
  first_list_ = next_list_[last];
  next_list_[last] = Command::kNoList;
  free_lists_ -= static_cast<std::int32_t>(count);
  return first;
}

void QueuePair::give_lists(std::uint16_t first) {
  std::uint16_t last = first;
  std::int32_t given = 1;
  for (; next_list_[last] != Command::kNoList; ++given) last = next_list_[last];
  next_list_[last] = first_list_;
  first_list_ = first;
  free_lists_ += given;
}

std::unique_ptr<Trace> QueuePair::trace_into(std::unique_ptr<Trace> trace) {
  const std::int32_t hidden = trace ? 1 << 16 : 0;
  free_lists_ += hidden_lists_ - hidden;
  hidden_lists_ = hidden;
  return std::exchange(trace_, std::move(trace));
}

void QueuePair::record_staged(std::uint64_t offset, std::uint32_t bytes, std::uint64_t submitted, std::uint8_t flags) {
  const std::uint32_t slot = free_ids_[(next_free_ - 1) & id_mask_];
  Command& command = commands_[slot];
  const std::uint8_t opcode = submission_[(tail_ + depth_ - 1) % depth_].opcode;
  trace_->staged(slot, static_cast<std::uint16_t>(command.id), opcode, offset, bytes, submitted, command.staged, flags);
  command.list = command.list == Command::kNoList ? Command::kTracedNoList
                                                  : static_cast<std::uint16_t>(command.list | Command::kTraced);
}

/// What a retired command had besides its slot: list pages, and a record.
void QueuePair::let_go(std::uint32_t slot, std::uint16_t status) {
  const std::uint16_t list = commands_[slot].list;
  if ((list & Command::kTraced) == 0) return give_lists(list);
  if (trace_) trace_->retired(slot, status, ticks());
  if (list != Command::kTracedNoList) give_lists(static_cast<std::uint16_t>(list & ~Command::kTraced));
}

std::uint16_t QueuePair::build_lists(nvme::SubmissionEntry& entry, const nvme::PageAddresses& memory,
                                     std::uint32_t bytes) {
  const std::uint64_t pages = nvme::pages_spanned(memory.at(0), bytes, shape_.page_size);
  const std::uint16_t first = take_lists(nvme::list_pages_needed(pages, shape_.page_size));
  std::uint16_t page = first;
  nvme::build_prps(entry, memory, bytes, shape_.page_size, [&](std::uint32_t index) {
    if (index != 0) page = next_list_[page];
    return nvme::ListPage{list_entries(page), list_iova(page)};
  });
  return first;
}

std::uint64_t* QueuePair::stage_with_page(Request& request) {
  const std::uint16_t page = take_lists(1);
  next().prp1 = list_iova(page);
  push(request, next(), false, Command::kNoRegistration, page, 0, 0);
  return list_entries(page);
}

void QueuePair::fail(const Command& command, std::uint16_t status, bool stopped) {
  statistics_.errors.add(1);
  Request* request = command.request;
  if (request == &nobody_ || command.offset >= request->failed_at) return;
  request->failed_at = command.offset;
  request->status = status;
  request->stopped = stopped;
}

/// Wraps the completion ring's head, and rings its doorbell. The controller may post as many entries as the ring has,
/// less one, beyond the head that it was told. All commands in flight, depth - 1 at most, fit while that head lags by
/// no more than the rings differ.
void QueuePair::turn_head() {
  if (head_ == shape_.completion_depth) {
    head_ = 0;
    phase_ ^= 1;
  }
  set_next_turn();
  completion_doorbell_.ring(head_);
  // The head before the look at the next entry: a controller that interrupts only for an empty queue posts that entry,
  // and then looks at the head. One of the two sees the other.
  if (wakeup_) full_fence();
}

void QueuePair::set_next_turn() {
  turning_ = wakeup_ ? head_ + 1 : std::min(shape_.completion_depth, head_ + shape_.completion_depth - depth_ + 1);
}

void QueuePair::use_wakeup(std::unique_ptr<Wakeup> wakeup) {
  wakeup_ = std::move(wakeup);
  set_next_turn();
}

void QueuePair::distrust() {
  statistics_.protocol_errors.add(1);
  distrusted_.store(true, std::memory_order_relaxed);
}

void QueuePair::orphan(Request& request) {
  for (Command& command : command_slots_) {
    if (command.in_flight() && command.request == &request) command.request = &nobody_;
  }
  nobody_.in_flight += std::exchange(request.in_flight, 0);
}

std::uint64_t QueuePair::oldest(const Request& request, std::uint16_t& cid) const {
  std::uint64_t oldest = 0;
  for (std::size_t i = 0; i < command_slots_.size(); ++i) {
    const Command& command = command_slots_[i];
    if (!command.in_flight() || command.request != &request) continue;
    if (oldest != 0 && command.staged >= oldest) continue;
    oldest = command.staged;
    cid = static_cast<std::uint16_t>(command.id);
  }
  return oldest;
}

bool QueuePair::is_in_flight(std::uint16_t cid, std::uint64_t staged) const {
  const Command& command = command_slots_[cid & id_mask_];
  return command.id == cid && command.staged == staged;
}

void QueuePair::restart(std::uint16_t status, Doorbell submission, Doorbell completion) {
  for (std::size_t i = 0; i < command_slots_.size(); ++i) {
    if (command_slots_[i].in_flight()) retire(static_cast<std::uint32_t>(i), status, 0, true);
  }
  submission_doorbell_ = submission;
  completion_doorbell_ = completion;
  initialise_rings();
}

void QueuePair::leak() {
  submission_memory_.leak();
  completion_memory_.leak();
  list_memory_.leak();
}

}  // namespace ugds::queue
