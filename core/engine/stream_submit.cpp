// SPDX-License-Identifier: Apache-2.0
//
// A submission: what is asked for is checked and held, and then enqueued as one. All of a request's GPU work is
// enqueued here, in the caller's thread; nothing that the stream waits for needs the driver.
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <utility>

#include "base/environment.hpp"
#include "engine/stream.hpp"
#include "engine/stream_worker.hpp"

namespace ugds::engine {

using gpu::WordOp;
using nvme::Opcode;

namespace {

/// Copies of one operation that are made one by one; more go by the copy kernel, in one launch for each piece.
constexpr std::uint32_t kMostCopies = 8;
/// A request that is staged is cut by its caller above this.
constexpr std::uint64_t kMostStaged = std::uint64_t{1} << 31;

/// How many streams may be held by waits at once: fewer than there are connections, since the others' work goes through
/// the rest. UGDS_STREAM_WAITS sets it.
std::uint32_t most_waiting(gpu::Runtime& runtime, int device) {
  static const long chosen = [] {
    const char* text = environment("UGDS_STREAM_WAITS");
    return text == nullptr || *text == '\0' ? -1 : std::strtol(text, nullptr, 10);
  }();
  if (chosen >= 0) return static_cast<std::uint32_t>(chosen);
  return static_cast<std::uint32_t>(runtime.connections(device)) / 2;
}

}  // namespace

class Stream::Submission {
 public:
  Submission(Stream& stream, Handle& handle, StreamWorker& worker, const StreamCall& call)
      : s_(stream), handle_(handle), worker_(worker), call_(call) {}
  ~Submission() { drop(); }
  Submission(const Submission&) = delete;
  Submission& operator=(const Submission&) = delete;

  /// In the stream's context. False: there is no room for now, and it is to be tried again; else the result is 0, or
  /// -errno with last_error() filled and nothing enqueued.
  bool attempt(std::int64_t& result);

 private:
  /// Checks everything and holds the registrations. False: refused, and last_error() says why.
  bool prepare();
  /// Under the stream's lock. False: there is no room for now.
  bool has_room();
  /// Under the stream's lock. False: refused, for want of memory to stage through.
  bool take_memory();
  /// Under the stream's lock, with room.
  void enqueue_all();
  /// Requests that become one operation.
  enum Kind : std::size_t { kDirect, kStagedRead, kStagedWrite, kKinds };
  Kind kind_of(const Transfer& t) const {
    if (!t.buffer.registration->is_staged(handle_.geometry().number)) return kDirect;
    return t.opcode == Opcode::read ? kStagedRead : kStagedWrite;
  }

  bool check(const Transfer& t);
  bool hold(const Transfer& t);
  void drop();
  std::uint64_t holds() const;
  bool take_area(std::uint64_t bytes);
  bool take_orders();
  bool waits();
  void make(Kind kind, bool last);
  bool can_go_in_pieces(const StreamOp& op);
  bool kernel_pays(std::uint64_t bytes);
  bool has_many_copies(const StreamOp& op);
  void hold_by_kernel(const StreamOp& op, std::uint64_t tell);
  void enqueue(StreamOp& op, bool at_once);
  void enqueue_read(StreamOp& op);
  void enqueue_write(StreamOp& op);
  void copies(StreamOp& op, std::uint32_t piece);
  void copy(const StreamOp& op, std::uint64_t at, gpu::Address gpu, std::uint64_t bytes);
  void tell_status(const StreamOp& op);
  void write(StreamOp& op, std::uint64_t value);
  void wait(StreamOp& op, std::uint64_t value);
  void call(StreamOp& op, void (*function)(void*), const gpu::Word& word, std::uint64_t value);
  void flush();
  /// A call of the runtime. After one that failed there is no other: copies that no wait is in front of would run.
  template <class Call>
  void enqueue_by(Call&& call) {
    if (code_ == 0 && !is_counting_) code_ = call(*s_.runtime_);
  }
  [[gnu::cold]] bool refuse(const Transfer* t, int code, const std::string& cause, const char* hint);
  [[gnu::cold]] bool refuse(const Transfer& t, Refusal refusal);
  [[gnu::cold]] bool refuse_staging() {
    return refuse(nullptr, ENOBUFS, "all staging memory is in use by other streams' requests",
                  "wait for some of them, use fewer streams, or raise UGDS_STAGING");
  }

