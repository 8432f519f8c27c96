// SPDX-License-Identifier: Apache-2.0
#include "engine/stream_worker.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "base/clock.hpp"
#include "base/steps.hpp"

namespace ugds::engine {

using nvme::Opcode;

namespace {

/// After the last operation it is worth polling for the next one this long, longer in a mode that polls; and as long
/// for a stream to arrive.
constexpr std::uint64_t kLinger = 100'000, kLingerLong = 1'000'000, kPollForArrival = 60'000;
/// Then it sleeps, and looks again after this long; the longer it has waited, the later.
constexpr long kShortestNap = 30'000, kLongestNap = 1'000'000;
constexpr std::uint64_t kPieceMask = 7;
static_assert(StreamPlan::kMostOpen <= kPieceMask + 1 && alignof(StreamOp) > kPieceMask);

/// One request, as a batch asks for it.
struct One {
  static constexpr bool kOffsetsTell = true;
  const Transfer* t;
  std::uint64_t cookie;
  const memory::Reference& begin_run(std::size_t) const { return t->buffer; }
  const memory::Reference& buffer() const { return t->buffer; }
  bool same_buffer(std::size_t) const { return true; }
  Wanted operator()(std::size_t) const {
    return {t->offset, t->size, t->buffer_offset, cookie, t->opcode == Opcode::write ? 1u : 0u, t->durable};
  }
};

void futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, &word, operation | FUTEX_PRIVATE_FLAG, value, timeout, nullptr, 0);
}

}  // namespace

StreamWorker::StreamWorker(Handle& handle) : handle_(handle) {
  setup_step("stream: worker");
  ledger_.set_whose("pending on streams of " + handle.uri());
  memory::Registry::instance().add_ledger(ledger_);
  try {
    batch_id_ = handle.open_batch(kInFlight, Priority::unsaid);
    batch_ = handle.batch(batch_id_.slot);
    // Signals are for the program's threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      ugds::fail(error.code().value(), "stream", "no thread for the I/O of streams", "raise the limit of threads");
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  } catch (...) {
    if (batch_ != nullptr) handle.close_batch(batch_id_);
    memory::Registry::instance().remove_ledger(ledger_);
    throw;
  }
}

StreamWorker::~StreamWorker() {
  quit_.store(true, std::memory_order_seq_cst);
  wake();
  thread_.join();
  memory::Registry::instance().remove_ledger(ledger_);
}

void StreamWorker::join(Stream& stream) {
  const std::uint64_t mine = std::uint64_t{1} << handle_.geometry().number;
  if ((stream.workers_.load(std::memory_order_acquire) & mine) != 0) return;
  const std::lock_guard guard(streams_lock_);
  const std::uint32_t count = stream_count_.load(std::memory_order_relaxed);
  bool known = false;
  for (std::uint32_t i = 0; i < count && !known; ++i) known = streams_[i].load(std::memory_order_relaxed) == &stream;
  if (!known) {
    if (count == kMostStreams)
      ugds::fail(EMFILE, "stream", "1024 streams use the device, which is the most", "use fewer, and reuse them");
    streams_[count].store(&stream, std::memory_order_relaxed);
    stream_count_.store(count + 1, std::memory_order_release);
  }
  stream.workers_.fetch_or(mine, std::memory_order_release);
}

void StreamWorker::wake() {
  if (asleep_.exchange(0, std::memory_order_seq_cst) != 0) futex(asleep_, FUTEX_WAKE, 1, nullptr);
}

void StreamWorker::run() {
  prctl(PR_SET_NAME, "ugds-streams");
  prctl(PR_SET_TIMERSLACK, 1000);
  while (!quit_.load(std::memory_order_acquire)) {
    bool moved = false;
    const std::uint32_t count = stream_count_.load(std::memory_order_acquire);
    for (std::uint32_t i = 0; i < count; ++i) moved = attend(*streams_[i].load(std::memory_order_relaxed)) || moved;
    if (flying_ != 0) {
      const std::int64_t ended =
          batch_->collect(batch_id_.generation, 0, kInFlight, 0, {}, [this](const Done& done) { take(done); });
      moved = moved || ended > 0;
    }
    if (moved) {
      resting_since_ = 0;
    } else {
      rest();
    }
  }
  let_all_through();
}

