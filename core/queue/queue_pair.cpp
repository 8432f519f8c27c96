// SPDX-License-Identifier: Apache-2.0
#include "queue/queue_pair.hpp"

#include <cstring>

#include "base/steps.hpp"

namespace ugds::queue {

QueuePair::QueuePair(device::Device& device, const Shape& shape, Doorbell submission, Doorbell completion)
    : depth_(shape.depth),
      submission_doorbell_(submission),
      completion_doorbell_(completion),
      shape_(shape),
      submission_memory_(device, Bytes(shape.depth * sizeof(nvme::SubmissionEntry)), true),
      completion_memory_(device, Bytes(shape.depth * sizeof(nvme::CompletionEntry)), true) {
  if (shape.list_pages != 0) list_memory_ = device::DmaMemory(device, Bytes(shape.list_pages * shape.page_size), false);
  setup_step("queue pair: slots");
  command_slots_.resize(shape.depth);
  id_slots_.resize(shape.depth);
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
  tail_ = rung_tail_ = head_ = submission_head_ = 0;
  phase_ = 1;
  // One ring entry stays free, so that full and empty differ: as many identifiers as entries less one.
  free_count_ = depth_ - 1;
  next_free_ = 0;
  for (std::uint32_t i = 0; i < depth_; ++i) free_ids_[i] = static_cast<std::uint16_t>(i);
  distrusted_.store(false, std::memory_order_relaxed);
  free_lists_ = static_cast<std::uint16_t>(next_list_.size());
  for (std::size_t i = 0; i < next_list_.size(); ++i) {
    next_list_[i] = i + 1 < next_list_.size() ? static_cast<std::uint16_t>(i + 1) : Command::kNoList;
  }
  first_list_ = next_list_.empty() ? Command::kNoList : 0;
  in_flight_.store(0, std::memory_order_relaxed);
}

std::uint16_t QueuePair::take_lists(std::uint32_t count) {
  const std::uint16_t first = first_list_;
  std::uint16_t last = first;
  for (std::uint32_t i = 1; i < count; ++i) last = next_list_[last];
  first_list_ = next_list_[last];
  next_list_[last] = Command::kNoList;
  free_lists_ = static_cast<std::uint16_t>(free_lists_ - count);
  return first;
}

void QueuePair::give_lists(std::uint16_t first) {
  std::uint16_t last = first, count = 1;
  for (; next_list_[last] != Command::kNoList; ++count) last = next_list_[last];
  next_list_[last] = first_list_;
  first_list_ = first;
  free_lists_ = static_cast<std::uint16_t>(free_lists_ + count);
}

inline void QueuePair::push(Request& request, nvme::SubmissionEntry& entry, std::uint32_t registration,
                            std::uint16_t list, std::uint64_t offset, std::uint32_t bytes) {
  // Ring positions of free identifiers are [next_free_, next_free_ + free_count_); see retire().
  const std::uint16_t cid = free_ids_[next_free_];
  if (++next_free_ == depth_) next_free_ = 0;
  --free_count_;
  Command& command = commands_[cid];
  command.request = &request;
  command.offset = offset;
  command.staged = ticks();
  command.bytes = bytes;
  command.registration = registration;
  command.list = list;
  command.opcode = entry.opcode;
  command.in_flight = true;
  ++request.in_flight;
  in_flight_.store(in_flight_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  entry.cid = cid;
  submission_[tail_] = entry;
  if (++tail_ == depth_) tail_ = 0;
}

void QueuePair::stage_data(Request& request, nvme::SubmissionEntry& entry, std::uint32_t registration,
                           const nvme::PageAddresses& memory, std::uint64_t offset, std::uint32_t bytes) {
  const std::uint64_t pages = nvme::pages_spanned(memory.at(0), bytes, shape_.page_size);
  if (pages <= 2) [[likely]] {
    nvme::build_prps(entry, memory, bytes, shape_.page_size, [](std::uint32_t) { return nvme::ListPage{}; });
    push(request, entry, registration, Command::kNoList, offset, bytes);
    return;
  }
  std::uint16_t page = take_lists(nvme::list_pages_needed(pages, shape_.page_size));
  const std::uint16_t first = page;
  nvme::build_prps(entry, memory, bytes, shape_.page_size, [&](std::uint32_t index) {
    if (index != 0) page = next_list_[page];
    return nvme::ListPage{list_entries(page), list_iova(page)};
  });
  push(request, entry, registration, first, offset, bytes);
}

void QueuePair::stage(Request& request, nvme::SubmissionEntry& entry) {
  push(request, entry, Command::kNoRegistration, Command::kNoList, 0, 0);
}

std::uint64_t* QueuePair::stage_with_page(Request& request, nvme::SubmissionEntry& entry) {
  const std::uint16_t page = take_lists(1);
  entry.prp1 = list_iova(page);
  push(request, entry, Command::kNoRegistration, page, 0, 0);
  return list_entries(page);
}

std::uint32_t QueuePair::reap() {
  std::uint32_t reaped = 0;
  for (;;) {
    nvme::CompletionEntry& entry = completion_[head_];
    const nvme::CompletionWord word{std::atomic_ref(entry.last).load(std::memory_order_acquire)};
    if (static_cast<std::uint32_t>(word.phase()) != phase_) break;
    const std::uint16_t cid = word.cid();
    if (cid < depth_ && commands_[cid].in_flight && entry.sq_head < depth_) [[likely]] {
      submission_head_ = entry.sq_head;
      retire(cid, word.status(), entry.result, false);
    } else {
      statistics_.protocol_errors.add(1);
      distrusted_.store(true, std::memory_order_relaxed);
    }
    if (++head_ == depth_) {
      head_ = 0;
      phase_ ^= 1;
    }
    if (++reaped == depth_ - 1) break;  // the controller must see the head move before it can post more
  }
  if (reaped != 0) completion_doorbell_.ring(head_);
  return reaped;
}

void QueuePair::retire(std::uint16_t cid, std::uint16_t status, std::uint32_t result, bool stopped) {
  Command& command = commands_[cid];
  command.in_flight = false;
  std::uint32_t last = next_free_ + free_count_++;
  if (last >= depth_) last -= depth_;
  free_ids_[last] = cid;
  in_flight_.store(in_flight_.load(std::memory_order_relaxed) - 1, std::memory_order_relaxed);
  if (command.list != Command::kNoList) give_lists(command.list);
  if (command.registration != Command::kNoRegistration) ledger_.remove(command.registration);
  statistics_.commands.add(1);
  statistics_.latency[latency_bucket(ticks() - command.staged)].add(1);
  if (status == 0) [[likely]] {
    (command.opcode == static_cast<std::uint8_t>(nvme::Opcode::write) ? statistics_.write_bytes
                                                                      : statistics_.read_bytes)
        .add(command.bytes);
  } else {
    statistics_.errors.add(1);
  }
  Request* request = command.request;
  if (request == nullptr) return;
  request->result = result;
  if (status != 0 && command.offset < request->failed_at) {
    request->failed_at = command.offset;
    request->status = status;
    request->stopped = stopped;
  }
  if (--request->in_flight == 0 && (request->complete_when_idle || request->failed())) {
    statistics_.requests.add(1);
    request->done.store(1, std::memory_order_release);
  }
}

void QueuePair::orphan(Request& request) {
  for (Command& command : command_slots_) {
    if (command.in_flight && command.request == &request) command.request = nullptr;
  }
  request.in_flight = 0;
}

std::uint64_t QueuePair::oldest(const Request& request, std::uint16_t& cid) const {
  std::uint64_t oldest = 0;
  for (std::size_t i = 0; i < command_slots_.size(); ++i) {
    const Command& command = command_slots_[i];
    if (!command.in_flight || command.request != &request) continue;
    if (oldest != 0 && command.staged >= oldest) continue;
    oldest = command.staged;
    cid = static_cast<std::uint16_t>(i);
  }
  return oldest;
}

bool QueuePair::is_in_flight(std::uint16_t cid, std::uint64_t staged) const {
  return command_slots_[cid].in_flight && command_slots_[cid].staged == staged;
}

void QueuePair::restart(std::uint16_t status, Doorbell submission, Doorbell completion) {
  for (std::size_t i = 0; i < command_slots_.size(); ++i) {
    if (command_slots_[i].in_flight) retire(static_cast<std::uint16_t>(i), status, 0, true);
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
