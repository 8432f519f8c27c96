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

/// No more pieces, for a reason of ours, at `staged_`.
void Operation::refuse(Refusal refusal) {
  refusal_ = refusal;
  if (staged_ < request_.failed_at) request_.failed_at = staged_;
  request_.on_idle = queue::OnIdle::done;
  if (request_.in_flight == 0) request_.done.store(1, std::memory_order_relaxed);
}

/// False: there is nothing to do, or it cannot be done.
bool Operation::check() {
  const Refusal refusal = check_transfer(handle_.geometry(), transfer_);
  if (refusal != Refusal::none) [[unlikely]] {
    refuse(refusal);
    return false;
  }
  const Scheduler& scheduler = handle_.scheduler();
  background_ =
      transfer_.priority == Priority::background ||
      (transfer_.priority == Priority::unsaid && transfer_.opcode == Opcode::write && scheduler.background_writes());
  paced_ = has_data(transfer_.opcode) && (background_ || transfer_.size > kSmall);
  choose_way();
  if (transfer_.opcode == Opcode::flush) mark_ = handle_.durability().begin(handle_.written());
  return transfer_.size != 0 || transfer_.opcode == Opcode::flush;
}

/// Whether to poll or to sleep.
void Operation::choose_way() {
  if (!handle_.interrupts()) return;
  Waiting& waiting = handle_.scheduler().waiting();
  sleeps_ = waiting.sleeps(transfer_.size);
  learns_ = waiting.learns();
  if (learns_) born_ = ticks();
}

/// The next command of a read or write. False: it could not be staged.
bool Operation::stage_piece(queue::QueuePair& pair, std::uint64_t now) {
  const Transfer& t = transfer_;
  Scheduler& scheduler = handle_.scheduler();
  const bool vectored = !t.segments.empty();
  while (vectored && in_segment_ == t.segments[segment_].size) in_segment_ = 0, ++segment_;
  const memory::Reference& buffer = vectored ? t.segments[segment_].buffer : t.buffer;
  const std::uint64_t in_buffer =
      vectored ? t.segments[segment_].buffer_offset + in_segment_ : t.buffer_offset + staged_;
  const std::uint64_t left = vectored ? t.segments[segment_].size - in_segment_ : t.size - staged_;
  const std::uint32_t chunk = handle_.geometry().chunk;
  std::uint32_t bytes = paced_ ? scheduler.piece(chunk, background_) : chunk;
  bytes = left <= bytes ? static_cast<std::uint32_t>(left) : handle_.geometry().cut(t.offset + staged_, bytes);
  if (paced_ && !scheduler.pacer().take(bytes, background_, request_.in_flight == 0, waits_since_)) return false;
  const std::uint8_t extra = extra_of(paced_, background_, t.durable && t.opcode == Opcode::write);
  const Staged staged = stage_command(handle_, pair, request_, t.opcode, buffer, in_buffer, t.offset + staged_, staged_,
                                      bytes, t.durable ? nvme::kForceUnitAccess : 0, extra, now);
  if (staged != Staged::yes) {
    if (paced_) scheduler.pacer().put_back(bytes, background_);
    return refuse_piece(staged);
  }
  record_command(pair, buffer, t.offset + staged_, staged_, bytes, t.durable, submitted_);
  staged_ += bytes;
  in_segment_ += bytes;
  if (staged_ == t.size) end_staging();
  begun_ = 0;  // waiting for room begins anew
  return true;
}

bool Operation::refuse_piece(Staged staged) {
  if (staged == Staged::closing) return false;  // soon it is closed, or not
  refuse(staged == Staged::stale ? Refusal::stale : Refusal::unmapped);
  return false;
}

/// Under ownership, with the state checked: stages what there is room for. Whether anything was.
bool Operation::stage(queue::QueuePair& pair) {
  bool staged = false;
  if (has_data(transfer_.opcode)) {
    staged = stage_pieces(pair);
  } else if (pair.has_room(1, place_)) {
    stage_other(pair);
    staged = true;
  }
  pair.ring();
  queue_up(pair, staged);
  return staged;
}

bool Operation::stage_pieces(queue::QueuePair& pair) {
  const std::uint32_t lists = handle_.geometry().lists;
  const std::uint32_t window = std::min(handle_.scheduler().window(), std::max(1u, (pair.depth() - 1) / 2));
  // The last quarter of the ring is for small requests, and for the one command that any request may have.
  const std::uint32_t most = paced_ ? pair.depth() - 1 - pair.depth() / 4 : pair.depth();
  const std::uint64_t now = ticks();
  bool staged = false;
  while (request_.in_flight < window && pair.has_room(lists, place_) &&
         (request_.in_flight == 0 || pair.load() < most) && stage_piece(pair, now)) {
    staged = true;
    if (all_staged_) break;
  }
  return staged;
}

