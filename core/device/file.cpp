// SPDX-License-Identifier: Apache-2.0
#include "device/file.hpp"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/steps.hpp"
#include "device/bytewise.hpp"
#include "nvme/commands.hpp"
#include "nvme/identify.hpp"
#include "nvme/prp.hpp"
#include "nvme/registers.hpp"

namespace ugds::device {

using nvme::AdminOpcode;
using nvme::Opcode;
using nvme::Register;

namespace {

/// For how long a reset waits for what it has cancelled.
constexpr std::uint64_t kResetLimit = 500'000'000;
constexpr std::uint32_t kMostEntries = 1024;

constexpr nvme::Capabilities kCapabilities =
    nvme::Capabilities::make({.max_queue_entries = kMostEntries, .ready_timeout_units = 4});

file::Options options_of(const Uri& uri, bool& is_pool, int& descriptor, std::string& io) {
  file::Options options;
  for (const auto& [name, value] : uri.query) {
    if (name == "direct") {
      if (value != "auto" && value != "on" && value != "off")
        fail(EINVAL, "open", "direct=" + value, "use auto, on or off");
      options.direct = value == "on"    ? file::Direct::demanded
                       : value == "off" ? file::Direct::off
                                        : file::Direct::wanted;
    } else if (name == "create") {
      options.create = parse_switch(value, name);
    } else if (name == "readonly") {
      options.readonly = parse_switch(value, name);
    } else if (name == "pool") {
      is_pool = parse_switch(value, name);
    } else if (name == "fd") {
      descriptor = static_cast<int>(parse_number(value, name, 0, 1u << 30));
    } else if (name == "io") {
      if (value != "auto" && value != "uring" && value != "threads")
        fail(EINVAL, "open", "io=" + value, "use auto, uring or threads");
      io = value;
    } else {
      const std::string near = nearest(name, {"direct", "create", "readonly", "fd", "io", "mode", "interrupts"});
      fail(EINVAL, "open", "\"" + name + "\" is no parameter of file:",
           near.empty() ? "the parameters are direct, create, readonly, fd, io, mode, interrupts, retry and deadline"
                        : "did you mean " + near + "?");
    }
  }
  return options;
}

}  // namespace

FileDevice::FileDevice(std::string text, const Uri& uri) : uri_(std::move(text)) {
  int descriptor = -1;
  std::string io;
  const file::Options options = options_of(uri, is_pool_, descriptor, io);
  wanted_ = io == "uring" ? Wanted::uring : io == "threads" ? Wanted::threads : Wanted::any;
  // Here, for the words: when queues are made there is no room but for a status.
  if (wanted_ == Wanted::uring) static_cast<void>(file::make_uring(1));
  if (is_pool_ || descriptor >= 0) {
    if (!uri.place.empty() || (is_pool_ && descriptor >= 0))
      fail(EINVAL, "open", "more than one of a path, fd= and pool=", "name one file");
  } else if (uri.place.empty()) {
    fail(EINVAL, "open", "file: names no file", "write file:/path/to/file, or pass a descriptor: file:?fd=N");
  }
  if (descriptor >= 0) {
    file_ = file::File::adopt(descriptor, options);
    // For people: what it was opened by, as far as that can still be told.
    if (file_->name().starts_with('/')) uri_ = "file:" + file_->name();
  }
  if (!is_pool_ && descriptor < 0) file_ = file::File::open(uri.place, options);
  for (std::uint32_t i = 0; i < kMostQueues; ++i) queues_[i].id = static_cast<std::uint16_t>(i + 1);
}

FileDevice::~FileDevice() = default;

Limits FileDevice::limits() const {
  return {.registers_may_block = true,
          .interrupts_with_turn = true,
          .bytewise = true,
          .interrupt_vectors = kMostQueues + 1,
          .position_mask = is_pool_ ? kFileSpan - 1 : ~std::uint64_t{0}};
}

Medium FileDevice::medium() const {
  Medium medium{.io = io_name_ + (why_threads_.empty() ? "" : ": " + why_threads_)};
  if (!file_) return medium;
  medium.size = file_->size();
  medium.kind = file_->kind();
  medium.why_buffered = file_->why_buffered();
  medium.is_buffered = file_->direct() < 0;
  medium.direct_bytes = file_->direct_bytes.load(std::memory_order_relaxed);
  medium.buffered_bytes = file_->buffered_bytes.load(std::memory_order_relaxed);
  medium.bounced_bytes = file_->bounced_bytes.load(std::memory_order_relaxed);
  medium.write_unit = file_->readonly() ? 1 : file_->write_unit();
  if (medium.write_unit != 1) medium.why_whole = file_->why_whole();
  medium.why_one_way = file_->why_one_way();
  return medium;
}

std::uint64_t FileDevice::end_at(std::uint64_t position) const {
  std::uint64_t in_file = position;
  const std::shared_ptr<file::File> file = file_at(in_file);
  return file == nullptr ? 0 : position - in_file + std::min(file->size(), is_pool_ ? kFileSpan : ~std::uint64_t{0});
}

Place FileDevice::place_of(std::uint64_t position) const {
  std::uint64_t in_file = position;
  const std::shared_ptr<file::File> file = file_at(in_file);
  if (file == nullptr) return {.name = uri_};
  return {.name = is_pool_ ? "file:" + file->name() : uri_,
          .end = position - in_file + file->size(),
          .is_fixed = file->is_block_device(),
          .why_one_way = file->why_one_way()};
}

std::unique_ptr<file::Io> FileDevice::make_io(std::uint32_t depth) {
  if (wanted_ != Wanted::threads) {
    try {
      auto io = file::make_uring(depth);
      io_name_ = io->name();
      return io;
    } catch (const Failure& failure) {
      if (wanted_ == Wanted::uring) throw;
      why_threads_ = failure.error().cause;
    }
  }
  auto io = file::make_workers();
  io_name_ = io->name();
  return io;
}

Mapping FileDevice::map(void* address, Bytes length, Access, std::uint64_t* pages) {
  const auto first = reinterpret_cast<std::uintptr_t>(address);
  for (std::uint64_t at = 0; at < length.value; at += nvme::kPageSize) *pages++ = first + at;
  return {first, length};
}

void FileDevice::set_interrupts(std::span<const int> eventfds) {
  require_vectors(eventfds.size());
  const std::lock_guard guard(admin_lock_);
  if (eventfds.empty()) {
    for (IoQueue& queue : queues_) {
      const std::lock_guard inner(queue.lock);
      if (queue.io) queue.io->tell(-1);
    }
  }
  eventfds_.assign(eventfds.begin(), eventfds.end());
}

// --- Registers -------------------------------------------------------------------------------------------------------

std::uint64_t FileDevice::read64(std::uint32_t offset) {
  switch (static_cast<Register>(offset)) {
    case Register::cap: return kCapabilities.raw;
    case Register::asq: return asq_;
    case Register::acq: return acq_;
    default: return read32(offset);
  }
}

std::uint32_t FileDevice::read32(std::uint32_t offset) {
  switch (static_cast<Register>(offset)) {
    case Register::cap: return static_cast<std::uint32_t>(kCapabilities.raw);
    case Register::vs: return 0x00010400;
    case Register::cc: return cc_;
    case Register::aqa: return aqa_;
    case Register::csts: {
      // It has stopped when the kernel is at nothing of what it was given.
      const bool ready = enabled_.load(std::memory_order_acquire) || in_flight() != 0;
      return nvme::ControllerStatus{}.with_ready(ready).with_shutdown_status(shut_down_.load() ? 2 : 0).raw;
    }
    default: return 0;
  }
}

void FileDevice::write64(std::uint32_t offset, std::uint64_t value) {
  const std::lock_guard guard(admin_lock_);
  if (offset == static_cast<std::uint32_t>(Register::asq)) asq_ = value;
  if (offset == static_cast<std::uint32_t>(Register::acq)) acq_ = value;
}

void FileDevice::write32(std::uint32_t offset, std::uint32_t value) {
  if (offset >= nvme::kDoorbellBase)
    return ring((offset - nvme::kDoorbellBase) / kCapabilities.doorbell_stride(), value);
  const std::lock_guard guard(admin_lock_);
  if (offset == static_cast<std::uint32_t>(Register::aqa)) aqa_ = value;
  if (offset == static_cast<std::uint32_t>(Register::cc)) configure(value);
}

/// CC, under admin_lock_.
void FileDevice::configure(std::uint32_t value) {
  const nvme::Configuration before{cc_}, now{value};
  cc_ = value;
  if (now.shutdown_notification() != 0) shut_down_ = true;
  if (now.enabled() && !before.enabled()) {
    const nvme::AdminQueueAttributes attributes{aqa_};
    admin_ = {.submission = reinterpret_cast<std::byte*>(asq_),
              .completion = reinterpret_cast<std::byte*>(acq_),
              .entries = attributes.submission_entries(),
              .completion_entries = attributes.completion_entries()};
    shut_down_ = false;
    enabled_.store(true, std::memory_order_release);
  } else if (!now.enabled() && before.enabled()) {
    enabled_.store(false, std::memory_order_release);
    cancel_all();
  }
}

// --- I/O queues ------------------------------------------------------------------------------------------------------

void FileDevice::ring(std::uint32_t index, std::uint32_t value) {
  if (index % 2 != 0) return;  // completion queues are as deep as what may be in flight
  const std::uint32_t id = index / 2;
  if (id == 0) return administer(value);
  if (id > kMostQueues) return;
  IoQueue& queue = queues_[id - 1];
  const std::lock_guard guard(queue.lock);
  if (!queue.has_submissions || !enabled_.load(std::memory_order_acquire)) return;
  queue.tail = value;
  fetch(queue);
  work(queue);  // what the kernel did at once
}

Device::Turn FileDevice::turn() const {
  return [](void* self) {
    for (IoQueue& queue : static_cast<FileDevice*>(self)->queues_) {
      if (!queue.io) continue;
      // Answers that another has taken may not be posted yet: whoever wants to sleep must wait for that.
      if (!queue.io->has_any() && !queue.busy.load(std::memory_order_seq_cst)) continue;
      const std::lock_guard guard(queue.lock);
      static_cast<FileDevice*>(self)->work(queue);
    }
  };
}

/// Under the queue's lock: posts what the kernel has answered.
void FileDevice::work(IoQueue& queue) {
  queue.busy.store(true, std::memory_order_seq_cst);
  queue.io->reap([&](file::Request& request) { tell(queue, static_cast<Flight&>(request)); });
  queue.busy.store(false, std::memory_order_release);
}

void FileDevice::fetch(IoQueue& queue) {
  while (queue.head != queue.tail) {
    nvme::SubmissionEntry entry;
    std::memcpy(static_cast<void*>(&entry), queue.submission + queue.head * sizeof entry, sizeof entry);
    queue.head = queue.head + 1 == queue.entries ? 0 : queue.head + 1;
    begin(queue, entry);
  }
  queue.io->push();
}

/// The file that a position lies in, which becomes the position there.
std::shared_ptr<file::File> FileDevice::file_at(std::uint64_t& position) const {
  if (!is_pool_) return file_;
  const std::uint64_t place = position >> kFileShift;
  position &= kFileSpan - 1;
  const std::lock_guard guard(files_lock_);
  return place < files_.size() ? files_[place] : nullptr;
}

void FileDevice::begin(IoQueue& queue, const nvme::SubmissionEntry& entry) {
  Flight* const flight = queue.free;
  if (flight == nullptr) return post(queue, entry.cid, nvme::status::internal_error, 0);  // more than the ring has
  std::uint64_t position = entry.cdw10 | std::uint64_t{entry.cdw11} << 32;
  std::uint64_t bytes = (entry.cdw12 & (kBytewiseMost - 1)) + std::uint64_t{1};
  std::byte* memory = reinterpret_cast<std::byte*>(entry.prp1);
  file::Kind kind = file::Kind::read;
  switch (static_cast<Opcode>(entry.opcode)) {
    case Opcode::read: break;
    case Opcode::write: kind = file::Kind::write; break;
    case Opcode::flush:
      kind = file::Kind::flush;
      position = bytes = 0;
      break;
    case Opcode::dataset_management: {
      nvme::DsmRange range;
      std::memcpy(&range, memory, sizeof range);
      kind = file::Kind::discard;
      position = range.lba;
      bytes = range.blocks;
      break;
    }
    default: return post(queue, entry.cid, nvme::status::invalid_opcode, 0);
  }
  flight->keeps = file_at(position);
  if (!flight->keeps) return post(queue, entry.cid, kSystemError, EBADF);
  const file::File& file = *flight->keeps;
  const bool reads = kind == file::Kind::read;
  const bool is_part = kind == file::Kind::write && ((position | bytes) & (file.write_unit() - 1)) != 0;
  if (is_part || (reads ? file.writeonly() : (file.readonly() && kind != file::Kind::flush))) {
    flight->keeps.reset();
    return post(queue, entry.cid, kSystemError, is_part ? EINVAL : EBADF);
  }
  queue.free = flight->next;
  flight->used = true;
  flight->cid = entry.cid;
  flight->kind = kind;
  flight->durable = (entry.cdw12 & nvme::kForceUnitAccess) != 0;
  flight->file = flight->keeps.get();
  flight->memory = memory;
  flight->offset = position;
  flight->bytes = bytes;
  queue.io->submit(*flight);
}

/// A command has ended.
void FileDevice::tell(IoQueue& queue, Flight& flight) {
  std::uint16_t status = nvme::status::success;
  std::uint32_t result = 0;
  if (flight.error == ECANCELED) {
    status = nvme::status::abort_requested;
  } else if (flight.error != 0) {
    status = kSystemError;
    result = static_cast<std::uint32_t>(flight.error);
  } else if (flight.done < flight.bytes && flight.kind == file::Kind::read) {
    status = kEndOfFile;
    result = static_cast<std::uint32_t>(flight.done);
  }
  flight.used = false;
  flight.keeps.reset();
  flight.next = queue.free;
  queue.free = &flight;
  // Of a controller that is being stopped nothing is posted any more.
  if (enabled_.load(std::memory_order_acquire)) post(queue, flight.cid, status, result);
}

void FileDevice::post(IoQueue& queue, std::uint16_t cid, std::uint16_t status, std::uint32_t result) {
  auto* const at = reinterpret_cast<nvme::CompletionEntry*>(queue.completion) + queue.completion_tail;
  at->result = result;
  at->sq_head = static_cast<std::uint16_t>(queue.head);
  at->sq_id = queue.id;
  // The phase last: whoever sees it sees the rest, and what was read into memory.
  std::atomic_ref(at->last).store(nvme::CompletionWord::make(cid, queue.phase, status).raw, std::memory_order_release);
  if (++queue.completion_tail == queue.completion_entries) {
    queue.completion_tail = 0;
    queue.phase = !queue.phase;
  }
}

// --- Stopping --------------------------------------------------------------------------------------------------------

std::uint32_t FileDevice::in_flight() noexcept {
  std::uint32_t total = 0;
  for (IoQueue& queue : queues_) {
    const std::lock_guard guard(queue.lock);
    if (!queue.io) continue;
    if (!enabled_.load(std::memory_order_acquire)) work(queue);
    total += queue.io->in_flight();
  }
  return total;
}

void FileDevice::cancel_all() noexcept {
  for (IoQueue& queue : queues_) {
    const std::lock_guard guard(queue.lock);
    queue.has_submissions = queue.has_completions = false;
    if (!queue.io) continue;
    for (Flight& flight : queue.flights) {
      if (flight.used) queue.io->cancel(flight);
    }
    queue.io->push();
  }
}

void FileDevice::abort(std::uint16_t id, std::uint16_t cid) {
  if (id == 0 || id > kMostQueues) return;
  IoQueue& queue = queues_[id - 1];
  const std::lock_guard guard(queue.lock);
  for (Flight& flight : queue.flights) {
    if (!flight.used || flight.cid != cid) continue;
    queue.io->cancel(flight);
    queue.io->push();
  }
}

bool FileDevice::reset() noexcept {
  {
    const std::lock_guard guard(admin_lock_);
    enabled_.store(false, std::memory_order_release);
    cc_ = 0;
    cancel_all();
  }
  const std::uint64_t start = monotonic_ns();
  while (in_flight() != 0) {
    if (monotonic_ns() - start > kResetLimit) return false;
    sched_yield();
  }
  return true;
}

// --- Files of a pool -------------------------------------------------------------------------------------------------

std::uint64_t FileDevice::attach(std::shared_ptr<file::File> file) {
  const std::lock_guard guard(files_lock_);
  if (!free_places_.empty()) {
    const std::size_t place = free_places_.back();
    free_places_.pop_back();
    files_[place] = std::move(file);
    return std::uint64_t{place} << kFileShift;
  }
  if (files_.size() == kMostFiles) {
    fail(EMFILE, "open", std::to_string(kMostFiles) + " files are open, which is the most",
         "close some that are not needed");
  }
  files_.push_back(std::move(file));
  free_places_.reserve(files_.size());
  return std::uint64_t{files_.size() - 1} << kFileShift;
}

void FileDevice::detach(std::uint64_t place) noexcept {
  const std::lock_guard guard(files_lock_);
  files_[place >> kFileShift].reset();
  free_places_.push_back(place >> kFileShift);
}

}  // namespace ugds::device