/// Nothing moved.
void StreamWorker::rest() {
  const bool waits_for_device = flying_ != 0;
  const bool asks = idle_.pause(waits_for_device ? handle_.turn() : Turn());
  const std::uint64_t now = ticks();
  if (resting_since_ == 0) resting_since_ = now;
  const std::uint64_t rested = ticks_to_ns(now - resting_since_);
  if (waits_for_device) {
    // A mode that would sleep for a large request sleeps here too; the device's interrupts end that.
    if (asks && rested > kLinger && handle_.interrupts() && handle_.scheduler().waiting().sleeps(StreamPlan::kMuch)) {
      batch_->collect(batch_id_.generation, 1, kInFlight, kShortestNap, {}, [this](const Done& done) { take(done); });
    }
    return;
  }
  if (pending_.load(std::memory_order_acquire) != 0) {
    if (rested < kPollForArrival) return;
    const timespec time{0, std::min(kLongestNap, kShortestNap + static_cast<long>(rested / 16))};
    nanosleep(&time, nullptr);
    return;
  }
  if (rested < (handle_.scheduler().waiting().polls(StreamPlan::kMuch) ? kLingerLong : kLinger)) return;
  asleep_.store(1, std::memory_order_seq_cst);
  if (pending_.load(std::memory_order_seq_cst) == 0 && !quit_.load(std::memory_order_seq_cst)) {
    futex(asleep_, FUTEX_WAIT, 1, nullptr);
  }
  asleep_.store(0, std::memory_order_seq_cst);
  resting_since_ = 0;
}

/// The operation at the stream's front, where it is ours. True: something moved.
bool StreamWorker::attend(Stream& stream) {
  const std::uint64_t front = stream.front_.load(std::memory_order_acquire);
  if (front == stream.tail_.load(std::memory_order_acquire)) return false;
  StreamOp& op = stream.op(front);
  if (op.worker.load(std::memory_order_acquire) != this) return false;
  const std::uint64_t reached = stream.reached_.host->load(std::memory_order_acquire);
  bool moved = false;
  if (!op.broken && !op.completed && op.enqueued.load(std::memory_order_acquire) == StreamOp::Enqueued::broken) {
    op.broken = true;
    if (op.result != nullptr) op.result->copied_ = nullptr;
    fail(op, *op.refusal);
  }
  if (!op.started) {
    if (!op.broken && !is_at(reached, op.reached + 1)) return false;
    moved = begin(stream, op);
  }
  if (!op.completed) moved = give(stream, op, reached) || moved;
  if (!op.completed) moved = progress(stream, op) || moved;
  const bool passed = !op.broken && is_at(reached, op.last_reached());
  if (op.completed && (op.broken || passed)) {
    stream.retire(op, front, passed);
    moved = true;
  }
  return moved;
}

/// The stream has come to it: what is bound late is read now, and everything is checked.
bool StreamWorker::begin(Stream& stream, StreamOp& op) {
  op.started = true;
  if (op.broken) {
    // The stream may not be there yet, and what came before may still use what it replaced.
    if (op.replaced) Staging::of(stream.runtime()).give_up(op.replaced, stream.reached_.host, op.reached);
    op.replaced = {};
    fail(op, *op.refusal);
    if (op.orders != 0) write_orders(stream, op);
    return true;
  }
  if (op.replaced) {
    // Whatever came before on this stream is through.
    Staging::of(stream.runtime()).give_back(op.replaced);
    op.replaced = {};
  }
  bind(stream, op);
  if (op.orders != 0) write_orders(stream, op);
  if (op.allowed_lead() != 0) stream.allowed_.host->store(op.allowed + 1, std::memory_order_release);
  return true;
}

/// Where a late offset is on the device. One that would lie in another file is beyond every device.
std::uint64_t StreamWorker::placed(const Late& values, std::uint64_t offset, std::uint64_t size) const {
  const std::uint64_t mask = handle_.device().limits().position_mask;
  if (offset > mask || (size != 0 && size - 1 > mask - offset)) return ~handle_.geometry().block_mask;
  return values.place + offset;
}