/// What found no room waits for it in turn. What had its turn, or waits for something else, does not stand in the way.
void Operation::queue_up(queue::QueuePair& pair, bool staged) {
  const bool waits =
      !staged && request_.in_flight == 0 && !request_.failed() && !pair.has_room(handle_.geometry().lists, place_);
  if (waits) {
    pair.join_line(place_);
    pair.pass_in_line(ticks());
  } else if (place_.taken) {
    pair.leave_line(place_);
  }
}

/// A turn while pieces are left to stage. True: done.
bool Operation::submit() {
  if (staged_ == 0 && !place_.taken && !pinned_) pair_ = &handle_.choose(caller_number());
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
  if (!sleeps_ || wakeup == nullptr || ++rests_ < kRests || !wakeup->armed() || pair_->load() == 0) {
    return idle_.pause(handle_.turn());
  }
  return doze(*wakeup);
}

/// Sleeps until something on the queue completes. True: nothing did, or it is time to look around all the same, for
/// what completes may always be others'.
bool Operation::doze(queue::Wakeup& wakeup) {
  bool progress = false;
  const auto ready = [&] {
    handle_.turn().take();
    // Owners hold a queue pair for a moment only; what an interrupt told of must not be left to the next one.
    while (!pair_->try_acquire()) idle_.pause(handle_.turn());
    progress = pair_->reap() != 0 || progress;
    pair_->release();
    return done() || (progress && !all_staged_);
  };
  wakeup.sleep(ready, kNap);
  handle_.scheduler().attend(ticks());
  return !progress || ticks() - looked_ > ns_to_ticks(kNap);
}

/// Flush, and the one range of a Dataset Management command.
void Operation::stage_other(queue::QueuePair& pair) {
  const Handle::Geometry& g = handle_.geometry();
  staged_ = transfer_.size;
  end_staging();
  handle_.scheduler().pacer().pass();
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
  handle_.scheduler().attend(now);
  if (paced_ && !all_staged_) handle_.reap_all();
  const State state = handle_.state();
  if (state == State::recovering) {
    begun_ = now;  // who waits for a reset has not waited for room
    return done();
  }
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
      request_.expired = true;
      handle_.recover_overdue(*pair_, cid, oldest);
    }
  } else if (state != State::ready) {
    refuse(Refusal::not_ready);
  } else if (now - begun_ > limit) {
    refuse(Refusal::no_room);  // the queues were busy with others' requests for all that time
  }
  return done();
}

/// It has ended, and not well. True: a reset ended it, and what is not right of it is submitted again.
bool Operation::again() {
  const State state = handle_.state();
  if (!request_.stopped || refusal_ != Refusal::none || retries_ >= handle_.retries() || !has_data(transfer_.opcode) ||
      handle_.given_up() || (state != State::ready && state != State::recovering))
    return false;
  ++retries_;
  while (!pair_->try_acquire()) idle_.pause(handle_.turn());
  pair_->count_retry();
  pair_->release();
  // Before what failed everything is right.
  staged_ = request_.failed_at;
  segment_ = 0;
  in_segment_ = transfer_.segments.empty() ? 0 : staged_;
  while (!transfer_.segments.empty() && in_segment_ > transfer_.segments[segment_].size)
    in_segment_ -= transfer_.segments[segment_++].size;
  request_.failed_at = queue::kNoFailure;
  request_.stopped = request_.expired = false;
  request_.status = 0;
  request_.on_idle = queue::OnIdle::wait;
  all_staged_ = false;
  begun_ = waits_since_ = 0;
  request_.done.store(0, std::memory_order_relaxed);
  return true;
}

void Operation::abandon() {
  if (pair_ != nullptr && (!done() || place_.taken)) {
    while (!pair_->try_acquire()) idle_.pause(handle_.turn());
    if (!done()) {
      pair_->orphan(request_);
      if (refusal_ == Refusal::none) refusal_ = Refusal::interrupted;
      request_.failed_at = std::min(request_.failed_at, std::uint64_t{0});
      request_.done.store(1, std::memory_order_relaxed);
    }
    pair_->leave_line(place_);
    pair_->release();
  } else if (!done()) {
    refuse(Refusal::interrupted);
  }
}

/// A flush that succeeded promises more than its own command where a reset came between: see Durability.
void Operation::settle_flush() {
  if (request_.failed() && !request_.stopped) return;  // another reason is told
  const bool in_doubt = handle_.durability().end(mark_, !request_.failed());
  if (in_doubt && !request_.failed()) refuse(Refusal::in_doubt);
}

std::int64_t Operation::explain() {
  if (const auto bytes = end_of_file(handle_, request_, refusal_)) return static_cast<std::int64_t>(*bytes);
  last_error() = describe(handle_, transfer_, request_, refusal_, retries_);
  return -last_error().code;
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
