// SPDX-License-Identifier: Apache-2.0
//
// Queues come and go (NVMe Base 2.0, 5.4 to 5.7), and completions are posted (3.3.3.2).
#include <atomic>
#include <cstring>
#include <vector>

#include "base/units.hpp"
#include "emulator/impl.hpp"

namespace ugds::emulator {

namespace status = nvme::status;

namespace {

constexpr std::size_t kBitmapWords = 65536 / 64;

/// Repeating a command that the host got wrong helps nobody; what the medium or an abort ended may be tried again.
bool do_not_retry(std::uint16_t code) {
  if (code >= 0x200) return false;
  switch (code) {
    case status::success:
    case status::data_transfer_error:
    case status::aborted_power_loss:
    case status::internal_error:
    case status::abort_requested:
    case status::aborted_sq_deletion:
    case status::namespace_not_ready: return false;
    default: return true;
  }
}

}  // namespace

std::uint16_t Controller::Impl::check_queue(std::uint32_t id, std::uint32_t entries, bool exists) const {
  if (id == 0 || id > granted || exists) return status::invalid_queue_id;
  if (entries < 2 || entries > options.depth) return status::invalid_queue_size;
  return status::success;
}

std::uint16_t Controller::Impl::find_ring(const nvme::SubmissionEntry& entry, std::uint64_t bytes, bool writable,
                                          Ring& ring) {
  const bool contiguous = (entry.cdw11 & 1) != 0;
  if (!contiguous && options.contiguous) return status::invalid_field;
  if (!is_aligned(entry.prp1, page_size)) {
    violations.add("prp-alignment", "a queue's PRP1 0x%llx has an offset in its page",
                   static_cast<unsigned long long>(entry.prp1));
    return status::invalid_prp_offset;
  }
  ring.page_size = page_size;
  Transfer transfer;
  if (contiguous) {
    ring.base = entry.prp1;
    transfer.data.push_back({entry.prp1, bytes});
  } else if (const std::uint16_t failed = read_lists(transfer, entry.prp1, bytes); failed != 0) {
    return failed;
  }
  for (const Transfer::Piece& piece : transfer.data) {
    if (const Access access = memory.check(piece.iova, piece.bytes, writable); !access)
      return report(access, "a queue");
    if (contiguous) continue;
    for (std::uint64_t at = 0; at < piece.bytes; at += page_size) ring.pages.push_back(piece.iova + at);
  }
  return status::success;
}

std::uint16_t Controller::Impl::create_completion_queue(const Command& command) {
  const nvme::SubmissionEntry& e = command.entry;
  const std::uint32_t id = e.cdw10 & 0xffff, entries = (e.cdw10 >> 16) + 1;
  const bool exists = id < completion.size() && completion[id] != nullptr;
  if (const std::uint16_t failed = check_queue(id, entries, exists); failed != 0) return failed;
  const bool interrupts = (e.cdw11 & 2) != 0;
  const std::uint32_t vector = e.cdw11 >> 16;
  if (interrupts && vector >= vectors.size()) return status::invalid_interrupt_vector;
  auto queue = std::make_unique<CompletionQueue>();
  if (const std::uint16_t failed =
          find_ring(e, std::uint64_t{entries} * sizeof(nvme::CompletionEntry), true, queue->ring);
      failed != 0)
    return failed;
  queue->id = static_cast<std::uint16_t>(id);
  queue->depth = entries;
  queue->interrupts = interrupts;
  queue->vector = static_cast<std::uint16_t>(vector);
  connect(queue->doorbell, nvme::completion_doorbell(id, stride()), true);
  park(queue->doorbell, entries);
  completion[id] = std::move(queue);
  completion_ids.push_back(static_cast<std::uint16_t>(id));
  return status::success;
}

std::uint16_t Controller::Impl::create_submission_queue(const Command& command) {
  const nvme::SubmissionEntry& e = command.entry;
  const std::uint32_t id = e.cdw10 & 0xffff, entries = (e.cdw10 >> 16) + 1, target = e.cdw11 >> 16;
  const bool exists = id < submission.size() && submission[id] != nullptr;
  if (const std::uint16_t failed = check_queue(id, entries, exists); failed != 0) return failed;
  if (target == 0 || target > granted) return status::invalid_queue_id;
  if (completion[target] == nullptr) return status::invalid_completion_queue;
  auto queue = std::make_unique<SubmissionQueue>();
  if (const std::uint16_t failed =
          find_ring(e, std::uint64_t{entries} * sizeof(nvme::SubmissionEntry), false, queue->ring);
      failed != 0)
    return failed;
  queue->id = static_cast<std::uint16_t>(id);
  queue->depth = entries;
  queue->completion_queue = static_cast<std::uint16_t>(target);
  queue->in_flight.resize(kBitmapWords);
  connect(queue->doorbell, nvme::submission_doorbell(id, stride()), true);
  park(queue->doorbell, entries);
  ++completion[target]->submission_queues;
  submission[id] = std::move(queue);
  submission_ids.push_back(static_cast<std::uint16_t>(id));
  return status::success;
}

std::uint16_t Controller::Impl::delete_submission_queue(Command& command, bool& hangs) {
  const std::uint32_t id = command.entry.cdw10 & 0xffff;
  if (id == 0 || id >= submission.size() || submission[id] == nullptr) return status::invalid_queue_id;
  std::vector<Command*> theirs;
  for (Command* other : live) {
    if (other->sq != id) continue;
    // A deletion completes after the queue's commands; one that nothing ends keeps it waiting.
    if (other->stage == Command::Stage::held && other->has_fault && !other->fault.abortable) hangs = true;
    theirs.push_back(other);
  }
  if (hangs) return status::success;
  for (Command* other : theirs) complete(*other, status::aborted_sq_deletion, 0);
  CompletionQueue& target = *completion[submission[id]->completion_queue];
  for (Posting& posting : target.held)
    if (posting.sq == id) posting.frees_cid = false;
  --target.submission_queues;
  zero_doorbell(nvme::submission_doorbell(id, stride()));
  submission[id].reset();
  std::erase(submission_ids, static_cast<std::uint16_t>(id));
  return status::success;
}

std::uint16_t Controller::Impl::delete_completion_queue(const Command& command) {
  const std::uint32_t id = command.entry.cdw10 & 0xffff;
  if (id == 0 || id >= completion.size() || completion[id] == nullptr) return status::invalid_queue_id;
  if (completion[id]->submission_queues != 0) return status::invalid_queue_deletion;
  zero_doorbell(nvme::completion_doorbell(id, stride()));
  torn.clear();
  completion[id].reset();
  std::erase(completion_ids, static_cast<std::uint16_t>(id));
  return status::success;
}

void Controller::Impl::create_admin_queues() {
  const nvme::AdminQueueAttributes sizes{aqa.load(std::memory_order_relaxed)};
  submission.resize(std::size_t{options.queues} + 1);
  completion.resize(std::size_t{options.queues} + 1);
  auto cq = std::make_unique<CompletionQueue>();
  cq->depth = sizes.completion_entries();
  cq->ring.base = acq.load(std::memory_order_relaxed);
  cq->ring.page_size = page_size;
  cq->submission_queues = 1;
  cq->interrupts = !vectors.empty();  // by vector 0, without being asked
  cq->doorbell.word = admin_words[1];
  auto sq = std::make_unique<SubmissionQueue>();
  sq->depth = sizes.submission_entries();
  sq->ring.base = asq.load(std::memory_order_relaxed);
  sq->ring.page_size = page_size;
  sq->doorbell.word = admin_words[0];
  sq->in_flight.resize(kBitmapWords);
  for (std::uint32_t* word : admin_words) std::atomic_ref<std::uint32_t>(*word).store(0, std::memory_order_relaxed);
  completion[0] = std::move(cq);
  submission[0] = std::move(sq);
  completion_ids.assign(1, 0);
  submission_ids.assign(1, 0);
  granted = options.queues;
  for (std::uint32_t& feature : features) feature = 0;
  features[static_cast<std::size_t>(nvme::Feature::volatile_write_cache)] = subsystem->has_write_cache() ? 1 : 0;
}

void Controller::Impl::drop_queues() {
  for (const std::uint16_t id : submission_ids)
    if (id != 0) zero_doorbell(nvme::submission_doorbell(id, stride()));
  for (const std::uint16_t id : completion_ids)
    if (id != 0) zero_doorbell(nvme::completion_doorbell(id, stride()));
  submission.clear();
  completion.clear();
  submission_ids.clear();
  completion_ids.clear();
  torn.clear();
}

void Controller::Impl::post(CompletionQueue& queue, const Posting& posting) {
  if (queue.held.empty()) {
    if (queue.full()) observe(queue);
    if (!queue.full()) return write_entry(queue, posting);
    if (!posting.extra && !queue.extras)
      violations.add("cq-overrun", "completion queue %u is full with %u entries, and another is due", queue.id,
                     queue.depth - 1);
  }
  queue.held.push_back(posting);
}

/// What waits in the queue for a slot was submitted before this identifier was free.
void Controller::Impl::check_identifier_unused(const SubmissionQueue& queue, std::uint16_t cid) {
  for (std::uint32_t at = queue.head; at != queue.tail; at = queue.after(at)) {
    nvme::SubmissionEntry entry;
    if (!memory.read(queue.ring.at(std::uint64_t{at} * sizeof entry), &entry, sizeof entry)) return;
    if (entry.cid != cid) continue;
    violations.add("duplicate-cid", "submission queue %u: command identifier %u waits behind itself", queue.id, cid);
  }
}

void Controller::Impl::write_entry(CompletionQueue& queue, const Posting& posting) {
  const std::uint64_t iova = queue.ring.at(std::uint64_t{queue.tail} * sizeof(nvme::CompletionEntry));
  auto* entry = reinterpret_cast<nvme::CompletionEntry*>(memory.contiguous(iova, sizeof(nvme::CompletionEntry), true));
  if (entry == nullptr) {
    report(memory.check(iova, sizeof(nvme::CompletionEntry), true), "a completion entry");
    return fail_fatally();
  }
  std::uint32_t head = 0;
  if (SubmissionQueue* sq = submission[posting.sq].get()) {
    head = sq->head;
    sq->reported_head = head;
    if (posting.frees_cid) {
      sq->clear_in_flight(posting.cid);
      if (options.slots != 0 && posting.sq != 0) check_identifier_unused(*sq, posting.cid);
    }
    // Beyond the queue's end where 16 bits can say so, else ahead of its tail.
    if (posting.wrong_head) head = sq->depth + 7 <= 0xffff ? sq->depth + 7 : (sq->tail + 1) % sq->depth;
  }
  entry->result = posting.result;
  entry->result_high = 0;
  entry->sq_head = static_cast<std::uint16_t>(head);
  entry->sq_id = posting.sq;
  if (posting.rest_due != 0) {
    torn.push_back({entry, entry->result, entry->sq_head, entry->sq_id, posting.rest_due});
    entry->result = ~std::uint32_t{0};
    entry->sq_head = entry->sq_id = 0xffff;
  }
  const nvme::CompletionWord word = nvme::CompletionWord::make(posting.cid, queue.phase != posting.wrong_phase,
                                                               posting.status, do_not_retry(posting.status));
  const std::uint32_t place = queue.tail;
  if (++queue.tail == queue.depth) {
    queue.tail = 0;
    queue.phase = !queue.phase;
  }
  // Last, and after the rest of the entry and the data: the phase tells the host that they are there.
  std::atomic_ref<std::uint32_t>(entry->last).store(word.raw, std::memory_order_release);
  if (!queue.interrupts || posting.silent) return;
  raise(queue, place);
  if (posting.doubled) raised.push_back(queue.vector);
}

}  // namespace ugds::emulator
