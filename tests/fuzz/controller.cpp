// SPDX-License-Identifier: Apache-2.0
#include "controller.hpp"

#include "nvme/commands.hpp"
#include "nvme/prp.hpp"

namespace ugds::fuzz {

using nvme::AdminOpcode;
using nvme::Register;

Deviation Deviation::read(Input& input) {
  Deviation one;
  one.kind = input.byte() % kinds;
  one.which = input.byte();
  one.skip = input.byte();
  one.count = input.byte();
  one.action = input.byte();
  one.place = input.value<std::uint16_t>();
  one.value = input.value<std::uint64_t>();
  if (one.kind == identify || one.kind == stray) {
    const auto some = input.bytes(input.byte());
    one.bytes.assign(some.begin(), some.end());
  }
  return one;
}

bool Deviation::meets() {
  if (skip != 0) return --skip, false;
  if (count == 255) return true;
  if (kind == kinds) return false;
  if (count-- == 0) kind = kinds;  // that was the last
  return true;
}

Controller::Controller(std::vector<Deviation> deviations)
    : deviations_(std::move(deviations)),
      capabilities_(nvme::Capabilities::make({.max_queue_entries = 64, .ready_timeout_units = 1}).raw) {}

Controller::~Controller() { demand(mapped_.empty(), "what was mapped is unmapped before the device is let go of"); }

device::Mapping Controller::map(void* address, Bytes length, device::Access access, std::uint64_t* pages) {
  const auto first = reinterpret_cast<std::uintptr_t>(address);
  demand(first % nvme::kPageSize == 0 && length.value % nvme::kPageSize == 0, "whole pages are mapped");
  for (std::uint64_t at = 0; at < length.value; at += nvme::kPageSize) *pages++ = first + at;
  mapped_[first] = {length.value, access == device::Access::read_write};
  return {first, length};
}

void Controller::unmap(const device::Mapping& mapping) noexcept {
  demand(mapped_.erase(mapping.token) == 1, "what is unmapped was mapped");
}

/// Memory that a command names must be mapped while it runs.
std::byte* Controller::reach(std::uint64_t iova, std::uint64_t bytes, bool write) {
  auto after = mapped_.upper_bound(iova);
  demand(after != mapped_.begin(), "a command names memory that is not mapped");
  const auto& [first, what] = *--after;
  demand(iova - first <= what.first && bytes <= what.first - (iova - first), "a command names memory beyond a mapping");
  demand(!write || what.second, "a command writes to memory that is mapped to be read");
  return reinterpret_cast<std::byte*>(iova);
}

void Controller::stop() {
  submission_.clear();
  completion_.clear();
  late_.clear();
  in_flight_.clear();
}

bool Controller::reset() noexcept {
  for (Deviation& one : deviations_)
    if (one.kind == Deviation::reset && one.meets()) return false;
  stop();
  cc_ = csts_ = 0;
  return true;
}

bool Controller::release() noexcept {
  stop();
  gone_ = true;
  return true;
}

std::uint64_t Controller::value_of(std::uint32_t offset) const {
  switch (static_cast<Register>(offset)) {
    case Register::cap: return capabilities_;
    case Register::vs: return 0x00010400;
    case Register::cc: return cc_;
    case Register::csts: return csts_;
    case Register::aqa: return aqa_;
    case Register::asq: return asq_;
    case Register::acq: return acq_;
    default: return 0;
  }
}

std::uint64_t Controller::read(std::uint32_t offset, std::uint32_t width) {
  demand(offset % width == 0 && offset < nvme::kDoorbellBase, "registers that there are, are read");
  std::uint64_t value = gone_ ? nvme::kAllOnes64 : value_of(offset);
  for (Deviation& one : deviations_) {
    if (one.kind != Deviation::registers || one.which % 8u != offset / 4) continue;
    if (!one.meets()) continue;
    account.deviated = true;
    lied_ = lied_ || static_cast<Register>(offset) == Register::cc;
    value = one.action % 3 == 1 ? nvme::kAllOnes64 : one.action % 3 == 2 ? value ^ one.value : one.value;
  }
  if (static_cast<Register>(offset) == Register::cap) capabilities_ = value;  // it goes by what it has said
  return value;
}

void Controller::write(std::uint32_t offset, std::uint64_t value) {
  if (gone_) return;
  if (offset >= nvme::kDoorbellBase) {
    const std::uint32_t stride = nvme::Capabilities{capabilities_}.doorbell_stride();
    demand((offset - nvme::kDoorbellBase) % stride == 0, "a doorbell that there is, is rung");
    return ring((offset - nvme::kDoorbellBase) / stride, static_cast<std::uint32_t>(value));
  }
  switch (static_cast<Register>(offset)) {
    case Register::aqa: aqa_ = static_cast<std::uint32_t>(value); return;
    case Register::asq: asq_ = value; return;
    case Register::acq: acq_ = value; return;
    case Register::cc: break;
    default: return;
  }
  const bool was = nvme::Configuration{cc_}.enabled();
  cc_ = static_cast<std::uint32_t>(value);
  const nvme::Configuration now{cc_};
  if (now.enabled() && !was) {
    demand(lied_ || now.page_size() <= device::DmaMemory::kAlignment, "pages are ones that rings are aligned to");
    const nvme::AdminQueueAttributes attributes{aqa_};
    submission_[0] = {.ring = asq_, .entries = attributes.submission_entries()};
    completion_[0] = {.ring = acq_, .entries = attributes.completion_entries()};
    csts_ = 1;
  } else if (!now.enabled()) {
    stop();
    csts_ = 0;
  }
  if (now.shutdown_notification() != 0) csts_ |= 2u << 2;
}

Controller::Queue* Controller::find(std::map<std::uint16_t, Queue>& queues, std::uint16_t id) {
  const auto found = queues.find(id);
  return found == queues.end() ? nullptr : &found->second;
}

void Controller::ring(std::uint32_t index, std::uint32_t value) {
  const auto id = static_cast<std::uint16_t>(index / 2);
  Queue* queue = find(index % 2 == 0 ? submission_ : completion_, id);
  // A deviation may have had the queue refused, or the controller stopped.
  if (queue == nullptr) return;
  demand(value < queue->entries, "a doorbell is rung with an entry of its ring");
  if (index % 2 == 0) queue->tail = value;
  if (index % 2 == 0) work();
}

void Controller::work() {
  for (Deviation& one : deviations_) {
    if (one.kind == Deviation::removal && one.meets()) {
      account.deviated = gone_ = true;
      stop();
    }
    if (one.kind == Deviation::stray && one.meets() && find(completion_, one.which % 4) != nullptr) {
      account.deviated = true;
      nvme::CompletionEntry entry;
      if (!one.bytes.empty())
        std::memcpy(static_cast<void*>(&entry), one.bytes.data(), std::min(sizeof entry, one.bytes.size()));
      post(one.which % 4, entry, (one.action & 1) == 0);
    }
  }
  std::erase_if(late_, [&](Late& one) {
    if (one.turns-- != 0) return false;
    finish(one.queue, one.entry, 0);
    return true;
  });
  std::vector<std::pair<std::uint16_t, nvme::SubmissionEntry>> fetched;
  for (auto& [id, queue] : submission_) {
    for (; queue.head != queue.tail; queue.head = (queue.head + 1) % queue.entries) {
      nvme::SubmissionEntry entry;
      std::memcpy(static_cast<void*>(&entry), reach(queue.ring + queue.head * sizeof entry, sizeof entry, false),
                  sizeof entry);
      const bool moves = id != 0 && (entry.opcode == 1 || entry.opcode == 2);
      // All of them before any is answered: a wrong identifier may be that of one whose turn is yet to come.
      in_flight_[{id, entry.cid}] = moves ? (std::uint64_t{entry.cdw12 & 0xffff} + 1) * kBlock : 1;
      fetched.emplace_back(id, entry);
    }
  }
  for (const auto& [id, entry] : fetched) execute(id, entry);
}

void Controller::execute(std::uint16_t queue, const nvme::SubmissionEntry& entry) {
  if (find(submission_, queue) == nullptr) return;
  queue == 0 ? execute_admin(entry) : execute_io(queue, entry);
}

/// Whether a deviation has taken the command.
bool Controller::deviate(std::uint16_t queue, const nvme::SubmissionEntry& entry, Deviation::Kind kind) {
  for (Deviation& one : deviations_) {
    if (one.kind != kind || (one.which != 255 && one.which != entry.opcode) || !one.meets()) continue;
    account.deviated = true;
    nvme::CompletionEntry answer{.result = static_cast<std::uint32_t>(one.value)};
    answer.last = nvme::CompletionWord::make(entry.cid, false, 0).raw;
    switch (one.action % Deviation::actions) {
      case Deviation::status:
        finish(queue, entry, one.place & 0x7ff, static_cast<std::uint32_t>(one.value));
        return true;
      case Deviation::lose: return true;
      case Deviation::twice: post(queue, answer); break;
      case Deviation::wrong_phase: post(queue, answer, false); break;
      case Deviation::wrong_id:
        answer.last ^= one.place;
        post(queue, answer);
        return true;
      case Deviation::wrong_head:
        answer.sq_head = one.place;
        post(queue, answer);
        return true;
      case Deviation::forge:  // of success, and nothing was done
        finish(queue, entry, 0, static_cast<std::uint32_t>(one.value));
        return true;
      case Deviation::late: late_.push_back({queue, entry, one.place % 512u}); return true;
    }
  }
  return false;
}

void Controller::execute_admin(const nvme::SubmissionEntry& entry) {
  if (deviate(0, entry, Deviation::admin)) return;
  const auto id = static_cast<std::uint16_t>(entry.cdw10);
  const std::uint32_t entries = (entry.cdw10 >> 16) + 1;
  std::uint32_t result = 0;
  switch (static_cast<AdminOpcode>(entry.opcode)) {
    case AdminOpcode::identify: answer_identify(entry); break;
    case AdminOpcode::create_cq: completion_[id] = {.ring = entry.prp1, .entries = entries}; break;
    case AdminOpcode::create_sq: submission_[id] = {.ring = entry.prp1, .entries = entries, .completion = id}; break;
    case AdminOpcode::set_features: result = std::min(entry.cdw11 & 0xffff, 2u) * 0x10001; break;
    case AdminOpcode::abort: result = 1; break;  // it was not aborted
    default: break;
  }
  finish(0, entry, 0, result);
}

void Controller::answer_identify(const nvme::SubmissionEntry& entry) {
  std::array<std::uint8_t, nvme::kIdentifySize> page{};
  const auto cns = static_cast<nvme::Cns>(entry.cdw10 & 0xff);
  if (cns == nvme::Cns::controller) {
    nvme::IdentifyController c{};
    nvme::set_text(c.serial, "1");
    nvme::set_text(c.model, "made up");
    nvme::set_text(c.firmware, "1");
    c.mdts = 1;
    c.nn = 1;
    c.oncs = nvme::oncs::dataset_management;
    c.vwc = 1;
    std::memcpy(page.data(), &c, sizeof c);
  } else if (cns == nvme::Cns::active_namespaces) {
    page[0] = 1;
  } else {
    nvme::IdentifyNamespace n{};
    n.nsze = n.ncap = n.nuse = kBlocks;
    n.formats[0].data_power = 9;
    std::memcpy(page.data(), &n, sizeof n);
  }
  for (Deviation& one : deviations_) {
    if (one.kind != Deviation::identify || one.which % 4u != (entry.cdw10 & 3) || !one.meets()) continue;
    account.deviated = true;
    for (std::size_t i = 0; i < one.bytes.size(); ++i) page[(one.place + i) % page.size()] = one.bytes[i];
  }
  std::memcpy(reach(entry.prp1, page.size(), true), page.data(), page.size());
}

void Controller::execute_io(std::uint16_t queue, const nvme::SubmissionEntry& entry) {
  if (deviate(queue, entry, Deviation::io)) return;
  if (entry.opcode == 1 || entry.opcode == 2) move(entry);
  finish(queue, entry, 0);
}

/// Reads have the data of their place; what is written is looked at and forgotten.
void Controller::move(const nvme::SubmissionEntry& entry) {
  const std::uint64_t page = nvme::Configuration{cc_}.page_size(),
                      total = (std::uint64_t{entry.cdw12 & 0xffff} + 1) * kBlock;
  const std::uint64_t lba = entry.cdw10 | std::uint64_t{entry.cdw11} << 32;
  const bool reads = entry.opcode == 2;
  std::uint64_t done = 0;
  const auto piece = [&](std::uint64_t iova) {
    const std::uint64_t bytes = std::min(total - done, page - iova % page);
    std::byte* memory = reach(iova, bytes, reads);
    for (std::uint64_t i = 0; reads && i < bytes; ++i)
      memory[i] = static_cast<std::byte>(content(lba + (done + i) / kBlock, (done + i) % kBlock));
    done += bytes;
  };
  piece(entry.prp1);
  if (done < total && total - done <= page) piece(entry.prp2);
  std::uint64_t list = entry.prp2, at_entry = 0;
  while (done < total) {
    std::uint64_t next;
    std::memcpy(&next, reach(list + at_entry * 8, 8, false), 8);
    if (at_entry == page / 8 - 1 && total - done > page) {
      list = next;
      at_entry = 0;
      continue;
    }
    ++at_entry;
    piece(next);
  }
}

void Controller::finish(std::uint16_t queue, const nvme::SubmissionEntry& entry, std::uint16_t status,
                        std::uint32_t result) {
  nvme::CompletionEntry answer{.result = result};
  if (const Queue* from = find(submission_, queue); from != nullptr)
    answer.sq_head = static_cast<std::uint16_t>(from->head);
  answer.last = nvme::CompletionWord::make(entry.cid, false, status).raw;
  post(queue, answer);
}

/// All but the phase is the caller's.
void Controller::post(std::uint16_t queue, const nvme::CompletionEntry& entry, bool phase_is_right) {
  Queue* to = find(completion_, queue);
  if (to == nullptr) return;
  std::byte* at = reach(to->ring + to->tail * sizeof entry, sizeof entry, true);
  nvme::CompletionEntry posted = entry;
  const nvme::CompletionWord word{entry.last};
  if (queue != 0 && word.succeeded()) {
    if (const auto named = in_flight_.find({queue, word.cid()}); named != in_flight_.end()) {
      account.posted += named->second;
      in_flight_.erase(named);
    }
  }
  posted.last = nvme::CompletionWord::make(word.cid(), to->phase == phase_is_right, word.status()).raw;
  std::memcpy(at, static_cast<const void*>(&posted), sizeof posted);
  if (!phase_is_right) return;
  if (++to->tail == to->entries) {
    to->tail = 0;
    to->phase = !to->phase;
  }
}

}  // namespace ugds::fuzz
