// SPDX-License-Identifier: Apache-2.0
#include "engine/operation.hpp"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>

#include "base/clock.hpp"
#include "engine/one_command.hpp"
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

constinit thread_local std::uint32_t this_caller = 0;

std::uint32_t number_caller() {
  static std::atomic<std::uint32_t> next{0};
  return this_caller = next.fetch_add(1, std::memory_order_relaxed) + 1;
}

namespace {

/// How often a long wait asks whether it was interrupted.
constexpr std::uint64_t kInterruptInterval = 20'000'000;
/// Poll turns before a wait sleeps, where it may, and the longest that it sleeps without looking around.
constexpr std::uint32_t kRests = 32;
constexpr std::uint64_t kNap = 10'000'000;
/// How often a wait looks at the device: a register read costs about as much as a command.
constexpr std::uint64_t kLookInterval = 100'000;

}  // namespace

/// Says which of the rules of check() was broken, the first first.
bool Operation::refuse_arguments() {
  const Transfer& t = transfer_;
  const memory::Reference& b = t.buffer;
  const auto number = [](std::uint64_t n) { return static_cast<unsigned long long>(n); };
  if (b && t.buffer_offset > b.size) {  // first: without a size given, the rest of the buffer has wrapped
    refuse(EINVAL, "the offset in the buffer, %llu, lies beyond it: it has %llu bytes", number(t.buffer_offset),
           number(b.size));
  } else if (((t.offset | t.size) & handle_.geometry().block_mask) != 0) {
    refuse(EINVAL, "offset and size must be multiples of the block size, %u bytes", handle_.identity().block_size);
  } else if (t.offset > handle_.geometry().capacity || t.size > handle_.geometry().capacity - t.offset) {
    refuse(ERANGE, "the range ends beyond the device, which has %llu bytes", number(handle_.geometry().capacity));
  } else if (!b) {
    refuse(EINVAL, "the buffer is not registered");
    set_hint(last_error(), "register it once, before the first I/O");
  } else if (t.buffer_offset > b.size || t.size > b.size - t.buffer_offset) {
    refuse(EINVAL, "[%llu, +%llu) reaches beyond the registered buffer, which has %llu bytes", number(t.buffer_offset),
           number(t.size), number(b.size));
  } else if (((b.address + t.buffer_offset) & 3) != 0) {
    refuse(EINVAL, "the memory does not begin at a multiple of 4 bytes");
    set_hint(last_error(), "the controller addresses memory in dwords; align the buffer or its offset");
  } else {
    refuse(EACCES, "a read would write to a buffer that is registered read-only");
    set_hint(last_error(), "register memory that can be written");
  }
  return false;
}

void Operation::refuse(int code, const char* format, ...) {
  Error& error = last_error() = Error{};
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(error.cause, sizeof error.cause, format, arguments);
  va_end(arguments);
  refused_ = code;
  if (staged_ == 0) request_.failed_at = 0;
}

/// No more pieces: a reason of ours, by refuse(), stands at `staged_`.
void Operation::stop_here() {
  if (staged_ < request_.failed_at) request_.failed_at = staged_;
  if (request_.in_flight == 0) request_.done.store(1, std::memory_order_relaxed);
}

bool Operation::check() {
  const Transfer& t = transfer_;
  const Handle::Geometry& g = handle_.geometry();
  const memory::Reference& b = t.buffer;
  if (((t.offset | t.size) & g.block_mask) != 0 || t.offset > g.capacity || t.size > g.capacity - t.offset) {
    return refuse_arguments();
  }
  if (!has_data(t.opcode)) return t.size != 0 || t.opcode == Opcode::flush;
  if (!b || t.buffer_offset > b.size || t.size > b.size - t.buffer_offset || ((b.address + t.buffer_offset) & 3) != 0 ||
      (t.opcode == Opcode::read && b.readonly)) {
    return refuse_arguments();
  }
  return t.size != 0;
}

/// The next command of a read or write. False: it could not be staged.
bool Operation::stage_piece(queue::QueuePair& pair) {
  const Transfer& t = transfer_;
  const auto bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(t.size - staged_, handle_.geometry().chunk));
  const Staged staged = stage_command(handle_, pair, request_, t.opcode, t.buffer, t.buffer_offset + staged_,
                                      t.offset + staged_, staged_, bytes, t.durable ? nvme::kForceUnitAccess : 0);
  if (staged != Staged::yes) return refuse_piece(staged);
  if (pair.trace() != nullptr) [[unlikely]]
    pair.record(t.offset + staged_, bytes, submitted_, trace_flags());
  if (staged_ != 0) pair.count_continued();
  staged_ += bytes;
  request_.complete_when_idle = staged_ == t.size;
  begun_ = 0;  // waiting for room begins anew
  return true;
}

