// SPDX-License-Identifier: Apache-2.0
#include "queue/queue_pair.hpp"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/fence.hpp"
#include "base/steps.hpp"
#include "device/bytewise.hpp"
#include "nvme/status.hpp"

namespace ugds::queue {

namespace {

device::DmaMemory::Pages pages_of(const Shape& shape) {
  return shape.huge ? device::DmaMemory::Pages::huge : device::DmaMemory::Pages::ordinary;
}

}  // namespace

QueuePair::QueuePair(device::Device& device, const Shape& shape, Doorbell submission, Doorbell completion)
    : depth_(shape.depth),
      submission_doorbell_(submission),
      completion_doorbell_(completion),
      shape_(shape),
      device_(device),
      submission_memory_(device, Bytes(shape.depth * sizeof(nvme::SubmissionEntry)), true, pages_of(shape)),
      completion_memory_(device, Bytes(shape.completion_depth * sizeof(nvme::CompletionEntry)), true, pages_of(shape)) {
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
  set_next_turn(head_);
  phase_ = 1;
  // One ring entry stays free, so that full and empty differ: as many identifiers as entries less one.
  free_count_.store(depth_ - 1, std::memory_order_relaxed);
  // From wherever it has counted to: staged() never goes back.
  for (std::uint32_t i = 0; i < depth_ - 1; ++i) free_ids_[(staged() + i) & id_mask_] = static_cast<std::uint16_t>(i);
  distrusted_.store(false, std::memory_order_relaxed);
  free_lists_ = static_cast<std::uint16_t>(next_list_.size());
  for (std::size_t i = 0; i < next_list_.size(); ++i) {
    next_list_[i] = i + 1 < next_list_.size() ? static_cast<std::uint16_t>(i + 1) : Command::kNoList;
  }
  first_list_ = next_list_.empty() ? Command::kNoList : 0;
  set_open();
}

/// How long the first in line may leave room unused.
static constexpr std::uint64_t kPatienceInLine = 1'000'000;

void QueuePair::join_line(Line::Place& place) {
  line_.join(place);
  set_open();
}

void QueuePair::pass_in_line(std::uint64_t now) {
  if (free_count_.load(std::memory_order_relaxed) != 0) line_.pass(now, ns_to_ticks(kPatienceInLine));
}

std::uint16_t QueuePair::take_lists(std::uint32_t count) {
  const std::uint16_t first = first_list_;
  std::uint16_t last = first;
  for (std::uint32_t i = 1; i < count; ++i) last = next_list_[last];
  first_list_ = next_list_[last];
  next_list_[last] = Command::kNoList;
  free_lists_ = static_cast<std::uint16_t>(free_lists_ - count);
  set_open();
  return first;
}

void QueuePair::give_lists(std::uint16_t first) {
  std::uint16_t last = first, given = 1;
  for (; next_list_[last] != Command::kNoList; ++given) last = next_list_[last];
  next_list_[last] = first_list_;
  first_list_ = first;
  free_lists_ = static_cast<std::uint16_t>(free_lists_ + given);
  set_open();
}

void QueuePair::take_back(std::uint32_t commands) {
  for (; commands != 0; --commands) {
    const std::uint32_t last = staged() - 1;
    Command& command = commands_[free_ids_[last & id_mask_]];
    command.id = Command::kNoId;
    ledger_.remove(command.registration);
    next_free_.store(last, std::memory_order_relaxed);
    count(1);
    tail_ = (tail_ == 0 ? depth_ : tail_) - 1;
  }
}

std::unique_ptr<Trace> QueuePair::trace_into(std::unique_ptr<Trace> trace) {
  std::swap(trace_, trace);
  set_open();
  return trace;
}

void QueuePair::record_staged(std::uint64_t offset, std::uint32_t bytes, std::uint64_t submitted, std::uint8_t flags) {
  const std::uint32_t slot = free_ids_[(staged() - 1) & id_mask_];
  Command& command = commands_[slot];
  const std::uint8_t opcode = submission_[(tail_ + depth_ - 1) % depth_].opcode;
  trace_->staged(slot, static_cast<std::uint16_t>(command.id), opcode, offset, bytes, submitted, command.staged, flags);
  command.extra |= Command::kTraced;
}

void QueuePair::retire_extra(Command& command, std::uint16_t status, std::uint64_t now) {
  if ((command.extra & Command::kTraced) != 0 && trace_) {
    trace_->retired(static_cast<std::uint32_t>(&command - commands_), status, now);
  }
  if ((command.extra & Command::kLists) != 0) give_lists(command.list);
  if ((command.extra & Command::kContinued) != 0) statistics_.continued.add(1);
  if ((command.extra & Command::kPaced) != 0) {
    shape_.pacer->give(command.bytes, command.is_write, (command.extra & Command::kBackground) != 0,
                       shape_.pacer->now(now) - command.begun);
  }
  if ((command.extra & Command::kDurable) != 0 && status == 0) statistics_.durable.add(command.bytes);
  command.extra = 0;
  command.offset = 0;
}

/// One that failed, or has something extra.
void QueuePair::retire_other(Command& command, std::uint16_t status, std::uint32_t result, std::uint64_t now,
                             bool stopped) {
  if (status == 0) {
    statistics_.bytes[command.is_write].add(command.bytes);
  } else {
    fail(command, status, result, stopped);
  }
  if (command.extra != 0) retire_extra(command, status, now);
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

/// Many completions: what they have in common is counted once, for neighbours are mostly of one registration and staged
/// together. Every word that the loop uses is a local one, to be kept in a register.
std::uint32_t QueuePair::reap() {
  if (!has_completion()) return 0;
  const std::uint64_t now = ticks();
  Command* const commands = commands_;
  std::uint16_t* const free_ids = free_ids_;
  const std::uint32_t mask = id_mask_, depth = depth_;
  std::uint32_t end = staged() + free_count_.load(std::memory_order_relaxed);
  std::uint32_t registration = Command::kNoRegistration, held = end, late = end;
  std::uint64_t staged_at = 0, bytes[2] = {0, 0};
  const auto tell_ledger = [&] {
    if (held != end) ledger_.remove(registration, end - held);
    held = end;
  };
  const auto tell_latency = [&] {
    if (late != end) statistics_.latency[latency_bucket(now - staged_at)].add(end - late);
    late = end;
  };
  const nvme::CompletionEntry* at = completion_ + head_;
  const nvme::CompletionEntry* turn = completion_ + turning_;
  std::uint32_t word = at->last, phase = phase_ << 16, strays = 0;
  const std::uint32_t before = end;
  do {
    const std::uint32_t cid = word & 0xffff, slot = cid & mask;
    const nvme::CompletionEntry& entry = *at++;
    Command& command = commands[slot];
    if (command.id == cid && entry.sq_head < depth) [[likely]] {
      command.id = Command::kNoId;
      free_ids[end & mask] = static_cast<std::uint16_t>(slot);
      if (command.registration != registration) [[unlikely]] {
        tell_ledger();
        registration = command.registration;
      }
      if (command.staged != staged_at) [[unlikely]] {
        tell_latency();
        staged_at = command.staged;
      }
      ++end;
      Request& request = *command.request;
      if (nvme::CompletionWord{word}.succeeded()) [[likely]] {
        bytes[command.is_write] += command.bytes;
      } else {
        fail(command, nvme::CompletionWord{word}.status(), entry.result, false);
      }
      if (command.extra != 0) [[unlikely]]
        retire_extra(command, nvme::CompletionWord{word}.status(), now);
      if (--request.in_flight == 0) {
        if (request.on_idle == OnIdle::tell) [[likely]] {
          auto& told = static_cast<ToldRequest&>(request);
          told.list->append_small(told);
        } else {
          tell_ledger();  // its waiter may give the memory back at once
          finish(request, entry.result);
        }
      }
    } else {
      ++strays;
      distrust(entry);
    }
    if (at == turn) [[unlikely]] {
      head_ = turn_head(static_cast<std::uint32_t>(at - completion_));
      at = completion_ + head_;
      turn = completion_ + turning_;
      phase = phase_ << 16;
      if (end - before + strays >= depth) break;  // bounded: others may want the queue
    }
    word = std::atomic_ref(const_cast<std::uint32_t&>(at->last)).load(std::memory_order_acquire);
  } while (((word ^ phase) & 0x10000) == 0);
  const std::uint32_t reaped = end - before + strays;
  head_ = static_cast<std::uint32_t>(at - completion_);
  free_count_.store(end - staged(), std::memory_order_relaxed);
  tell_ledger();
  tell_latency();
  for (const unsigned direction : {0, 1}) {
    if (bytes[direction] != 0) statistics_.bytes[direction].add(bytes[direction]);
  }
  return reaped;
}

std::uint64_t* QueuePair::stage_with_page(Request& request) {
  const std::uint16_t page = take_lists(1);
  next().prp1 = list_iova(page);
  next_command().list = page;
  push(request, next(), false, Command::kNoRegistration, Command::kLists, 0, 0, ticks());
  return list_entries(page);
}

void QueuePair::fail(const Command& command, std::uint16_t status, std::uint32_t detail, bool stopped) {
  if (shape_.bytewise && status == device::kEndOfFile && !stopped) {
    statistics_.bytes[0].add(detail);
  } else {
    statistics_.errors.add(1);
  }
  const bool ended = shape_.bytewise && status == device::kEndOfFile;  // a read is short, and nothing has failed
  if (!stopped && !ended && shape_.events != nullptr && shape_.events->admit()) tell_failure(command, status, detail);
  Request* request = command.request;
  if (request == &nobody_ || command.offset >= request->failed_at) return;
  request->failed_at = command.offset;
  request->status = status;
  request->detail = shape_.bytewise ? detail : command.bytes;
  request->stopped = stopped;
  request->on_idle = ending(request->on_idle);
}

/// Wraps the completion ring's head, and rings its doorbell. The controller may post as many entries as the ring has,
/// less one, beyond the head that it was told. All commands in flight, depth - 1 at most, fit while that head lags by
/// no more than the rings differ.
std::uint32_t QueuePair::turn_head(std::uint32_t head) {
  if (head == shape_.completion_depth) {
    head = 0;
    phase_ ^= 1;
  }
  set_next_turn(head);
  completion_doorbell_.ring(head);
  // The head before the look at the next entry: a controller that interrupts only for an empty queue posts that entry,
  // and then looks at the head. One of the two sees the other.
  if (wakeup_) full_fence();
  return head;
}

void QueuePair::set_next_turn(std::uint32_t head) {
  turning_ = wakeup_ ? head + 1 : std::min(shape_.completion_depth, head + shape_.completion_depth - depth_ + 1);
}

void QueuePair::use_wakeup(std::unique_ptr<Wakeup> wakeup) {
  wakeup_ = std::move(wakeup);
  set_next_turn(head_);
}

void QueuePair::distrust(const nvme::CompletionEntry& entry) {
  statistics_.protocol_errors.add(1);
  distrusted_.store(true, std::memory_order_relaxed);
  if (shape_.events == nullptr || !shape_.events->admit()) return;
  const nvme::CompletionWord word{entry.last};
  Event event;
  event.name = "protocol_error";
  event.numerous = true;
  event.queue = shape_.id;
  event.command = word.cid();
  event.action = "the controller is not trusted any more, and is reset";
  event.remedy = "if it happens again, see whether the device's firmware can be updated";
  set_detail(event, "a completion that no command was waiting for, with a submission queue head of %u", entry.sq_head);
  shape_.events->tell(event);
}

/// The identifier under which a slot's last command was staged: also when it is at rest again.
static std::uint16_t identifier(std::size_t slot, std::uint64_t staged, std::uint32_t mask) {
  return static_cast<std::uint16_t>(slot | (static_cast<std::uint32_t>(staged) & ~mask));
}

void QueuePair::tell_failure(const Command& command, std::uint16_t status, std::uint32_t detail) {
  Event event;
  event.name = "command_failed";
  event.numerous = true;
  describe(identifier(static_cast<std::size_t>(&command - commands_), command.staged, id_mask_), event);
  event.status = status;
  std::snprintf(event.status_words, sizeof event.status_words, "%s", nvme::status_words(status));
  event.action = "the request is told";
  event.remedy = nvme::status_hint(status);
  if (shape_.bytewise) tell_file(event, detail);
  shape_.events->tell(event);
}

/// Which file it was, where a device has many, and what the operating system said.
void QueuePair::tell_file(Event& event, std::uint32_t detail) const {
  try {
    if (event.blocks != 0) set_device_text(event.device, device_.place_of(event.lba).name.c_str());
  } catch (const std::bad_alloc&) {
    // The device's own name does, then.
  }
  event.lba &= device_.limits().position_mask;
  if (event.status != device::kSystemError) return;
  std::snprintf(event.status_words, sizeof event.status_words, "operating system: %s",
                std::strerror(static_cast<int>(detail)));
  set_detail(event, "errno %u", detail);
  event.remedy = "";
}

void QueuePair::describe(std::uint16_t cid, Event& event) const {
  event.queue = shape_.id;
  event.command = cid;
  event.operation = "command";
  // The entry is in the ring until it is used again.
  for (std::uint32_t i = 0; i < depth_; ++i) {
    const nvme::SubmissionEntry& entry = submission_[(tail_ + depth_ - 1 - i) % depth_];
    if (entry.cid != cid || entry.nsid == 0) continue;
    event.operation = nvme::opcode_name(static_cast<nvme::Opcode>(entry.opcode));
    if (commands_[cid & id_mask_].bytes != 0) {
      event.lba = entry.cdw10 | std::uint64_t{entry.cdw11} << 32;
      event.blocks = (entry.cdw12 & 0xfffff) + 1;
    }
    break;
  }
}

void QueuePair::last_commands(std::vector<TraceRecord>& out, std::uint32_t block_shift) const {
  for (std::uint32_t i = 0; i < depth_; ++i) {
    const nvme::SubmissionEntry& entry = submission_[(tail_ + i) % depth_];
    if (entry.nsid == 0) continue;  // never used
    const std::uint16_t cid = entry.cid;
    const std::uint32_t slot = cid & id_mask_;
    const Command& command = commands_[slot];
    TraceRecord record{.queue = shape_.id, .cid = cid, .status = nvme::status::aborted_by_host, .opcode = entry.opcode};
    if (identifier(slot, command.staged, id_mask_) == cid) record.staged = record.submitted = command.staged;
    if (entry.opcode == static_cast<std::uint8_t>(nvme::Opcode::read) ||
        entry.opcode == static_cast<std::uint8_t>(nvme::Opcode::write)) {
      record.offset = (entry.cdw10 | std::uint64_t{entry.cdw11} << 32) << block_shift;
      record.bytes = ((entry.cdw12 & 0xfffff) + 1) << block_shift;
    }
    // The newest completion of that name that was taken.
    for (std::uint32_t j = 1; command.id != cid && j <= shape_.completion_depth; ++j) {
      const nvme::CompletionWord word{
          completion_[(head_ + shape_.completion_depth - j) % shape_.completion_depth].last};
      if (word.cid() != cid) continue;
      record.status = word.status();
      break;
    }
    out.push_back(record);
  }
}

void QueuePair::orphan(Request& request) {
  for (Command& command : command_slots_) {
    if (command.in_flight() && command.request == &request) command.request = &nobody_;
  }
  nobody_.in_flight += std::exchange(request.in_flight, 0);
  has_orphans_.store(true, std::memory_order_relaxed);
}

bool QueuePair::is_of(const Command& command, const Finished& list) const {
  if (!command.in_flight() || command.request == &nobody_ || !is_told(command.request->on_idle)) return false;
  return static_cast<const ToldRequest*>(command.request)->list == &list;
}

void QueuePair::orphan(const Finished& list) {
  for (Command& command : command_slots_) {
    if (!is_of(command, list)) continue;
    --command.request->in_flight;
    ++nobody_.in_flight;
    command.request = &nobody_;
  }
  has_orphans_.store(true, std::memory_order_relaxed);
}

template <class Chosen>
std::uint64_t QueuePair::oldest_of(Chosen&& chosen, std::uint16_t& cid) const {
  std::uint64_t oldest = 0;
  for (const Command& command : command_slots_) {
    if (!command.in_flight() || !chosen(command)) continue;
    if (oldest != 0 && command.staged >= oldest) continue;
    oldest = command.staged;
    cid = static_cast<std::uint16_t>(command.id);
  }
  return oldest;
}

std::uint64_t QueuePair::oldest(const Request& request, std::uint16_t& cid) const {
  return oldest_of([&](const Command& command) { return command.request == &request; }, cid);
}

std::uint64_t QueuePair::oldest(const Finished& list, std::uint16_t& cid) const {
  return oldest_of([&](const Command& command) { return is_of(command, list); }, cid);
}

std::uint64_t QueuePair::oldest(std::uint16_t& cid) const {
  return oldest_of([](const Command&) { return true; }, cid);
}

std::uint64_t QueuePair::oldest_orphan(std::uint16_t& cid) {
  if (nobody_.in_flight != 0)
    return oldest_of([&](const Command& command) { return command.request == &nobody_; }, cid);
  has_orphans_.store(false, std::memory_order_relaxed);
  return 0;
}

void QueuePair::expire(std::uint16_t cid, std::uint64_t staged) {
  if (is_in_flight(cid, staged)) command_slots_[cid & id_mask_].request->expired = true;
}

bool QueuePair::is_in_flight(std::uint16_t cid, std::uint64_t staged) const {
  const Command& command = command_slots_[cid & id_mask_];
  return command.id == cid && command.staged == staged;
}

void QueuePair::restart(std::uint16_t status, Doorbell submission, Doorbell completion) {
  for (std::size_t i = 0; i < command_slots_.size(); ++i) {
    if (command_slots_[i].in_flight()) retire(static_cast<std::uint32_t>(i), status, 0, ticks(), true);
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