void StreamWorker::bind(Stream& stream, StreamOp& op) {
  Error error;
  if (op.values) {
    Transfer& t = stream.part(op.first_part).transfer;
    const std::uint64_t most = t.size;
    const auto value = [](const std::int64_t* at, std::uint64_t otherwise) {
      return at == nullptr ? otherwise : static_cast<std::uint64_t>(__atomic_load_n(at, __ATOMIC_ACQUIRE));
    };
    t.size = value(op.values.size, t.size);
    if (op.values.offset != nullptr) t.offset = placed(op.values, value(op.values.offset, 0), t.size);
    const std::uint64_t in_buffer = value(op.values.buffer_offset, t.buffer_offset);
    // By itself: added to a base, a negative one would lie in the registration, and not in what was named.
    t.buffer_offset = static_cast<std::int64_t>(in_buffer) < 0 ? in_buffer : op.values.base + in_buffer;
    if (t.size > most) {
      error.code = EINVAL;
      set_transfer(error, handle_, t);
      set_cause(error, "the size has become larger than it was when the request was submitted");
      set_hint(error, "submit with the largest size that it may have");
    }
  }
  for (std::uint32_t i = 0; i < op.parts && error.code == 0; ++i) {
    const Transfer& t = stream.part(op.first_part + i).transfer;
    const Refusal refusal = check_transfer(handle_.geometry(), t);
    if (refusal == Refusal::none) continue;
    set_refusal(error, handle_, t, refusal);
    set_transfer(error, handle_, t);
  }
  if (error.code != 0) fail(op, error);
}

/// What the copy kernel is to do, piece by piece. Nothing for what failed before it began: where it would copy to is
/// not known to be right.
void StreamWorker::write_orders(Stream& stream, StreamOp& op) {
  auto* order = reinterpret_cast<gpu::CopyOrder*>(stream.orders_.data);
  if (op.by_pieces) {
    const Transfer& t = stream.part(op.first_part).transfer;
    *order = {op.area.device, t.buffer.address + t.buffer_offset, op.failed ? 0 : t.size};
    return;
  }
  StreamOp::Cursor cursor;
  for (std::uint32_t i = 0; i < op.plan.count; ++i) {
    const StreamPlan::Piece piece = op.plan.piece(i);
    Stream::Fragment fragment;
    bool any = false;
    while (stream.next(op, piece, cursor, fragment)) {
      any = true;
      const gpu::Address mine = op.area.device + fragment.at, theirs = fragment.gpu();
      const bool reads = op.opcode == Opcode::read;
      *order++ = {reads ? mine : theirs, reads ? theirs : mine, op.failed ? 0 : fragment.bytes};
    }
    if (!any) *order++ = {};
  }
}

void StreamWorker::fail(StreamOp& op, const Error& error) {
  if (op.failed) return;
  op.failed = true;
  op.bad_from = 0;
  *op.error = error;
}

/// The device's part, as far as places are free. True: something was given to it.
bool StreamWorker::give(Stream& stream, StreamOp& op, std::uint64_t reached) {
  if (op.failed) return false;
  if (!op.staged) return op.begun == 0 && give_parts(stream, op);
  bool moved = false;
  while (op.begun < op.plan.count) {
    const StreamPlan::Piece piece = op.plan.piece(op.begun);
    const bool reads = op.opcode == Opcode::read;
    // A read needs a free place; a write needs its bytes there, and the stream has waited for the place.
    const std::uint64_t needs = op.reached + op.reached_lead() + (reads ? piece.needs : op.begun + 1);
    if (!is_at(reached, needs) || op.begun >= op.ended + op.plan.most_open) break;
    if (!give_piece(stream, op)) return true;
    moved = true;
  }
  return moved;
}

bool StreamWorker::submit(const Transfer& t, StreamOp& op, std::uint32_t piece) {
  if (t.size == 0) return true;
  const std::uint64_t cookie = reinterpret_cast<std::uintptr_t>(&op) | (piece & kPieceMask);
  const std::int64_t taken =
      batch_->submit(batch_id_.generation, 1, false, One{&t, cookie}, [](std::size_t) { return false; });
  if (taken != 1) return false;
  ++op.open[piece & kPieceMask];
  ++op.flying;
  ++flying_;
  return true;
}

/// False: the batch is full; the rest is given when something of it has ended.
bool StreamWorker::give_parts(Stream& stream, StreamOp& op) {
  bool moved = false;
  for (; op.given.part < op.parts; ++op.given.part) {
    if (!submit(stream.part(op.first_part + op.given.part).transfer, op, 0)) return moved;
    moved = true;
  }
  op.begun = 1;
  return true;
}

bool StreamWorker::give_piece(Stream& stream, StreamOp& op) {
  const StreamPlan::Piece piece = op.plan.piece(op.begun);
  Stream::Fragment fragment;
  for (StreamOp::Cursor cursor = op.given; stream.next(op, piece, cursor, fragment); op.given = cursor) {
    Transfer t = *fragment.transfer;
    t.buffer = op.area.slab;
    t.buffer_offset = op.area.offset + fragment.at;
    t.offset += fragment.in_transfer;
    t.size = fragment.bytes;
    // Beyond the end of a file nothing is read, and all of the piece is copied: zeros, and nothing that was here
    // before.
    if (handle_.geometry().bytewise && op.opcode == Opcode::read && t.offset + t.size > handle_.end_at(t.offset))
      std::memset(op.area.data + fragment.at, 0, t.size);
    if (!submit(t, op, op.begun)) return false;
  }
  ++op.begun;
  return true;
}