  Stream& s_;
  Handle& handle_;
  StreamWorker& worker_;
  const StreamCall& call_;
  std::size_t held_ = 0;
  std::array<std::uint32_t, kKinds> counts_{};
  std::array<std::uint64_t, kKinds> bytes_{};
  std::array<WordOp, 8> words_{};
  std::size_t word_count_ = 0;
  StreamOp::Cursor cursor_;
  std::uint32_t order_ = 0;
  bool is_prepared_ = false, failed_late_ = false;
  bool is_counting_ = false;  ///< nothing is enqueued: what it takes is counted
  bool first_ = true, is_idle_ = false, has_passed_ = false;
  int code_ = 0;
};

bool Stream::Submission::refuse(const Transfer* t, int code, const std::string& cause, const char* hint) {
  Error& error = last_error() = Error{};
  error.code = code;
  error.operation = "stream";
  set_device(error, handle_.uri().c_str());
  if (t != nullptr) set_transfer(error, handle_, *t);
  set_cause(error, "%s", cause.c_str());
  set_hint(error, "%s", hint);
  return false;
}

bool Stream::Submission::refuse(const Transfer& t, Refusal refusal) {
  Error& error = last_error() = Error{};
  set_refusal(error, handle_, t, refusal);
  set_transfer(error, handle_, t);
  return false;
}

void Stream::Submission::drop() {
  for (std::size_t i = 0; i < held_; ++i) {
    worker_.ledger().remove_shared(call_.requests[i].buffer.registration->index());
  }
}

bool Stream::Submission::hold(const Transfer& t) {
  if (!t.buffer) return refuse(t, Refusal::unregistered);
  for (;;) {
    switch (memory::hold_shared(worker_.ledger(), t.buffer)) {
      case memory::Hold::held: ++held_; return true;
      case memory::Hold::stale: return refuse(t, Refusal::stale);
      case memory::Hold::closing: cpu_pause(); break;
    }
  }
}

bool Stream::Submission::check(const Transfer& t) {
  const memory::Registration& r = *t.buffer.registration;
  // What is bound late is checked when it is known.
  if (!call_.late) {
    if (const Refusal refusal = check_transfer(handle_.geometry(), t); refusal != Refusal::none)
      return refuse(t, refusal);
  } else if (t.opcode == Opcode::read && t.buffer.readonly) {
    return refuse(t, Refusal::readonly);
  }
  const bool is_staged = r.is_staged(handle_.geometry().number);
  if (!is_staged && r.pages(handle_.geometry().number) == nullptr) return refuse(t, Refusal::unmapped);
  if (is_staged && call_.late && !s_.has_kernels_) {
    return refuse(&t, EOPNOTSUPP, "values that are bound late cannot be staged: " + s_.why_no_kernels_,
                  "give the values when the request is submitted");
  }
  if (is_staged && t.size > kMostStaged) {
    return refuse(&t, EINVAL, "more than 2 GiB of one request cannot be staged on a stream", "cut the request");
  }
  if (r.gpu() == nullptr) return true;
  if (r.gpu()->place().device != s_.place_.device) {
    return refuse(&t, EINVAL,
                  "the buffer is memory of GPU " + std::to_string(r.gpu()->place().device) +
                      ", and the stream is GPU " + std::to_string(s_.place_.device) + "'s",
                  "use a stream of the GPU that has the buffer");
  }
  return true;
}

bool Stream::Submission::attempt(std::int64_t& result) {
  if (!is_prepared_ && !prepare()) {
    result = -last_error().code;
    return true;
  }
  is_prepared_ = true;
  const std::lock_guard guard(s_.lock_);
  if (!take_memory()) {
    result = -last_error().code;
    return true;
  }
  if (!has_room()) return false;
  enqueue_all();
  if (failed_late_) result = -last_error().code;
  return true;
}

bool Stream::Submission::prepare() {
  bool capturing = false;
  const int code = s_.runtime_->is_capturing(s_.place_, s_.handle_, capturing);
  const Transfer* first = call_.requests.empty() ? nullptr : &call_.requests[0];
  if (code != 0 || capturing) {
    return refuse(first, EOPNOTSUPP,
                  capturing ? std::string("the stream is being captured into a graph")
                            : "the stream cannot be used: " + s_.runtime_->words(code),
                  "submit requests outside of the capture, before the graph is launched or after it");
  }
  if (call_.late && call_.requests.size() != 1) {
    return refuse(first, EINVAL, "values that are bound late, of a group of " + std::to_string(call_.requests.size()),
                  "submit the request whose values they are by itself");
  }
  if (call_.requests.size() > kParts) {
    return refuse(first, EINVAL, "a group of " + std::to_string(call_.requests.size()) + " requests",
                  "submit at most 4096 as one");
  }
  const memory::GpuBuffer* alive = nullptr;
  for (const Transfer& t : call_.requests) {
    if (!hold(t) || !check(t)) return false;
    const memory::GpuBuffer* gpu = t.buffer.registration->gpu();
    if (gpu != nullptr && gpu != alive && !gpu->is_alive()) {
      Error error;
      set_freed(error);
      return refuse(&t, error.code, error.cause, error.hint);
    }
    alive = gpu;
    // A request that is bound late may have a size of 0 later; one that has it now does nothing.
    const Kind kind = kind_of(t);
    ++counts_[t.size == 0 ? kDirect : kind];
    bytes_[kind] += t.size;
  }
  if (bytes_[kStagedRead] > kMostStaged || bytes_[kStagedWrite] > kMostStaged)
    return refuse(first, EINVAL, "more than 2 GiB of one group cannot be staged", "submit smaller groups");
  return true;
}

bool Stream::Submission::has_room() {
  const std::uint64_t pending = s_.tail_.load(std::memory_order_relaxed) - s_.front_.load(std::memory_order_acquire);
  is_idle_ = pending == 0;
  has_passed_ = is_idle_ && s_.reached_.host->load(std::memory_order_acquire) == s_.next_reached_;
  if (has_passed_) {
    // Also of those that were let through before the stream was there.
    s_.holds_to_come_ = 0;
    s_.holds_pending_.store(0, std::memory_order_relaxed);
  }
  // A last wait may be over and its call not: its hold is not written yet.
  constexpr std::uint32_t kLeft = 8;
  return pending + kKinds <= kOps &&
         s_.parts_pending_.load(std::memory_order_acquire) + call_.requests.size() <= kParts &&
         s_.holds_pending_.load(std::memory_order_acquire) + holds() + kLeft <= kHolds;
}

/// Calls of all of it, at most: a write and a wait for each piece, and those around them.
std::uint64_t Stream::Submission::holds() const {
  std::uint64_t count = 2;
  for (const Kind kind : {kStagedRead, kStagedWrite}) {
    if (bytes_[kind] != 0) count += 2 * StreamPlan(bytes_[kind], s_.area_.size).count + 3;
  }
  return count;
}

bool Stream::Submission::take_memory() {
  const bool is_staged = counts_[kStagedRead] + counts_[kStagedWrite] != 0;
  if (is_staged && (call_.late || call_.requests.size() > 1) && !take_orders()) return false;
  if (!take_area(std::max(bytes_[kStagedRead], bytes_[kStagedWrite]))) return false;
  if (holds() <= kHolds - 64) return true;
  return refuse(nullptr, ENOBUFS, "staging memory is short, and the request has too many pieces for what there is",
                "submit smaller requests, or raise UGDS_STAGING");
}

/// Memory to stage through. What another operation of this stream uses can be used again: its turn is before.
bool Stream::Submission::take_area(std::uint64_t bytes) {
  if (bytes == 0) return true;
  if (s_.area_is_lost_.exchange(false, std::memory_order_acq_rel)) s_.give_area_up();
  const std::uint64_t wanted = std::min(bytes, Staging::kSlab);
  if (s_.area_.size >= wanted) return true;
  Staging& staging = Staging::of(*s_.runtime_);
  // In two halves, each a multiple of the units in which the plan cuts.
  const auto smaller = [](std::uint64_t size) {
    return size > 2 * Staging::kUnit ? align_up(size / 2, 2 * Staging::kUnit) : 0;
  };
  for (std::uint64_t size = s_.replaced_ ? 0 : wanted; size > s_.area_.size; size = smaller(size)) {
    StagingArea area = staging.take(size);
    if (!area && take_from_idle(*s_.runtime_, s_)) area = staging.take(size);
    if (!area) continue;
    s_.replaced_ = std::exchange(s_.area_, area);
    if (s_.replaced_ && s_.idle()) staging.give_back(std::exchange(s_.replaced_, {}));
    return true;
  }
  if (s_.area_.size >= 2 * Staging::kUnit) return true;
  return refuse_staging();
}

bool Stream::Submission::take_orders() {
  if (s_.orders_) return true;
  s_.orders_ = Staging::of(*s_.runtime_).take(Staging::kUnit);
  if (s_.orders_) return true;
  return refuse_staging();
}

/// Whether the stream is held by waits for words, and not by calls.
bool Stream::Submission::waits() {
  gpu::Runtime& runtime = *s_.runtime_;
  if (!runtime.has_words(s_.place_.device)) return false;
  if (s_.waits_.fetch_add(1, std::memory_order_acq_rel) != 0) return true;
  if (waiting_streams(runtime).fetch_add(1) < most_waiting(runtime, s_.place_.device)) return true;
  waiting_streams(runtime).fetch_sub(1);
  s_.waits_.fetch_sub(1, std::memory_order_acq_rel);
  return false;
}

void Stream::Submission::enqueue_all() {
  // A group of nothing has its place in the order too.
  if (call_.requests.empty()) counts_[kDirect] = 1;
  std::uint32_t left = 0;
  for (const std::uint32_t count : counts_) left += count != 0;
  if (call_.result != nullptr) call_.result->left_.store(left, std::memory_order_relaxed);
  held_ = 0;  // the operations' now
  // Writes first: the memory of a read may be what a write of the group is of.
  for (const Kind kind : {kStagedWrite, kDirect, kStagedRead}) {
    if (counts_[kind] != 0) make(kind, --left == 0);
  }
}

/// Makes the operation of one kind, enqueues it and hands it over.
void Stream::Submission::make(Kind kind, bool last) {
  const std::uint64_t tail = s_.tail_.load(std::memory_order_relaxed);
  StreamOp& op = s_.op(tail);
  op.renew();
  op.reached = s_.next_reached_;
  op.allowed = s_.next_allowed_;
  op.first_part = static_cast<std::uint32_t>(s_.next_part_);
  op.staged = kind != kDirect;
  op.opcode = kind == kStagedWrite ? Opcode::write : Opcode::read;
  op.values = call_.late;
  op.first = std::exchange(first_, false);
  std::uint64_t begin = 0;
  for (const Transfer& t : call_.requests) {
    if ((t.size == 0 ? kDirect : kind_of(t)) != kind) continue;
    s_.part(s_.next_part_++) = {t, begin};
    begin += t.size;
    ++op.parts;
  }
  op.waits = waits();
  if (op.staged) {
    op.by_pieces = can_go_in_pieces(op);
    op.plan = op.by_pieces ? StreamPlan::even(begin, s_.area_.size) : StreamPlan(begin, s_.area_.size);
    op.area = s_.area_;
    op.replaced = std::exchange(s_.replaced_, {});
    op.by_kernel = !op.by_pieces && (call_.late || has_many_copies(op));
  }
  op.held_by_kernel = op.by_pieces || (!op.staged && op.waits && begin != 0 && kernel_pays(begin));
  if (op.by_pieces && call_.late) op.orders = 1;
  if (last) {
    op.told = call_.told;
    op.has_status = call_.status != 0;
  }
  if (call_.result != nullptr) {
    call_.result->refer();
    op.result = call_.result;
    if (kind == kStagedRead) {
      op.result->copied_ = s_.reached_.host;
      op.result->copied_at_ = op.last_reached();
    }
  }
  s_.next_reached_ = op.last_reached();
  s_.next_allowed_ = op.last_allowed();
  s_.parts_pending_.fetch_add(op.parts, std::memory_order_relaxed);
  Counters& counters = worker_.counters();
  counters.requests.fetch_add(op.parts, std::memory_order_relaxed);
  auto& held = op.held_by_kernel ? counters.held_by_kernel : op.waits ? counters.held_by_wait : counters.held_by_call;
  held.fetch_add(1, std::memory_order_relaxed);
  (op.staged ? counters.staged : counters.direct).fetch_add(op.parts, std::memory_order_relaxed);
  const auto hand_over = [&] {
    s_.holds_pending_.fetch_add(op.holds, std::memory_order_relaxed);
    op.worker.store(&worker_, std::memory_order_relaxed);
    worker_.count_in();
    s_.tail_.store(tail + 1, std::memory_order_seq_cst);
    if (last) worker_.wake();
  };
  // Where the stream has nothing to do it is there already: the device begins while it is told to wait.
  const bool at_once =
      op.held_by_kernel && op.first && last && has_passed_ && s_.runtime_->is_idle(s_.place_, s_.handle_);
  if (at_once) s_.reached_.host->store(op.reached + 1, std::memory_order_release);
  // It is handed over before it is enqueued. A call of the runtime may wait for what was enqueued before it, in its own
  // thread, as launches do under checkers, or in another's that frees memory meanwhile: somebody has to end that.
  if (!op.waits || op.by_kernel) {
    is_counting_ = true;
    enqueue(op, at_once);
    is_counting_ = false;
  }
  if (op.by_kernel) op.orders = order_;
  hand_over();
  enqueue(op, at_once);
  if (code_ != 0) {
    // What was enqueued of it is let through.
    refuse(call_.requests.empty() ? nullptr : &call_.requests[0], EIO,
           "the GPU's stream did not take the request: " + s_.runtime_->words(code_),
           "a kernel of the program may have faulted; its context is not usable then");
    *op.refusal = last_error();
  }
  const auto before = op.enqueued.exchange(code_ != 0 ? StreamOp::Enqueued::broken : StreamOp::Enqueued::yes,
                                           std::memory_order_acq_rel);
  // Its end was told already.
  if (code_ != 0 && before == StreamOp::Enqueued::assumed) failed_late_ = true;
  code_ = 0;
}

/// Whether one launch does all of a staged operation: a read of one request, to where its bytes can be stored as they
/// are loaded. What is bound late may come to lie elsewhere, and is stored byte by byte then.
bool Stream::Submission::can_go_in_pieces(const StreamOp& op) {
  if (!op.waits || !s_.has_kernels_ || !Staging::may_use_kernels() || op.opcode != Opcode::read || op.parts != 1)
    return false;
  const Transfer& t = s_.part(op.first_part).transfer;
  return call_.late || (t.buffer.address + t.buffer_offset) % 16 == 0;
}

/// Whether a kernel is to hold the stream of a direct operation. It sees at once what a wait sees some 10 us late, and
/// later the longer it waits; its launch takes 2 us longer. So not where others wait in front of it anyway.
bool Stream::Submission::kernel_pays(std::uint64_t bytes) {
  constexpr std::uint64_t kLarge = 256 * 1024;
  return s_.has_kernels_ && Staging::may_use_kernels() && (is_idle_ || bytes >= kLarge) &&
         s_.runtime_->kernels_see_devices(s_.place_.device);
}

/// Whether there are too many pieces of memory for copies one by one.
bool Stream::Submission::has_many_copies(const StreamOp& op) {
  std::uint32_t copies = 0;
  gpu::Address end = 0;
  for (std::uint32_t i = 0; i < op.parts; ++i) {
    const Transfer& t = s_.part(op.first_part + i).transfer;
    const gpu::Address begin = t.buffer.address + t.buffer_offset;
    copies += begin != end;
    end = begin + t.size;
  }
  return copies > kMostCopies && s_.has_kernels_;
}

void Stream::Submission::flush() {
  if (word_count_ == 0) return;
  if (is_counting_) {
    word_count_ = 0;
    return;
  }
  enqueue_by([&](gpu::Runtime& runtime) {
    return runtime.enqueue_words(s_.place_, s_.handle_, std::span(words_.data(), word_count_));
  });
  word_count_ = 0;
}

void Stream::Submission::call(StreamOp& op, void (*function)(void*), const gpu::Word& word, std::uint64_t value) {
  if (is_counting_) {
    ++op.holds;
    return;
  }
  flush();
  Hold& hold = s_.holds_[s_.next_hold_++ % kHolds];
  hold = {word.host, value};
  enqueue_by([&](gpu::Runtime& runtime) { return runtime.enqueue_call(s_.place_, s_.handle_, function, &hold); });
}

void Stream::Submission::write(StreamOp& op, std::uint64_t value) {
  if (!s_.runtime_->has_words(s_.place_.device)) return call(op, &Stream::write_in_call, s_.reached_, value);
  if (word_count_ == words_.size()) flush();
  words_[word_count_++] = {WordOp::Kind::write, s_.reached_.device, value};
}

void Stream::Submission::wait(StreamOp& op, std::uint64_t value) {
  if (!op.waits) return call(op, &Stream::wait_in_call, s_.allowed_, value);
  if (word_count_ == words_.size()) flush();
  words_[word_count_++] = {WordOp::Kind::wait, s_.allowed_.device, value};
}

void Stream::Submission::copy(const StreamOp& op, std::uint64_t at, gpu::Address gpu, std::uint64_t bytes) {
  if (bytes == 0) return;
  std::byte* mine = op.area.data + at;
  enqueue_by([&](gpu::Runtime& runtime) {
    return op.opcode == Opcode::read ? runtime.enqueue_to_device(s_.place_, s_.handle_, gpu, mine, bytes)
                                     : runtime.enqueue_from_device(s_.place_, s_.handle_, mine, gpu, bytes);
  });
}

/// The GPU's copies of one piece, neighbours as one.
void Stream::Submission::copies(StreamOp& op, std::uint32_t number) {
  flush();
  const StreamPlan::Piece piece = op.plan.piece(number);
  Fragment fragment;
  // One request that is bound late is the worker's from now on: it may have begun.
  std::uint32_t count = call_.late ? 1 : 0;
  std::uint64_t at = 0, bytes = 0, most = call_.late ? piece.bytes : 0;
  gpu::Address gpu = 0;
  while (!call_.late && s_.next(op, piece, cursor_, fragment)) {
    ++count;
    most = std::max(most, fragment.bytes);
    if (op.by_kernel) continue;
    if (bytes != 0 && fragment.gpu() == gpu + bytes) {
      bytes += fragment.bytes;
      continue;
    }
    copy(op, at, gpu, bytes);
    at = fragment.at;
    gpu = fragment.gpu();
    bytes = fragment.bytes;
  }
  if (!op.by_kernel) return copy(op, at, gpu, bytes);
  const gpu::Address orders = s_.orders_.device + order_ * sizeof(gpu::CopyOrder);
  enqueue_by([&](gpu::Runtime& runtime) {
    return runtime.enqueue_copies(s_.place_, s_.handle_, orders, std::max(count, 1u), most);
  });
  order_ += std::max(count, 1u);
}

void Stream::Submission::tell_status(const StreamOp& op) {
  if (!op.has_status) return;
  flush();
  enqueue_by([&](gpu::Runtime& runtime) {
    return runtime.enqueue_to_device(s_.place_, s_.handle_, call_.status, s_.status_.host, 4);
  });
}

void Stream::Submission::enqueue(StreamOp& op, bool at_once) {
  cursor_ = {};
  order_ = 0;
  if (op.held_by_kernel) {
    // By itself a write tells sooner that the stream has come; where it comes later anyway, the kernel tells it.
    const bool writes = !at_once && (is_idle_ || !op.staged);
    if (writes) write(op, op.reached + 1);
    flush();
    hold_by_kernel(op, (at_once || writes ? gpu::Pieces::nothing : gpu::Pieces::arrival) |
                           (op.staged ? gpu::Pieces::copied : gpu::Pieces::nothing));
    tell_status(op);
  } else if (!op.staged) {
    write(op, op.reached + 1);
    wait(op, op.allowed + 1);
    tell_status(op);
  } else if (op.opcode == Opcode::read) {
    enqueue_read(op);
  } else {
    enqueue_write(op);
  }
  flush();
}

void Stream::Submission::hold_by_kernel(const StreamOp& op, std::uint64_t tell) {
  gpu::Pieces pieces;
  pieces.reached = s_.reached_.device;
  pieces.reached_at = op.reached;
  pieces.allowed = s_.allowed_.device;
  pieces.allowed_at = op.allowed;
  pieces.tell = tell;
  if (op.staged) {
    // What is bound late is the worker's from now on: it may have begun.
    const Transfer& t = call_.late ? call_.requests[0] : s_.part(op.first_part).transfer;
    if (call_.late) {
      pieces.order = s_.orders_.device;
    } else {
      pieces.copy = {op.area.device, t.buffer.address + t.buffer_offset, t.size};
    }
    pieces.piece = op.plan.size;
    pieces.area = op.plan.places * op.plan.size;
    pieces.count = op.plan.count;
    pieces.most = std::min(op.plan.size, t.size);
  }
  enqueue_by([&](gpu::Runtime& runtime) { return runtime.enqueue_pieces(s_.place_, s_.handle_, pieces); });
}

void Stream::Submission::enqueue_read(StreamOp& op) {
  write(op, op.reached + 1);
  for (std::uint32_t i = 0; i < op.plan.count; ++i) {
    wait(op, op.allowed + 1 + i);
    copies(op, i);
    if (i + 1 == op.plan.count) tell_status(op);
    write(op, op.reached + 2 + i);
  }
}

void Stream::Submission::enqueue_write(StreamOp& op) {
  const std::uint32_t lead = op.allowed_lead();
  if (lead != 0) {
    write(op, op.reached + 1);
    wait(op, op.allowed + 1);
  }
  for (std::uint32_t i = 0; i < op.plan.count; ++i) {
    const std::uint32_t needs = op.plan.piece(i).needs;
    if (needs != 0) wait(op, op.allowed + lead + needs);
    copies(op, i);
    write(op, op.reached + lead + 1 + i);
  }
  wait(op, op.last_allowed());
  tell_status(op);
}

std::int64_t Stream::submit(Handle& handle, const StreamCall& call, const Interrupt& interrupt) try {
  StreamWorker& worker = handle.stream_worker();
  worker.join(*this);
  Submission submission(*this, handle, worker, call);
  const std::uint64_t start = monotonic_ns();
  for (std::uint64_t asked = start;;) {
    bool is_over = false;
    std::int64_t result = 0;
    auto attempt = [&] { is_over = submission.attempt(result); };
    runtime_->within(
        place_, [](void* it) { (*static_cast<decltype(attempt)*>(it))(); }, &attempt);
    if (is_over) return result;
    const std::uint64_t now = monotonic_ns();
    if (now - start > handle.policy().deadline_ns) {
      fail(EAGAIN, "stream", "256 operations are pending on the stream, and none has ended for long",
           "let the stream get on, or use groups");
    }
    if (interrupt.asked != nullptr && now - asked > 20'000'000) {
      asked = now;
      if (interrupt.asked(interrupt.context)) fail(EINTR, "stream", "interrupted while the stream had no room");
    }
    const timespec nap{0, 20'000};
    nanosleep(&nap, nullptr);
  }
} catch (const Failure& failure) {
  last_error() = failure.error();
  set_device(last_error(), handle.uri().c_str());
  return -failure.error().code;
}

}  // namespace ugds::engine
