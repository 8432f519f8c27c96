// SPDX-License-Identifier: Apache-2.0
//
// Doorbells, and their shadows in the host's memory (NVMe Base 2.0, 5.8 and B.5).
//
// After it has stored a shadow, the host rings the register only if the event index lies in [old, new), counted modulo
// 2^16. While the controller is awake it keeps the index at the value just behind the last one that it saw, modulo the
// queue's depth. The host cannot move past that value before it was told that entries were consumed, which is after the
// controller has seen a later value and moved the index on. So no ring is asked for, whatever the depth. Where a queue
// wraps, [old, new) modulo 2^16 also holds the values from the depth to 65535 and the index is none of those. Before it
// sleeps, the controller puts the index at the last value seen, which every change includes: old is that value.
#include <atomic>

#include "emulator/impl.hpp"

namespace ugds::emulator {

namespace {

std::uint32_t load(const std::uint32_t* word, std::memory_order order) {
  return std::atomic_ref<std::uint32_t>(*const_cast<std::uint32_t*>(word)).load(order);
}
void store(std::uint32_t* word, std::uint32_t value, std::memory_order order) {
  std::atomic_ref<std::uint32_t>(*word).store(value, order);
}

}  // namespace

std::uint32_t* Controller::Impl::doorbell_word(std::uint32_t offset) const {
  const std::uint64_t relative = std::uint64_t{offset} - nvme::kDoorbellBase;
  if (offset < nvme::kDoorbellBase + 2 * stride() || relative % stride() != 0 || relative + 4 > doorbells.bytes())
    return nullptr;
  return reinterpret_cast<std::uint32_t*>(doorbells.data() + relative);
}

bool Controller::Impl::is_shadowed(std::uint32_t offset) const {
  return shadow != nullptr && std::uint64_t{offset} - nvme::kDoorbellBase + 4 <= page_size;
}

void Controller::Impl::write_doorbell(std::uint32_t offset, std::uint64_t value, std::uint32_t width) {
  const std::uint32_t relative = offset - nvme::kDoorbellBase;
  std::uint32_t* word = doorbell_word(offset);
  if (relative == 0) word = admin_words[0];
  if (relative == stride()) word = admin_words[1];
  if (word == nullptr || width != 4) return bad_access("write", offset, width);
  if (!nvme::ControllerStatus{csts.load(std::memory_order_acquire)}.ready()) {
    if (!lost_power.load(std::memory_order_acquire))
      violations.add("queue-while-disabled", "doorbell 0x%x was written while CSTS.RDY was 0", offset);
    return;
  }
  // Sequentially consistent with `asleep`: either the controller sees this value before it sleeps, or `wake` sees it
  // asleep.
  store(word, static_cast<std::uint32_t>(value), std::memory_order_seq_cst);
}

void Controller::Impl::connect(Doorbell& doorbell, std::uint32_t offset, bool fresh) {
  std::uint32_t* real = doorbell_word(offset);
  doorbell.word = real;
  doorbell.event = nullptr;
  if (is_shadowed(offset)) {
    const std::uint32_t relative = offset - nvme::kDoorbellBase;
    doorbell.word = reinterpret_cast<std::uint32_t*>(shadow + relative);
    doorbell.event = reinterpret_cast<std::uint32_t*>(events + relative);
  }
  if (!fresh) {
    // A queue older than its shadow goes on from where it is.
    if (doorbell.event != nullptr && memory.check(shadow_iova, page_size, true))
      store(doorbell.word, doorbell.seen, std::memory_order_release);
    return;
  }
  const std::uint32_t found = load(real, std::memory_order_acquire);
  const std::uint32_t shadowed = load(doorbell.word, std::memory_order_acquire);
  if ((found != 0 || shadowed != 0) && !doorbells_were_lost)
    violations.add("queue-while-disabled", "doorbell 0x%x holds %u before its queue exists", offset,
                   found != 0 ? found : shadowed);
  store(real, 0, std::memory_order_relaxed);
  doorbell.seen = doorbell.event != nullptr ? shadowed : 0;
}

/// When a queue goes, what stands at its doorbell goes too. Whatever is stored there later is the host's mistake.
void Controller::Impl::zero_doorbell(std::uint32_t offset) noexcept {
  store(doorbell_word(offset), 0, std::memory_order_relaxed);
}

void Controller::Impl::zero_doorbells() noexcept {
  for (std::uint32_t* word : admin_words) store(word, 0, std::memory_order_relaxed);
  // Reading leaves pages that were never rung unallocated.
  for (std::uint64_t at = 0; at + 4 <= doorbells.bytes(); at += stride()) {
    auto* word = reinterpret_cast<std::uint32_t*>(doorbells.data() + at);
    if (load(word, std::memory_order_relaxed) != 0) store(word, 0, std::memory_order_relaxed);
  }
}

bool Controller::Impl::observe(SubmissionQueue& queue) {
  const std::uint32_t value = load(queue.doorbell.word, std::memory_order_acquire);
  if (value == queue.doorbell.seen) [[likely]]
    return false;
  queue.doorbell.seen = value;
  ++counters.doorbells;
  const std::uint32_t depth = queue.depth;
  if (value >= depth) {
    violations.add("doorbell-range", "submission queue %u: tail %u of %u entries", queue.id, value, depth);
    return false;
  }
  const std::uint32_t more = (value + depth - queue.tail) % depth;
  const std::uint32_t head = queue.head_known ? queue.reported_head : queue.head;
  const std::uint32_t used = (queue.tail + depth - head) % depth;
  if (used + more > depth - 1)
    violations.add("sq-overflow", "submission queue %u: tail moved from %u to %u past the head %u", queue.id,
                   queue.tail, value, head);
  queue.tail = value;
  park(queue.doorbell, depth);
  return true;
}

void Controller::Impl::observe(CompletionQueue& queue) {
  const std::uint32_t value = load(queue.doorbell.word, std::memory_order_acquire);
  if (value == queue.doorbell.seen) [[likely]]
    return;
  queue.doorbell.seen = value;
  if (value >= queue.depth) {
    violations.add("doorbell-range", "completion queue %u: head %u of %u entries", queue.id, value, queue.depth);
    return;
  }
  if ((value + queue.depth - queue.head) % queue.depth > queue.posted()) {
    violations.add("cq-doorbell", "completion queue %u: head moved from %u to %u, and the tail is %u", queue.id,
                   queue.head, value, queue.tail);
    return;
  }
  queue.head = value;
  park(queue.doorbell, queue.depth);
}

void Controller::Impl::park(const Doorbell& doorbell, std::uint32_t depth) const {
  if (doorbell.event != nullptr)
    store(doorbell.event, (doorbell.seen % depth + depth - 1) % depth, std::memory_order_release);
}

void Controller::Impl::ask_to_be_rung() {
  asked = true;
  // Sequentially consistent, and before `doorbells_changed` looks: a host that stored a shadow and missed this has
  // stored it before that look.
  for (const std::uint16_t id : submission_ids) {
    const Doorbell& doorbell = submission[id]->doorbell;
    if (doorbell.event != nullptr) store(doorbell.event, doorbell.seen, std::memory_order_seq_cst);
  }
  for (const std::uint16_t id : completion_ids) {
    const CompletionQueue& queue = *completion[id];
    if (queue.doorbell.event != nullptr && !queue.held.empty())
      store(queue.doorbell.event, queue.doorbell.seen, std::memory_order_seq_cst);
  }
}

bool Controller::Impl::doorbells_changed() const {
  for (const std::uint16_t id : submission_ids) {
    const Doorbell& doorbell = submission[id]->doorbell;
    if (load(doorbell.word, std::memory_order_seq_cst) != doorbell.seen) return true;
  }
  for (const std::uint16_t id : completion_ids) {
    const CompletionQueue& queue = *completion[id];
    if (!queue.held.empty() && load(queue.doorbell.word, std::memory_order_seq_cst) != queue.doorbell.seen) return true;
  }
  return false;
}

bool Controller::Impl::hears_every_doorbell() const {
  if (options.trapped) return true;
  const bool admin_is_shared = admin_words[0] != &admin_doorbells[0];
  for (const std::uint16_t id : submission_ids)
    if ((id != 0 || admin_is_shared) && submission[id]->doorbell.event == nullptr) return false;
  for (const std::uint16_t id : completion_ids)
    if (id != 0 && !completion[id]->held.empty() && completion[id]->doorbell.event == nullptr) return false;
  return true;
}

}  // namespace ugds::emulator
