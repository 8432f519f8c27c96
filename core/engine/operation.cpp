// SPDX-License-Identifier: Apache-2.0
#include "engine/operation.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>

#include "base/clock.hpp"
#include "base/text.hpp"
#include "nvme/status.hpp"

namespace ugds::engine {

using nvme::Opcode;

const char* operation_name(Opcode opcode) {
  switch (opcode) {
    case Opcode::read: return "read";
    case Opcode::write: return "write";
    case Opcode::flush: return "flush";
    case Opcode::dataset_management: return "discard";
    case Opcode::write_zeroes: return "write zeroes";
  }
  return "request";
}

std::uint32_t caller_number() {
  static std::atomic<std::uint32_t> next{0};
  // Initial-exec: one load instead of a call. Four bytes fit into what the loader keeps for libraries opened late.
  thread_local std::uint32_t number __attribute__((tls_model("initial-exec"))) = 0;
  if (number == 0) [[unlikely]] number = next.fetch_add(1, std::memory_order_relaxed) + 1;
  return number - 1;
}

namespace {

/// How often a long wait asks whether it was interrupted.
constexpr std::uint64_t kInterruptInterval = 20'000'000;

bool has_data(Opcode opcode) { return opcode == Opcode::read || opcode == Opcode::write; }

}  // namespace

Operation::Operation(Handle& handle, const Transfer& transfer)
    : handle_(handle), transfer_(transfer), idle_(handle.turn(), handle.turn_context()) {
  if (!check()) request_.done.store(1, std::memory_order_relaxed);
}

bool Operation::check() {
  const Transfer& t = transfer_;
  if (t.opcode == Opcode::flush) {
    transfer_.size = 0;
    return true;
  }
  const std::uint64_t capacity = handle_.identity().capacity();
  const std::uint64_t block_mask = handle_.identity().block_size - 1;
  if (((t.offset | t.size) & block_mask) != 0) [[unlikely]] {
    refuse(EINVAL, "offset and size must be multiples of the block size, %u bytes", handle_.identity().block_size);
    return false;
  }
  if (t.offset > capacity || t.size > capacity - t.offset) [[unlikely]] {
    refuse(ERANGE, "the range ends beyond the device, which has %llu bytes", static_cast<unsigned long long>(capacity));
    return false;
  }
  if (has_data(t.opcode)) {
    const memory::Reference& b = t.buffer;
    if (!b) [[unlikely]] {
      refuse(EINVAL, "the buffer is not registered");
      set_hint(last_error(), "register it once, before the first I/O");
      return false;
    }
    if (t.buffer_offset > b.size || t.size > b.size - t.buffer_offset) [[unlikely]] {
      refuse(EINVAL, "[%llu, +%llu) reaches beyond the registered buffer, which has %llu bytes",
             static_cast<unsigned long long>(t.buffer_offset), static_cast<unsigned long long>(t.size),
             static_cast<unsigned long long>(b.size));
      return false;
    }
    if (((b.address + t.buffer_offset) & 3) != 0) [[unlikely]] {
      refuse(EINVAL, "the memory does not begin at a multiple of 4 bytes");
      set_hint(last_error(), "the controller addresses memory in dwords; align the buffer or its offset");
      return false;
    }
    if (b.readonly && t.opcode == Opcode::read) [[unlikely]] {
      refuse(EACCES, "a read would write to a buffer that is registered read-only");
      set_hint(last_error(), "register memory that can be written");
      return false;
    }
  }
  return t.size != 0;
}

void Operation::refuse(int code, const char* format, ...) {
  Error& error = last_error() = Error{};
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(error.cause, sizeof error.cause, format, arguments);
  va_end(arguments);
  refused_ = code;
}

/// No more pieces: a local reason, whose cause is in last_error(), stands at `staged_`.
void Operation::stop_here(int code) {
  refused_ = code;
  if (staged_ < request_.failed_at) request_.failed_at = staged_;
  if (request_.in_flight == 0) request_.done.store(1, std::memory_order_relaxed);
}

bool Operation::turn() {
  if (done()) return true;
  const bool all_staged = request_.complete_when_idle;
  if (!all_staged && request_.in_flight == 0 && staged_ == 0) pair_ = &handle_.choose(caller_number());
  if (!pair_->try_acquire()) return idle();
  bool progress = false;
  const State state = handle_.state();
  if (!all_staged && state == State::ready) progress = stage();
  // What a wedged controller writes to its rings is not believed any more.
  if (!progress && state != State::wedged) progress = pair_->reap() != 0;
  pair_->release();
  if (done()) return true;
  return progress ? false : idle();
}

bool Operation::stage() {
  queue::QueuePair& pair = *pair_;
  if (request_.failed() || done()) return false;
  bool staged = false;
  if (has_data(transfer_.opcode)) [[likely]] {
    while (staged_ < transfer_.size && request_.in_flight < handle_.window() &&
           pair.has_room(handle_.lists_for_chunk())) {
      if (!stage_piece(pair)) break;
      staged = true;
    }
  } else if (pair.has_room(1)) {
    staged = true;
    if (transfer_.opcode == Opcode::flush) {
      nvme::SubmissionEntry entry = nvme::flush(handle_.identity().namespace_id);
      pair.stage(request_, entry);
    } else {
      stage_ranges(pair);
    }
    staged_ = transfer_.size;
    request_.complete_when_idle = true;
  }
  pair.ring();
  return staged;
}

bool Operation::stage_piece(queue::QueuePair& pair) {
  const Transfer& t = transfer_;
  const auto bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(t.size - staged_, handle_.chunk()));
  const memory::Hold hold = memory::hold(pair.ledger(), t.buffer);
  if (hold != memory::Hold::held) [[unlikely]] {
    if (hold == memory::Hold::closing) return false;  // soon it is closed, or not
    refuse(ESTALE, "the registration is closed");
    set_hint(last_error(), "register the buffer again");
    stop_here(ESTALE);
    return false;
  }
  const std::uint64_t* pages = t.buffer.registration->pages(handle_.number());
  if (pages == nullptr) [[unlikely]] {
    pair.ledger().remove(t.buffer.registration->index());
    refuse(ENXIO, "the buffer is not mapped to this device");
    set_hint(last_error(), "register it for this device too, or use ugds.empty(), whose memory every transport can reach");
    stop_here(ENXIO);
    return false;
  }
  const unsigned shift = handle_.block_shift();
  nvme::SubmissionEntry entry =
      nvme::block_command(t.opcode, handle_.identity().namespace_id, Lba((t.offset + staged_) >> shift), bytes >> shift,
                          t.durable ? nvme::kForceUnitAccess : 0);
  pair.stage_data(request_, entry, t.buffer.registration->index(),
                  {pages, t.buffer.page_offset() + t.buffer_offset + staged_}, staged_, bytes);
  staged_ += bytes;
  request_.complete_when_idle = staged_ == t.size;
  return true;
}

