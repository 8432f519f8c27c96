// SPDX-License-Identifier: Apache-2.0
#include "controller.hpp"

#include <algorithm>
#include <cstring>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "choices.hpp"
#include "nvme/commands.hpp"
#include "nvme/identify.hpp"
#include "nvme/prp.hpp"
#include "nvme/registers.hpp"
#include "nvme/status.hpp"
#include "threads.hpp"

namespace ugds::explore {

using nvme::AdminOpcode;
using nvme::Opcode;
using nvme::Register;

namespace {
constexpr const char* kMapped = "no DMA goes to memory that is not mapped and held";
constexpr const char* kUnique = "an identifier is never in flight twice";
constexpr const char* kRules = "the host keeps the rules of the rings";
}  // namespace

// --- What it can do ------------------------------------------------------------------------------------------------

Controller* Controller::living = nullptr;

Controller::~Controller() {
  require(mappings_.empty(), "everything is released in the end", "the device is closed, and memory is mapped to it");
  living = nullptr;
}

void Controller::mend() { left_ = {.errors = 0, .queues = traits_.queues}; }

std::uint32_t Controller::actions() {
  using K = Action::Kind;
  offered_.clear();
  if (gone_) return 0;
  const auto offer = [&](K kind, std::uint32_t command = 0) { offered_.push_back({kind, command}); };
  // What one that works does comes first.
  if (starting_) {
    offer(K::start);
    if (left_.restarts != 0) offer(K::start_failed);
    return static_cast<std::uint32_t>(offered_.size());
  }
  if (stopping_) offer(K::stop);
  if (waits_for_abort()) {
    const bool there = abort_target() != commands_.end() && room(abort_target()->queue) != 0;
    if (there) offer(K::abort_completed);
    offer(K::abort_refused);
    if (there) offer(K::abort_promised);
    offer(K::abort_failed);
  }
  if (!ready_) return static_cast<std::uint32_t>(offered_.size());
  const auto count = static_cast<std::uint32_t>(commands_.size());
  const auto may_complete = [&](std::uint32_t i) { return room(commands_[i].queue) != 0; };
  for (std::uint32_t i = 0; i < count; ++i) {
    if (!may_complete(i)) continue;
    if (commands_[i].aborting) offer(K::complete_aborted, i);
    offer(K::complete, i);
  }
  if (stopping_) return static_cast<std::uint32_t>(offered_.size());
  for (std::uint32_t i = 0; i < count && left_.errors != 0; ++i) {
    if (may_complete(i)) offer(K::complete_error, i);
  }
  for (std::uint32_t i = 0; i < count && left_.bad_heads != 0; ++i) {
    if (may_complete(i)) offer(K::bad_head, i);
  }
  if (left_.duplicates != 0 && has_last_ && room(last_.queue) != 0) offer(K::duplicate);
  if (left_.unknown != 0 && count != 0 && room(commands_[0].queue) != 0) offer(K::unknown);
  const bool busy = count != 0 || abort_waits_;
  if (left_.fatal != 0 && busy && !fatal_) offer(K::fatal);
  if (left_.removals != 0 && busy) offer(K::remove);
  return static_cast<std::uint32_t>(offered_.size());
}

std::string Controller::name_of(std::uint32_t action) const {
  const Action& a = offered_[action];
  const auto which = [&] { return "command " + std::to_string(commands_[a.command].cid); };
  switch (a.kind) {
    case Action::Kind::complete: return "completes " + which();
    case Action::Kind::complete_error: return "completes " + which() + " with an error";
    case Action::Kind::complete_aborted: return "completes " + which() + " as aborted";
    case Action::Kind::duplicate: return "posts its last completion again";
    case Action::Kind::unknown: return "posts a completion of no command";
    case Action::Kind::bad_head: return "completes " + which() + " with a head beyond the ring";
    case Action::Kind::fatal: return "reports a fatal status";
    case Action::Kind::remove: return "leaves the bus";
    case Action::Kind::abort_completed: return "completes the command as aborted, and answers the Abort";
    case Action::Kind::abort_promised: return "answers the Abort with \"aborted\", and goes on with the command";
    case Action::Kind::abort_refused: return "answers the Abort with \"not aborted\"";
    case Action::Kind::abort_failed: return "answers the Abort with an error";
    case Action::Kind::stop: return "stops";
    case Action::Kind::start: return "starts";
    case Action::Kind::start_failed: return "fails to start";
  }
  return "?";
}

void Controller::act(std::uint32_t action) {
  const Action a = offered_[action];
  const auto finish = [&](std::uint16_t status, bool bad_head = false) {
    const Command done = commands_[a.command];
    commands_.erase(commands_.begin() + a.command);
    if (status == 0) move_data(done);
    post(done.queue, done.cid, status, 0, bad_head);
    last_ = done;
    has_last_ = true;
  };
  const auto answer_abort = [&](std::uint16_t status, std::uint32_t result) {
    abort_waits_ = false;
    post(0, abort_.cid, status, result);
  };
  const std::uint16_t aborted = nvme::status::abort_requested;
  switch (a.kind) {
    case Action::Kind::complete: return finish(0);
    case Action::Kind::complete_error: --left_.errors; return finish(nvme::status::unrecovered_read_error);
    case Action::Kind::complete_aborted: return finish(aborted);
    case Action::Kind::bad_head: --left_.bad_heads; return finish(0, true);
    case Action::Kind::duplicate: --left_.duplicates; return post(last_.queue, last_.cid, 0, 0);
    case Action::Kind::unknown:
      --left_.unknown;
      return post(commands_[0].queue, static_cast<std::uint16_t>(commands_[0].cid ^ 0x8000), 0, 0);
    case Action::Kind::fatal:
      --left_.fatal;
      fatal_ = true;
      return;
    case Action::Kind::remove: gone_ = true; return stop();
    case Action::Kind::abort_completed: {
      const Command done = *abort_target();
      commands_.erase(abort_target());
      post(done.queue, done.cid, aborted, 0);
      return answer_abort(0, 0);
    }
    case Action::Kind::abort_promised: abort_target()->aborting = true; return answer_abort(0, 0);
    case Action::Kind::abort_refused: return answer_abort(0, 1);
    case Action::Kind::abort_failed:
      return answer_abort(nvme::make_status(nvme::StatusType::command_specific, 0x03), 1);
    case Action::Kind::stop: return stop();
    case Action::Kind::start_failed:
      --left_.restarts;
      fatal_ = true;
      starting_ = false;
      return;
    case Action::Kind::start: return start();
  }
}

void Controller::start() {
  starting_ = false;
  ready_ = may_run_ = true;
}

std::vector<Controller::Command>::iterator Controller::abort_target() {
  const auto queue = static_cast<std::uint16_t>(abort_.cdw10);
  const auto cid = static_cast<std::uint16_t>(abort_.cdw10 >> 16);
  return std::find_if(commands_.begin(), commands_.end(),
                      [&](const Command& c) { return c.queue == queue && c.cid == cid; });
}

/// No DMA follows.
void Controller::stop() {
  may_run_ = ready_ = fatal_ = stopping_ = starting_ = abort_waits_ = has_last_ = false;
  cc_ &= ~1u;
  shutdown_ = 0;
  commands_.clear();
  queues_.clear();
}

// --- Registers -----------------------------------------------------------------------------------------------------

std::uint32_t Controller::read32(std::uint32_t offset) {
  if (gone_) return nvme::kAllOnes32;
  switch (static_cast<Register>(offset)) {
    case Register::vs: return 0x00020000;
    case Register::cc: return cc_;
    case Register::csts:
      return nvme::ControllerStatus{}.with_ready(ready_).with_fatal(fatal_).with_shutdown_status(shutdown_).raw;
    default: return 0;
  }
}

std::uint64_t Controller::read64(std::uint32_t) {
  if (gone_) return nvme::kAllOnes64;
  return nvme::Capabilities::make({.max_queue_entries = 4, .ready_timeout_units = 1}).raw;
}

void Controller::write64(std::uint32_t offset, std::uint64_t value) {
  if (static_cast<Register>(offset) == Register::asq) asq_ = value;
  if (static_cast<Register>(offset) == Register::acq) acq_ = value;
}

void Controller::write32(std::uint32_t offset, std::uint32_t value) {
  fence();
  happened();
  if (gone_) return;
  if (offset >= nvme::kDoorbellBase) {
    const std::uint32_t index = (offset - nvme::kDoorbellBase) / 4, queue = index / 2;
    if (queue >= queues_.size() || !queues_[queue].is_there()) {
      // After a reset from outside somebody may still ring: nothing listens.
      require(!ready_, kRules, "a doorbell of no queue is rung");
      return;
    }
    Queue& q = queues_[queue];
    if (index % 2 == 1) {
      require(value < q.completion_size, kRules, "a completion doorbell beyond the ring");
      q.taken = value;
      return;
    }
    require(value < q.submission_size, kRules, "a submission doorbell beyond the ring");
    q.tail = value;
    if (!fatal_) fetch(static_cast<std::uint16_t>(queue));
    return;
  }
  if (static_cast<Register>(offset) == Register::aqa) aqa_ = value;
  if (static_cast<Register>(offset) != Register::cc) return;
  const bool was = (cc_ & 1) != 0, is = (value & 1) != 0;
  cc_ = value;
  if (nvme::Configuration{value}.shutdown_notification() != 0) shutdown_ = 2;
  if (was && !is) {
    if (!ready_) return stop();  // one that was never ready has executed nothing
    stopping_ = true;
    if (!left_.stuck) stop();
  }
  if (!was && is) {
    const nvme::AdminQueueAttributes attributes{aqa_};
    fatal_ = false;
    shutdown_ = 0;
    queues_.assign(1 + traits_.queues, {});
    queues_[0] = {.submission = asq_,
                  .completion = acq_,
                  .submission_size = attributes.submission_entries(),
                  .completion_size = attributes.completion_entries()};
    starting_ = true;
    if (left_.restarts == 0 || !in_thread()) start();
  }
}

bool Controller::reset() noexcept {
  happened();
  if (gone_) return false;  // it cannot be reached; nor can it reach anything
  if (left_.stuck && may_run_ && choose(2, "a reset of the function", [](std::uint32_t i) {
                                   return std::string(i == 0 ? "works" : "fails");
                                 }) == 1) {
    return false;
  }
  stop();
  return true;
}

device::Device::Turn Controller::turn() const {
  return [](void*) { idle(); };
}

// --- Commands ------------------------------------------------------------------------------------------------------

void Controller::fetch(std::uint16_t queue) {
  for (Queue& q = queues_[queue]; q.head != q.tail;) {
    nvme::SubmissionEntry entry;
    std::memcpy(&entry, reach(q.submission + q.head * sizeof entry, sizeof entry, false), sizeof entry);
    if (++q.head == q.submission_size) q.head = 0;
    if (queue == 0) {
      admin(entry);
      if (queues_.empty()) return;
      continue;
    }
    for (const Command& other : commands_) {
      if (other.queue == queue && other.cid == entry.cid) violated(kUnique, "the same identifier came twice");
    }
    Command command;
    command.queue = queue;
    command.cid = entry.cid;
    parse(command, entry);
    commands_.push_back(std::move(command));
  }
}

void Controller::parse(Command& command, const nvme::SubmissionEntry& entry) {
  command.entry = entry;
  command.opcode = entry.opcode;
  command.lba = std::uint64_t{entry.cdw11} << 32 | entry.cdw10;
  const auto op = static_cast<Opcode>(entry.opcode);
  require(op == Opcode::read || op == Opcode::write || op == Opcode::flush, kRules, "an entry that is no command");
  if (op == Opcode::flush) return;
  const std::uint64_t bytes = std::uint64_t{(entry.cdw12 & 0xffff) + 1} * kBlock;
  const std::uint64_t pages = nvme::pages_spanned(entry.prp1, bytes, nvme::kPageSize);
  command.pages.push_back(entry.prp1);
  if (pages == 2) command.pages.push_back(entry.prp2);
  if (pages > 2) {
    for (std::uint64_t i = 0; i + 1 < pages; ++i) {
      std::uint64_t page = 0;
      std::memcpy(&page, reach(entry.prp2 + i * sizeof page, sizeof page, false), sizeof page);
      command.pages.push_back(page);
    }
  }
}

void Controller::admin(const nvme::SubmissionEntry& entry) {
  switch (static_cast<AdminOpcode>(entry.opcode)) {
    case AdminOpcode::identify: {
      std::byte* const page = reach(entry.prp1, nvme::kIdentifySize, true);
      std::memset(page, 0, nvme::kIdentifySize);
      if ((entry.cdw10 & 0xff) == 1) {
        nvme::IdentifyController c{};
        c.mdts = traits_.mdts;
        c.nn = 1;
        std::memcpy(page, &c, sizeof c);
      } else if ((entry.cdw10 & 0xff) == 2) {
        const std::uint32_t one = 1;
        std::memcpy(page, &one, sizeof one);
      } else {
        nvme::IdentifyNamespace ns{};
        ns.nsze = ns.ncap = kBlocks;
        ns.formats[0].data_power = 12;
        std::memcpy(page, &ns, sizeof ns);
      }
      return post(0, entry.cid, 0, 0);
    }
    case AdminOpcode::set_features: return post(0, entry.cid, 0, (traits_.queues - 1) << 16 | (traits_.queues - 1));
    case AdminOpcode::create_cq: {
      Queue& q = queues_.at(entry.cdw10 & 0xffff);
      q.completion = entry.prp1;
      q.completion_size = (entry.cdw10 >> 16) + 1;
      return post(0, entry.cid, 0, 0);
    }
    case AdminOpcode::create_sq: {
      Queue& q = queues_.at(entry.cdw10 & 0xffff);
      q.submission = entry.prp1;
      q.submission_size = (entry.cdw10 >> 16) + 1;
      return post(0, entry.cid, 0, 0);
    }
    case AdminOpcode::abort:
      abort_waits_ = true;
      abort_ = entry;
      return;
    default: violated(kRules, "an admin command that this controller does not have");
  }
}

void Controller::post(std::uint16_t queue, std::uint16_t cid, std::uint16_t status, std::uint32_t result,
                      bool bad_head) {
  Queue& q = queues_[queue];
  const std::uint32_t next = q.posted + 1 == q.completion_size ? 0 : q.posted + 1;
  require(next != q.taken, kRules, "a completion finds no room");
  auto* const entry = reinterpret_cast<nvme::CompletionEntry*>(
      reach(q.completion + q.posted * sizeof(nvme::CompletionEntry), sizeof(nvme::CompletionEntry), true));
  entry->result = result;
  entry->sq_head = static_cast<std::uint16_t>(bad_head ? 0xffff : q.head);
  entry->sq_id = queue;
  entry->last = nvme::CompletionWord::make(cid, q.phase, status).raw;
  q.posted = next;
  ++posted_;
  if (next == 0) q.phase = !q.phase;
}

/// Completions that the host has room for.
std::uint32_t Controller::room(std::uint16_t queue) const {
  const Queue& q = queues_[queue];
  return q.completion_size - 1 - (q.posted + q.completion_size - q.taken) % q.completion_size;
}

bool Controller::has_work() const {
  if (gone_) return false;
  if (starting_ || stopping_ || waits_for_abort()) return true;
  return std::any_of(commands_.begin(), commands_.end(), [this](const Command& c) { return room(c.queue) != 0; });
}

std::uint64_t Controller::word(std::uint64_t lba) const {
  const auto found = media.find(lba);
  return found != media.end() ? found->second : 0x5eed'0000'0000'0000 + lba;
}

void Controller::move_data(const Command& command) {
  std::uint64_t lba = command.lba;
  for (const std::uint64_t page : command.pages) {
    const bool read = command.opcode == static_cast<std::uint8_t>(Opcode::read);
    std::byte* const at = reach(page, kBlock, read);
    std::uint64_t value = word(lba);
    if (read) {
      std::memcpy(at, &value, sizeof value);
      std::memcpy(at + kBlock - sizeof value, &value, sizeof value);
    } else {
      std::memcpy(&value, at, sizeof value);
      media[lba] = value;
    }
    ++lba;
  }
}

// --- Memory --------------------------------------------------------------------------------------------------------

std::byte* Controller::reach(std::uint64_t iova, std::uint64_t bytes, bool write) const {
  auto found = mappings_.upper_bound(iova);
  if (found == mappings_.begin()) violated(kMapped, "an address below every mapping");
  --found;
  const auto& [begin, mapped] = *found;
  if (iova + bytes > begin + mapped.length) violated(kMapped, "the controller reaches beyond what is mapped");
  require(!write || mapped.writable, kMapped, "the controller writes to what is mapped for reading");
  return mapped.memory + (iova - begin);
}

void Controller::check() const {
  if (!may_run_) return;
  for (const Queue& q : queues_) {
    if (!q.is_there()) continue;
    reach(q.submission, q.submission_size * sizeof(nvme::SubmissionEntry), false);
    reach(q.completion, q.completion_size * sizeof(nvme::CompletionEntry), true);
  }
  for (const Command& command : commands_) {
    for (const std::uint64_t page : command.pages) {
      reach(page, 1, command.opcode == static_cast<std::uint8_t>(Opcode::read));
    }
  }
}

bool Controller::uses(const device::Mapping& mapping) const {
  const auto inside = [&](std::uint64_t iova) {
    return iova >= mapping.token && iova < mapping.token + mapping.length.value;
  };
  if (!may_run_) return false;
  for (const Queue& q : queues_) {
    if (q.is_there() && (inside(q.submission) || inside(q.completion))) return true;
  }
  for (const Command& command : commands_) {
    if (std::any_of(command.pages.begin(), command.pages.end(), inside)) return true;
    if (command.pages.size() > 2 && inside(command.entry.prp2)) return true;
  }
  return false;
}

bool Controller::touches(const std::byte* begin, std::size_t bytes) const {
  for (const Command& command : commands_) {
    for (const std::uint64_t page : command.pages) {
      const std::byte* const at = reach(page, 1, false);
      if (at >= begin && at < begin + bytes) return true;
    }
  }
  return false;
}

device::Mapping Controller::map(void* address, Bytes length, device::Access access, std::uint64_t* pages) {
  const std::uint64_t begin = next_iova_;
  next_iova_ += length.value + (1u << 20);
  mappings_[begin] = {length.value, static_cast<std::byte*>(address), access == device::Access::read_write};
  for (std::uint64_t i = 0; i < length.value / nvme::kPageSize; ++i) pages[i] = begin + i * nvme::kPageSize;
  return {begin, length};
}

void Controller::unmap(const device::Mapping& mapping) noexcept {
  require(!uses(mapping), kMapped, "memory is unmapped that a command may still use");
  require(mappings_.erase(mapping.token) == 1, "everything is released once", "a mapping is unmapped twice");
}

device::Device::OwnMemory Controller::allocate(Bytes size, std::uint64_t* pages) {
  auto* const data = static_cast<std::byte*>(std::aligned_alloc(4096, align_up(size.value, std::uint64_t{4096})));
  std::memset(data, 0, size.value);
  return {data, map(data, size, device::Access::read_write, pages)};
}

void Controller::free(const OwnMemory& own) noexcept {
  unmap(own.mapping);
  std::free(own.data);
}

}  // namespace ugds::explore