/// Of the command that was just staged, whose registration it holds.
std::uint8_t Operation::trace_flags() const {
  const auto kind = static_cast<unsigned>(transfer_.buffer.registration->kind());
  const auto route = static_cast<unsigned>(memory::Route::direct);
  return static_cast<std::uint8_t>((staged_ != 0 ? queue::kTraceContinued : 0) |
                                   (transfer_.durable ? queue::kTraceDurable : 0) | kind << queue::kTraceMemoryShift |
                                   route << queue::kTraceRouteShift);
}

bool Operation::refuse_piece(Staged staged) {
  if (staged == Staged::closing) return false;  // soon it is closed, or not
  if (staged == Staged::stale) {
    refuse(ESTALE, "the registration is closed");
    set_hint(last_error(), "register the buffer again");
  } else {
    refuse(ENXIO, "the buffer is not mapped to this device");
    set_hint(last_error(),
             "register it for this device too, or use ugds.empty() (in C uGDSHostAlloc()), whose memory every "
             "transport can reach");
  }
  stop_here();
  return false;
}

/// Under ownership, with the state checked: stages what there is room for. Whether anything was.
bool Operation::stage(queue::QueuePair& pair) {
  const Handle::Geometry& g = handle_.geometry();
  bool staged = false;
  if (has_data(transfer_.opcode)) {
    while (request_.in_flight < g.window && pair.has_room_recorded(g.lists) && stage_piece(pair)) {
      staged = true;
      if (request_.complete_when_idle) break;
    }
  } else if (pair.has_room_recorded(1)) {
    stage_other(pair);
    staged = true;
  }
  pair.ring();
  return staged;
}

/// A turn while pieces are left to stage. True: done.
bool Operation::submit() {
  if (staged_ == 0) pair_ = &handle_.choose(caller_number());
  queue::QueuePair& pair = *pair_;
  if (pair.try_acquire()) {
    bool progress = handle_.state() == State::ready && !request_.failed() && stage(pair);
    if (!progress) progress = pair.reap() != 0;
    pair.release();
    if (progress) return false;
  }
  return done() || (rest() && attend());
}

/// A turn when every piece is staged: reaps for everyone. True: done.
bool Operation::wait() {
  queue::QueuePair& pair = *pair_;
  if (pair.try_acquire()) {
    pair.reap();
    pair.release();
  }
  return done() || (rest() && attend());
}

/// Nothing to do for now. True: look at the clock and the device.
bool Operation::rest() {
  queue::Wakeup* const wakeup = pair_->wakeup();
  if (wakeup == nullptr || ++rests_ < kRests || !wakeup->armed() || pair_->load() == 0) {
    return idle_.pause(handle_.turn());
  }
  return doze(*wakeup);
}

/// Sleeps until something on the queue completes. True: nothing did, or it is time to look around all the same, for
/// what completes may always be others'.
bool Operation::doze(queue::Wakeup& wakeup) {
  bool progress = false;
  const auto ready = [&] {
    // Owners hold a queue pair for a moment only; what an interrupt told of must not be left to the next one.
    while (!pair_->try_acquire()) idle_.pause(handle_.turn());
    progress = pair_->reap() != 0 || progress;
    pair_->release();
    return done() || (progress && !request_.complete_when_idle);
  };
  wakeup.sleep(ready, kNap);
  return !progress || ticks() - looked_ > ns_to_ticks(kNap);
}

/// Flush, and the one range of a Dataset Management command.
void Operation::stage_other(queue::QueuePair& pair) {
  const Handle::Geometry& g = handle_.geometry();
  staged_ = transfer_.size;
  request_.complete_when_idle = true;
  if (transfer_.opcode == Opcode::flush) {
    pair.next() = nvme::flush(g.namespace_id);
    pair.stage(request_);
    pair.record(0, 0, submitted_, 0);
    return;
  }
  pair.next() = nvme::dataset_management(g.namespace_id, 1, nvme::kDsmDeallocate, Iova(0));
  // One range holds 32 bits of blocks; what one command cannot, the caller cut off (discard()).
  std::uint64_t* range = pair.stage_with_page(request_);
  range[0] = (transfer_.size >> g.block_shift) << 32;  // attributes 0 in the lower half
  range[1] = transfer_.offset >> g.block_shift;
  pair.record(transfer_.offset, static_cast<std::uint32_t>(std::min<std::uint64_t>(transfer_.size, ~std::uint32_t{0})),
              submitted_, 0);
}