/// Something at the device has ended.
void StreamWorker::take(const Done& done) {
  auto& op = *reinterpret_cast<StreamOp*>(done.cookie & ~kPieceMask);
  const auto slot = static_cast<std::uint32_t>(done.cookie & kPieceMask);
  --op.open[slot];
  --op.flying;
  --flying_;
  if (op.staged)
    handle_.count_staged(done.error == nullptr ? static_cast<std::uint64_t>(done.result) : done.error->completed);
  if (done.error == nullptr) {
    op.moved += static_cast<std::uint64_t>(done.result);
    return;
  }
  // Of several the one that comes first on the device: before it everything is right.
  op.bad_from = std::min(op.bad_from, op.ended + ((slot - op.ended) & static_cast<std::uint32_t>(kPieceMask)));
  if (!op.failed || done.error->offset < op.error->offset) *op.error = *done.error;
  op.failed = true;
}

/// Lets the stream go on as far as pieces are through the device. True: something moved.
bool StreamWorker::progress(Stream& stream, StreamOp& op) {
  bool moved = false;
  if (op.failed) {
    // Nothing more is given. What is in flight still writes to our memory, or the caller's.
    if (op.flying != 0) return false;
    op.begun = op.pieces();
    // Of one that is broken no place is waited for: all of it is poisoned before the stream is let on.
    if (op.broken && op.ended == 0 && op.staged && op.opcode == Opcode::read)
      std::fill_n(op.area.data, std::min(op.area.size, op.plan.total), kPoison);
  }
  while (op.ended < op.begun && op.open[op.ended & kPieceMask] == 0) {
    if (op.ended >= op.bad_from && op.staged && op.opcode == Opcode::read && !op.broken) {
      const StreamPlan::Piece piece = op.plan.piece(op.ended);
      // Its place may hold a piece that is right and not yet copied.
      const std::uint64_t reached = stream.reached_.host->load(std::memory_order_acquire);
      if (!is_at(reached, op.reached + 1 + piece.needs)) return moved;
      poison(stream, op, op.ended);
    }
    ++op.ended;
    moved = true;
    if (op.ended == op.pieces()) break;
    stream.allowed_.host->store(op.allowed + op.allowed_lead() + op.ended, std::memory_order_release);
  }
  if (op.ended != op.pieces()) return moved;
  if (!is_enqueued(op)) return moved;
  complete(stream, op);
  return moved;
}

/// Whether all of it is, as far as is known. It may have begun before, and what it holds is let go of when all is well.
/// But a launch may return only when the kernel has ended, as it does under checkers: then it is let go of now.
bool StreamWorker::is_enqueued(StreamOp& op) {
  constexpr std::uint64_t kPatience = 20'000'000;
  auto enqueued = op.enqueued.load(std::memory_order_acquire);
  if (enqueued != StreamOp::Enqueued::no) return enqueued != StreamOp::Enqueued::broken || op.broken;
  const std::uint64_t now = ticks();
  if (op.ended_at == 0) op.ended_at = now;
  if (now - op.ended_at < ns_to_ticks(kPatience)) return false;
  return op.enqueued.compare_exchange_strong(enqueued, StreamOp::Enqueued::assumed);
}

/// How much of a read that failed is told to be right.
std::uint64_t StreamWorker::right_bytes(Stream& stream, const StreamOp& op) {
  const Transfer& t = stream.part(op.first_part).transfer;
  if (op.parts != 1 || op.error->offset < t.offset) return 0;
  const std::uint64_t right = op.error->offset - t.offset + op.error->completed;
  return right <= t.size ? right : 0;
}

/// The stream copies the piece whatever became of it: what nobody is to take for data. What is told to be right is
/// left.
void StreamWorker::poison(Stream& stream, StreamOp& op, std::uint32_t number) {
  const StreamPlan::Piece piece = op.plan.piece(number);
  const std::uint64_t kept = std::clamp(right_bytes(stream, op), piece.begin, piece.begin + piece.bytes) - piece.begin;
  std::fill_n(op.area.data + piece.at + kept, piece.bytes - kept, kPoison);
}