void Operation::stage_ranges(queue::QueuePair& pair) {
  // One range holds 32 bits of blocks; what one command cannot, the caller cut off (discard()).
  const unsigned shift = handle_.block_shift();
  nvme::SubmissionEntry entry =
      nvme::dataset_management(handle_.identity().namespace_id, 1, nvme::kDsmDeallocate, Iova(0));
  std::uint64_t* range = pair.stage_with_page(request_, entry);
  range[0] = (transfer_.size >> shift) << 32;  // attributes 0 in the lower half
  range[1] = transfer_.offset >> shift;
}

bool Operation::idle() {
  if (!idle_.pause()) [[likely]] return false;
  return attend();
}

/// Every 64th empty turn: the clock, the device, the deadline.
bool Operation::attend() {
  const std::uint64_t now = ticks();
  if (begun_ == 0) begun_ = looked_ = now;
  if (now - looked_ < ns_to_ticks(100'000)) return done();
  looked_ = now;
  handle_.check_controller();
  const State state = handle_.state();
  if (state == State::wedged && request_.in_flight != 0) {
    abandon();
    return true;
  }
  if (state == State::recovering) return done();
  if (state != State::ready) {
    if (request_.in_flight == 0 && !done()) stop_here(EIO);
    return done();
  }
  const std::uint64_t limit = ns_to_ticks(handle_.policy().deadline_ns);
  if (request_.in_flight == 0) {
    // Never submitted: the queues were busy with others' requests for all that time.
    if (!done() && now - begun_ > limit) {
      refuse(ETIMEDOUT, "no queue had room within the deadline");
      stop_here(ETIMEDOUT);
    }
    return done();
  }
  if (!pair_->try_acquire()) return done();
  std::uint16_t cid = 0;
  const std::uint64_t staged = pair_->oldest(request_, cid);
  pair_->release();
  if (staged != 0 && now - std::min(now, staged) > limit) {
    expired_ = true;
    handle_.recover_overdue(*pair_, cid, staged);
  }
  return done();
}

void Operation::abandon() {
  if (pair_ != nullptr && !done()) {
    while (!pair_->try_acquire()) idle_.pause();
    if (!done()) {
      pair_->orphan(request_);
      if (refused_ == 0) refused_ = ECANCELED;
      request_.failed_at = std::min(request_.failed_at, std::uint64_t{0});
      request_.done.store(1, std::memory_order_relaxed);
    }
    pair_->release();
  }
}

std::int64_t Operation::result() {
  if (refused_ == 0 && !request_.failed()) [[likely]] return static_cast<std::int64_t>(transfer_.size);
  return explain();
}

std::int64_t Operation::explain() {
  Error& error = last_error();
  const State state = handle_.state();
  if (refused_ == 0 || refused_ == EIO || refused_ == ECANCELED) error = Error{};
  error.operation = operation_name(transfer_.opcode);
  set_device(error, handle_.uri().c_str());
  error.offset = transfer_.offset;
  error.length = transfer_.size;
  error.completed = request_.failed() ? request_.failed_at : 0;
  error.code = refused_;
  if (refused_ == ECANCELED && state == State::wedged) {
    error.code = expired_ ? ETIMEDOUT : EIO;
    set_cause(error, "%s", handle_.why().c_str());
    set_hint(error, "its buffers stay registered and held; close the handle by force after an external reset");
  } else if (refused_ == ECANCELED) {
    set_cause(error, "interrupted while the device was at work; the buffer is held until the command retires");
  } else if (refused_ == EIO) {
    error.code = state == State::lost ? ENODEV : EIO;
    set_cause(error, "%s", handle_.why().c_str());
    set_hint(error, "close the device and open it again");
  } else if (refused_ == 0 && expired_) {
    error.code = ETIMEDOUT;
    set_cause(error, "a command was not completed within %.3f s; it was %s, and nothing more is written",
              static_cast<double>(handle_.policy().deadline_ns) * 1e-9,
              request_.stopped ? "ended by a reset of the controller" : "aborted");
    set_hint(error, "raise the deadline if the device is merely slow");
  } else if (refused_ == 0 && request_.stopped) {
    error.code = state == State::lost ? ENODEV : ECANCELED;
    set_cause(error, "%s", state == State::lost ? "the device has gone: its registers read as all ones"
                                                : "the controller was reset while the request was in flight");
    set_hint(error, "%s", state == State::ready ? "nothing more is written; repeat the request"
                                                : "close the device and open it again");
  } else if (refused_ == 0) {
    error.code = nvme::status_errno(request_.status);
    error.status = request_.status;
    std::snprintf(error.status_words, sizeof error.status_words, "%s", nvme::status_words(request_.status));
    set_cause(error, "the device failed a command at byte %llu",
              static_cast<unsigned long long>(transfer_.offset + request_.failed_at));
    set_hint(error, "%s", nvme::status_hint(request_.status));
  }
  return -error.code;
}

std::int64_t finish(Operation& operation, const Interrupt& interrupt) {
  if (interrupt.asked == nullptr) {
    while (!operation.turn()) {
    }
    return operation.result();
  }
  const std::uint64_t interval = ns_to_ticks(kInterruptInterval);
  std::uint64_t last = ticks();
  while (!operation.turn()) {
    const std::uint64_t now = ticks();
    if (now - last < interval) continue;
    last = now;
    if (!interrupt.asked(interrupt.context)) continue;
    operation.abandon();
    const std::int64_t result = operation.result();
    return result == -ECANCELED ? -EINTR : result;
  }
  return operation.result();
}

std::int64_t run(Handle& handle, const Transfer& transfer, const Interrupt& interrupt) {
  Operation operation(handle, transfer);
  return finish(operation, interrupt);
}

std::int64_t discard(Handle& handle, std::uint64_t offset, std::uint64_t size, const Interrupt& interrupt) {
  Transfer transfer{.opcode = Opcode::dataset_management, .offset = offset, .size = size};
  if (!handle.identity().dataset_management) {
    Error& error = last_error() = Error{};
    error.code = EOPNOTSUPP;
    error.operation = operation_name(transfer.opcode);
    error.offset = offset;
    error.length = size;
    set_device(error, handle.uri().c_str());
    set_cause(error, "the device does not offer Dataset Management");
    return -error.code;
  }
  {
    Operation whole(handle, transfer);  // the arguments, before anything is discarded
    if (whole.done()) return whole.result();
    whole.abandon();
  }
  // The most that one range holds, in whole blocks.
  const std::uint64_t most = std::uint64_t{0x80000000u} << handle.block_shift();
  for (std::uint64_t done = 0; done < size; done += transfer.size) {
    transfer.offset = offset + done;
    transfer.size = std::min(most, size - done);
    const std::int64_t result = run(handle, transfer, interrupt);
    if (result < 0) {
      last_error().completed = done;
      return result;
    }
  }
  return static_cast<std::int64_t>(size);
}

}  // namespace ugds::engine
