// SPDX-License-Identifier: Apache-2.0
#include "engine/stream.hpp"

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <new>
#include <unordered_map>
#include <utility>

#include "engine/stream_worker.hpp"

namespace ugds::engine {

namespace {

constexpr std::size_t kMostErrors = 64;

std::uintptr_t number_of(gpu::StreamHandle handle) { return reinterpret_cast<std::uintptr_t>(handle); }
/// The legacy default stream has two names.
std::uintptr_t name_of(gpu::StreamHandle handle) { return number_of(handle) == 1 ? 0 : number_of(handle); }

/// Every stream that was ever used, by its name: that of a default stream is one for each GPU and runtime. One stays
/// known: a word that a stream may still write is never given away.
struct Known {
  std::mutex lock;
  std::unordered_multimap<std::uintptr_t, Stream*> streams;
};
Known& known() {
  static auto* all = new Known;  // NOLINT: the threads of handles may look at streams until the very end
  return *all;
}

}  // namespace

void Stream::open(gpu::Runtime& runtime, gpu::StreamHandle handle, const gpu::Place& place) {
  runtime_ = &runtime;
  handle_ = handle;
  place_ = place;
  caller_ = number_of(handle) == 2 ? caller_number() : 0;
  ops_ = std::make_unique<StreamOp[]>(kOps);
  op_errors_ = std::make_unique<Error[]>(std::size_t{2} * kOps);
  for (std::uint32_t i = 0; i < kOps; ++i) {
    ops_[i].error = &op_errors_[2 * i];
    ops_[i].refusal = &op_errors_[2 * i + 1];
  }
  parts_.reset(new Part[kParts]);  // NOLINT: without touching it
  holds_ = std::make_unique<Hold[]>(kHolds);
  errors_.reserve(kMostErrors);
  reached_ = runtime.make_word();
  allowed_ = runtime.make_word();
  status_ = runtime.make_word();
  try {
    runtime.load_kernels(place);
    has_kernels_ = true;
    if (runtime.has_words(place.device)) Poison::of(runtime).prepare();
  } catch (const Failure& failure) {
    // Without them, what needs one is refused.
    if (failure.error().code != EOPNOTSUPP) throw;
    why_no_kernels_ = failure.error().cause;
  }
}

void Stream::free_words() {
  for (const gpu::Word& word : {reached_, allowed_, status_}) {
    if (word.host != nullptr) runtime_->free_word(word);
  }
}

std::vector<Stream*> Stream::named(gpu::StreamHandle handle) {
  Known& all = known();
  const std::lock_guard guard(all.lock);
  std::vector<Stream*> found;
  const auto [first, last] = all.streams.equal_range(name_of(handle));
  for (auto at = first; at != last; ++at) {
    if (at->second->is_callers()) found.push_back(at->second);
  }
  return found;
}

/// Under the lock of those that are known. `anywhere`: at any place, where the handle is not of a default stream.
Stream* Stream::find(const gpu::Runtime& runtime, gpu::StreamHandle handle, const gpu::Place& place, bool anywhere) {
  const auto [first, last] = known().streams.equal_range(name_of(handle));
  for (auto at = first; at != last; ++at) {
    Stream& stream = *at->second;
    if (stream.runtime_ != &runtime || !stream.is_callers()) continue;
    if ((anywhere && number_of(handle) > 2) || stream.place_ == place) return &stream;
  }
  return nullptr;
}

/// The default stream of a thread is another for each, by one name.
bool Stream::is_callers() const { return number_of(handle_) != 2 || caller_ == caller_number(); }

bool Stream::any() {
  Known& all = known();
  const std::lock_guard guard(all.lock);
  return !all.streams.empty();
}

Stream& Stream::of(gpu::Runtime& runtime, gpu::StreamHandle handle, const gpu::Place& memory) {
  if (number_of(handle) == 1) handle = nullptr;
  Known& all = known();
  // Where it is by now: its handle may have been another stream's, which was destroyed.
  gpu::Place place = runtime.place_of_stream(handle, {-1, memory.context});
  const bool is_told = place.device >= 0;
  if (!is_told) place = memory;
  {
    const std::lock_guard guard(all.lock);
    if (Stream* found = find(runtime, handle, place, !is_told)) return *found;
  }
  auto made = std::make_unique<Stream>();
  try {
    made->open(runtime, handle, place);
  } catch (...) {
    made->free_words();
    throw;
  }
  const std::lock_guard guard(all.lock);
  // Another thread may have been faster: one stream has one order.
  Stream* const found = find(runtime, handle, place, !is_told);
  const bool is_full = all.streams.size() == StreamWorker::kMostStreams;
  if (found != nullptr || is_full) made->free_words();
  if (found != nullptr) return *found;
  if (is_full)
    fail(EMFILE, "stream", "1024 streams were used in this process, which is the most", "use fewer, and reuse them");
  all.streams.emplace(name_of(handle), made.get());
  return *made.release();
}

bool Stream::next(const StreamOp& op, const StreamPlan::Piece& piece, StreamOp::Cursor& cursor, Fragment& fragment) {
  while (cursor.part < op.parts) {
    const Part& p = part(op.first_part + cursor.part);
    const std::uint64_t left = p.transfer.size - std::min(p.transfer.size, cursor.in_part);
    const std::uint64_t at = p.begin + cursor.in_part;
    if (left == 0) {
      ++cursor.part;
      cursor.in_part = 0;
      continue;
    }
    if (at >= piece.begin + piece.bytes) return false;
    fragment = {&p.transfer, cursor.in_part, std::min(left, piece.begin + piece.bytes - at),
                piece.at + (at - piece.begin)};
    cursor.in_part += fragment.bytes;
    return true;
  }
  return false;
}

const Error& StreamResult::error() const {
  static const Error none;
  static const Error lost = [] {
    Error error;
    error.code = EIO;
    error.operation = "stream";
    set_cause(error, "the request failed, and there was no memory to keep why");
    set_hint(error, "free memory, and submit it again");
    return error;
  }();
  if (!failed_) return none;
  return error_ != nullptr ? *error_ : lost;
}

void Stream::drop_holds(const StreamOp& op, memory::Ledger& ledger) {
  for (std::uint32_t i = 0; i < op.parts; ++i) {
    ledger.remove_shared(part(op.first_part + i).transfer.buffer.registration->index());
  }
}

/// It has ended: the next one's turn.
void Stream::retire(StreamOp& op, std::uint64_t number, bool passed) {
  StreamWorker* const worker = op.worker.load(std::memory_order_relaxed);
  if (worker != nullptr) drop_holds(op, worker->ledger());
  if (op.result != nullptr) op.result->release();
  holds_to_come_ += op.holds;
  if (passed) holds_pending_.fetch_sub(std::exchange(holds_to_come_, 0), std::memory_order_relaxed);
  parts_pending_.fetch_sub(op.parts, std::memory_order_relaxed);
  if (op.waits && waits_.fetch_sub(1, std::memory_order_acq_rel) == 1) waiting_streams(*runtime_).fetch_sub(1);
  front_.store(number + 1, std::memory_order_seq_cst);
  if (worker != nullptr) worker->pending_.fetch_sub(1, std::memory_order_acq_rel);
  let_orphans_through(number + 1);
}

std::atomic<std::uint32_t>& Stream::waiting_streams(const gpu::Runtime& runtime) {
  static std::atomic<std::uint32_t> waiting[2];
  return waiting[runtime.backend() == gpu::Backend::cuda ? 0 : 1];
}

/// Those whose handle was closed before their turn came.
void Stream::let_orphans_through(std::uint64_t number) {
  if (number == tail_.load(std::memory_order_acquire)) return;
  StreamOp& next = op(number);
  if (next.worker.load(std::memory_order_seq_cst) != nullptr) return;
  if (next.orphan_taken.exchange(true, std::memory_order_acq_rel)) return;
  // Whatever came before may be still at it.
  if (next.replaced) Staging::of(*runtime_).give_up(next.replaced, reached_.host, next.reached);
  // Its copies are still to come, and nobody wrote what they are; those of another request may stand there.
  if (!next.started && next.orders != 0)
    std::fill_n(reinterpret_cast<gpu::CopyOrder*>(orders_.data), next.orders, gpu::CopyOrder{});
  allowed_.host->store(next.last_allowed(), std::memory_order_release);
  retire(next, number, false);
}

/// Without the submitters' lock: one of them may wait in the driver for this very stream. Nobody submits for the worker
/// any more, and nobody else ends what is its.
void Stream::orphan(StreamWorker& worker, const Error& error) {
  const std::uint64_t tail = tail_.load(std::memory_order_acquire);
  for (std::uint64_t number = front_.load(std::memory_order_acquire); number != tail; ++number) {
    StreamOp& one = op(number);
    if (one.worker.load(std::memory_order_relaxed) != &worker) continue;
    drop_holds(one, worker.ledger());
    if (one.told != nullptr) __atomic_store_n(one.told, -error.code, __ATOMIC_RELEASE);
    if (one.has_status) status_.host->store(static_cast<unsigned>(error.code));
    if (one.staged && one.area && !one.completed) {
      if (one.opcode == nvme::Opcode::read) std::fill_n(one.area.data, one.area.size, kPoison);
      // The stream's copies are still to come, and the device may be at it.
      area_is_lost_.store(true, std::memory_order_release);
    }
    if (!one.staged && one.started && !one.completed) worker.poison_direct(*this, one);
    if (!one.completed) {
      keep_error(one.result, error);
      if (one.result != nullptr) {
        one.result->copied_ = nullptr;  // nobody says when the stream gets there
        one.result->left_.fetch_sub(1, std::memory_order_acq_rel);
      }
    }
    one.worker.store(nullptr, std::memory_order_seq_cst);
    worker.pending_.fetch_sub(1, std::memory_order_acq_rel);
    if (front_.load(std::memory_order_seq_cst) == number) let_orphans_through(number);
  }
}

void Stream::keep_error(StreamResult* result, const Error& error) {
  const std::lock_guard guard(errors_lock_);
  // Whoever gave no place for a result is told by take_error alone.
  const bool is_mine = result == nullptr;
  if (is_mine) result = new (std::nothrow) StreamResult;
  if (result == nullptr || result->failed_) return;
  result->failed_ = true;
  result->error_.reset(new (std::nothrow) Error(error));
  if (errors_.size() == kMostErrors) {
    std::erase_if(errors_, [](StreamResult* old) {
      const bool told = old->looked_.load(std::memory_order_relaxed);
      if (told) old->release();
      return told;
    });
  }
  if (errors_.size() != kMostErrors) {
    result->refer();
    errors_.push_back(result);
  }
  if (is_mine) result->release();
}

/// Under the submitters' lock. What may still use the area was enqueued by now.
void Stream::give_area_up() {
  if (area_) Staging::of(*runtime_).give_up(std::exchange(area_, {}), reached_.host, next_reached_);
}

/// Gives back the areas of streams on which nothing is pending. Whether there were any.
bool Stream::take_from_idle(gpu::Runtime& runtime, const Stream& taker) {
  Known& all = known();
  const std::lock_guard guard(all.lock);
  bool any = false;
  for (const auto& [name, stream] : all.streams) {
    if (stream == &taker || stream->runtime_ != &runtime || !stream->idle()) continue;
    const std::unique_lock submitters(stream->lock_, std::try_to_lock);
    if (!submitters || !stream->idle() || !stream->area_) continue;
    if (stream->area_is_lost_.exchange(false, std::memory_order_acq_rel)) {
      stream->give_area_up();
    } else {
      Staging::of(runtime).give_back(std::exchange(stream->area_, {}));
    }
    any = true;
  }
  return any;
}

void Stream::write_in_call(void* context) {
  const auto& hold = *static_cast<const Hold*>(context);
  hold.word->store(hold.value, std::memory_order_release);
}

/// Returns when the stream may go on.
void Stream::wait_in_call(void* context) {
  constexpr std::uint64_t kPoll = 50'000;
  const auto& hold = *static_cast<const Hold*>(context);
  const std::uint64_t start = monotonic_ns();
  while (!is_at(hold.word->load(std::memory_order_acquire), hold.value)) {
    if (monotonic_ns() - start < kPoll) {
      cpu_pause();
      continue;
    }
    const timespec nap{0, 20'000};
    nanosleep(&nap, nullptr);
  }
}

StreamResult* Stream::take_error() {
  const std::lock_guard guard(errors_lock_);
  StreamResult* found = nullptr;
  std::erase_if(errors_, [&](StreamResult* result) {
    if (found != nullptr || !result->done()) return false;
    if (result->look()) {
      result->release();
    } else {
      found = result;
    }
    return true;
  });
  return found;
}

int close_registration(const memory::Reference& reference) {
  int code = memory::Registry::instance().close(reference);
  for (int i = 0; i < 200 && code == EBUSY && Stream::any(); ++i) {
    const timespec nap{0, 100'000};
    nanosleep(&nap, nullptr);
    code = memory::Registry::instance().close(reference);
  }
  return code;
}

std::int64_t wait_for(Stream& stream, const Interrupt& interrupt) {
  return wait_until([&] { return stream.idle(); }, ~std::uint64_t{0}, interrupt) ? 0 : -EINTR;
}

}  // namespace ugds::engine