/// The same where the device reads into the GPU's memory itself. What never went to the device has changed nothing.
/// False: it could not be.
bool StreamWorker::poison_direct(Stream& stream, StreamOp& op) {
  if (op.broken || op.given.part == 0) return true;
  const std::uint64_t right = right_bytes(stream, op);
  Poison::Fill fill(Poison::of(stream.runtime()), stream.place());
  for (std::uint32_t i = 0; i < op.parts; ++i) {
    const Transfer& t = stream.part(op.first_part + i).transfer;
    if (t.opcode != Opcode::read || t.buffer.registration->gpu() == nullptr) continue;
    fill.add(t.buffer.address + t.buffer_offset + right, t.size - right);
  }
  if (fill.end()) return true;
  set_hint(*op.error, "the memory could not be filled with 0xdb either: its old bytes may be there");
  return false;
}

/// A read failed, and its stream goes on.
void StreamWorker::tell_poison(const StreamOp& op, bool marked) {
  if (!handle_.events().admit()) return;
  Event event;
  event.name = "poison";
  event.numerous = true;
  event.operation = "read";
  event.action = marked ? "what was not read holds 0xdb, and the stream goes on"
                        : "the memory could not be marked: its old bytes may be there; the stream goes on";
  event.remedy = "look at the request's result or status word before its memory is used";
  set_detail(event, "%s", op.error->cause);
  handle_.events().tell(event);
}

/// All of it is through the device. What became of it is told before the stream goes on.
void StreamWorker::complete(Stream& stream, StreamOp& op) {
  op.completed = true;
  if (op.failed && op.parts != 0) explain(stream, op);
  const bool marked = !op.failed || op.staged || poison_direct(stream, op);
  if (op.failed && op.opcode == Opcode::read) tell_poison(op, marked);
  std::int64_t bytes = 0;
  for (std::uint32_t i = 0; i < op.parts; ++i) {
    bytes += static_cast<std::int64_t>(stream.part(op.first_part + i).transfer.size);
  }
  if (handle_.geometry().bytewise) bytes = static_cast<std::int64_t>(op.moved);
  if (op.staged && op.failed && (op.broken || handle_.state() == State::wedged)) {
    // The stream's copies may be still to come, or the device may still write to the area.
    stream.area_is_lost_.store(true, std::memory_order_release);
  }
  // The last operation tells of all that was submitted with it.
  if (op.first) {
    stream.call_bytes_ = 0;
    stream.call_error_ = 0;
  }
  stream.call_bytes_ += bytes;
  if (op.failed && stream.call_error_ == 0) stream.call_error_ = op.error->code;
  const int code = stream.call_error_;
  if (op.told != nullptr) __atomic_store_n(op.told, code != 0 ? -code : stream.call_bytes_, __ATOMIC_RELEASE);
  if (op.has_status) stream.status_.host->store(static_cast<unsigned>(code));
  if (!op.failed) {
    counters_.bytes.fetch_add(static_cast<std::uint64_t>(bytes), std::memory_order_relaxed);
    if (op.result != nullptr) op.result->bytes_ += bytes;
  } else {
    stream.keep_error(op.result, *op.error);
  }
  if (op.result != nullptr) op.result->left_.fetch_sub(1, std::memory_order_acq_rel);
  stream.allowed_.host->store(op.last_allowed(), std::memory_order_release);
}

/// The error of a part of it, told of the whole.
void StreamWorker::explain(Stream& stream, StreamOp& op) {
  const Transfer& t = stream.part(op.first_part).transfer;
  const std::uint64_t part = op.error->offset - t.offset;
  if (op.parts != 1) {
    // Among several, how far one came says nothing that can be used.
    op.error->completed = 0;
    return;
  }
  if (part > t.size) return;
  op.error->completed += part;
  op.error->offset = t.offset;
  op.error->length = t.size;
}

/// The handle is being closed. Streams that wait for it go on, with an error.
void StreamWorker::let_all_through() {
  handle_.close_batch(batch_id_);
  Error error;
  error.code = ECANCELED;
  error.operation = "stream";
  set_device(error, handle_.uri().c_str());
  set_cause(error, "the device was closed before the stream's request was done");
  set_hint(error, "synchronise the stream before the device is closed");
  const std::uint32_t count = stream_count_.load(std::memory_order_acquire);
  const std::uint64_t mine = std::uint64_t{1} << handle_.geometry().number;
  for (std::uint32_t i = 0; i < count; ++i) {
    Stream& stream = *streams_[i].load(std::memory_order_relaxed);
    stream.orphan(*this, error);
    stream.workers_.fetch_and(~mine, std::memory_order_release);
  }
}

}  // namespace ugds::engine