/// Every 64th empty turn: the clock, the device, the deadline. True: done.
bool Operation::attend() {
  const std::uint64_t now = ticks();
  if (begun_ == 0) begun_ = looked_ = now;
  if (now - looked_ < ns_to_ticks(kLookInterval)) return done();
  looked_ = now;
  // An emulated device that is running answers sooner. Perhaps its thread needs this processor, or the thread that owns
  // the queue does; a real device loses less by it than it takes.
  sched_yield();
  handle_.check_controller();
  const State state = handle_.state();
  if (state == State::recovering) return done();
  if (state == State::wedged || handle_.given_up()) {
    abandon();
    return true;
  }
  // What the request has in flight is the owner's to know.
  if (!pair_->try_acquire()) return done();
  std::uint16_t cid = 0;
  const bool idle = request_.in_flight == 0;
  const std::uint64_t oldest = idle ? 0 : pair_->oldest(request_, cid);
  pair_->release();
  if (done()) return true;
  const std::uint64_t limit = ns_to_ticks(handle_.policy().deadline_ns);
  if (!idle) {
    if (now > oldest && now - oldest > limit) {
      expired_ = true;
      handle_.recover_overdue(*pair_, cid, oldest);
    }
  } else if (state != State::ready) {
    refused_ = EIO;
    stop_here();
  } else if (now - begun_ > limit) {
    // The queues were busy with others' requests for all that time.
    refuse(ETIMEDOUT, "no queue had room within the deadline");
    stop_here();
  }
  return done();
}

void Operation::abandon() {
  if (pair_ != nullptr && !done()) {
    while (!pair_->try_acquire()) idle_.pause(handle_.turn());
    if (!done()) {
      pair_->orphan(request_);
      if (refused_ == 0) refused_ = ECANCELED;
      request_.failed_at = std::min(request_.failed_at, std::uint64_t{0});
      request_.done.store(1, std::memory_order_relaxed);
    }
    pair_->release();
  }
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
    set_hint(error, "%s", state == State::lost ? handle_.device().gone().hint : "close the device and open it again");
  } else if (refused_ == 0 && expired_) {
    error.code = ETIMEDOUT;
    set_cause(error, "a command was not completed within %.3f s; it was %s, and nothing more is written",
              static_cast<double>(handle_.policy().deadline_ns) * 1e-9,
              request_.stopped ? "ended by a reset of the controller" : "aborted");
    set_hint(error, "raise the deadline if the device is merely slow");
  } else if (refused_ == 0 && request_.stopped) {
    error.code = state == State::lost ? ENODEV : ECANCELED;
    set_cause(
        error, "%s",
        state == State::lost ? handle_.why().c_str() : "the controller was reset while the request was in flight");
    set_hint(error, "%s",
             state == State::lost                                  ? handle_.device().gone().hint
             : state == State::ready || state == State::recovering ? "nothing more is written; repeat the request"
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
  const std::uint64_t interval = ns_to_ticks(kInterruptInterval);
  std::uint64_t last = ticks();
  while (!operation.turn()) {
    const std::uint64_t now = ticks();
    if (interrupt.asked == nullptr || now - last < interval) continue;
    last = now;
    if (!interrupt.asked(interrupt.context)) continue;
    operation.abandon();
    const std::int64_t result = operation.result();
    return result == -ECANCELED ? -EINTR : result;
  }
  return operation.result();
}

std::int64_t run(Handle& handle, const Transfer& transfer) {
  Operation operation(handle, transfer);
  while (!operation.turn()) {
  }
  return operation.result();
}

std::int64_t run(Handle& handle, const Transfer& transfer, const Interrupt& interrupt) {
  Operation operation(handle, transfer);
  return finish(operation, interrupt);
}

std::int64_t OneCommand::resume(Handle& handle, const Transfer& transfer, const Interrupt& interrupt) {
  Operation operation(handle, transfer, *pair_, request_);
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
  const std::uint64_t most = std::uint64_t{0x80000000u} << handle.geometry().block_shift;
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
