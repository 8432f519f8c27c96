// SPDX-License-Identifier: Apache-2.0
//
// Requests in the order of a GPU's stream. Nothing is done in a callback: the stream tells by a word that it has come
// to a request, and waits by another until it may go on; a thread of the handle's drives the device between the two
// (stream_worker.hpp), at full depth over all streams.
//
// Two words that only grow carry all of that. `reached` is written by the stream: how far it has come. `allowed` is
// written by the thread: how far the stream may go. A request that goes direct is one step of each. One that is staged
// is a step for each piece: copies lie on the caller's stream between waits, so nothing that a stream waits for needs
// the driver.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <ctime>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "engine/idle.hpp"
#include "engine/operation.hpp"
#include "engine/poison.hpp"
#include "engine/staging.hpp"
#include "engine/stream_plan.hpp"
#include "engine/transfer.hpp"
#include "gpu/runtime.hpp"

namespace ugds::engine {

class Handle;
class StreamWorker;

/// Whether a word is at `value` or past it: such words only grow, and wrap.
inline bool is_at(std::uint64_t word, std::uint64_t value) { return static_cast<std::int64_t>(word - value) >= 0; }

/// What became of a request, or of a group: kept by whoever may ask, and by the stream until it has ended.
class StreamResult {
 public:
  static StreamResult* make() { return new StreamResult; }
  void refer() { references_.fetch_add(1, std::memory_order_relaxed); }
  void release() {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  /// The device's part is done, and what the stream was to copy after it has been copied.
  bool done() const {
    if (left_.load(std::memory_order_acquire) != 0) return false;
    return copied_ == nullptr || is_at(copied_->load(std::memory_order_acquire), copied_at_);
  }
  /// Only when done: bytes, or -errno with `error`.
  std::int64_t result() const { return failed_ ? -error().code : bytes_; }
  const Error& error() const;
  bool failed() const { return failed_; }
  /// Whether somebody was told of the error; returns what was so before.
  bool look() { return looked_.exchange(true, std::memory_order_relaxed); }

 private:
  friend class StreamWorker;
  friend class Stream;
  std::atomic<std::uint32_t> references_{1};
  std::atomic<std::uint32_t> left_{0};                  ///< operations of which the device's part is not done
  const std::atomic<std::uint64_t>* copied_ = nullptr;  ///< of a staged read: a stream's word, and how far it must be
  std::uint64_t copied_at_ = 0;
  std::atomic<bool> looked_{false};
  // Written by one operation's end after the other; read when none is left.
  bool failed_ = false;
  std::int64_t bytes_ = 0;
  std::unique_ptr<Error> error_;  ///< where it failed, and there was memory to say how
};

/// Values that are read when the stream reaches the request; nullptr: as the transfer says. Until it has ended they
/// stay where they are. A size is at most what the transfer says.
struct Late {
  const std::int64_t* offset = nullptr;
  const std::int64_t* size = nullptr;
  const std::int64_t* buffer_offset = nullptr;
  std::uint64_t base = 0;   ///< added to the offset in the buffer
  std::uint64_t place = 0;  ///< added to the offset on the device
  explicit operator bool() const { return offset != nullptr || size != nullptr || buffer_offset != nullptr; }
};

/// What is asked of a stream: requests that are ordered as one, and not among themselves.
struct StreamCall {
  std::span<const Transfer> requests{};  ///< reads and writes
  Late late{};                           ///< of a single request
  gpu::Address status = 0;               ///< 4 bytes of GPU memory: 0 or an errno, before the stream goes on
  std::int64_t* told = nullptr;          ///< bytes or -errno, before the stream goes on
  StreamResult* result = nullptr;
};

/// One request or group on its way, as it is made new for each.
struct StreamOpState {
  // As it was enqueued.
  std::uint64_t reached = 0, allowed = 0;  ///< both words before it
  std::uint32_t first_part = 0, parts = 0;
  nvme::Opcode opcode = nvme::Opcode::read;
  bool staged = false, broken = false;
  bool by_kernel = false;       ///< copied by the kernel that reads what to copy when it runs
  bool by_pieces = false;       ///< copied and held by the kernel of pieces
  bool held_by_kernel = false;  ///< held by it
  bool first = false;           ///< of what was submitted as one
  bool waits = false;           ///< it holds one of the GPU's connections, and not the thread of calls
  std::uint32_t holds = 0, orders = 0;
  StreamPlan plan{};
  StagingArea area{}, replaced{};
  Late values{};
  std::int64_t* told = nullptr;
  StreamResult* result = nullptr;
  bool has_status = false;
  // Of the worker.
  bool started = false, failed = false, completed = false;
  std::uint32_t bad_from = ~0u;        ///< the first piece that is not right
  std::uint32_t begun = 0, ended = 0;  ///< pieces that were given to the device, and that are through it, in order
  struct Cursor {
    std::uint32_t part = 0;  ///< the next one's number, and how much of it was
    std::uint64_t in_part = 0;
  } given{};
  std::array<std::uint32_t, 8> open{};  ///< commands' requests of the pieces that are open; 1 more while being given
  std::uint32_t flying = 0;
  std::uint64_t moved = 0;     ///< bytes that the device has told of: fewer than asked for at the end of a file
  std::uint64_t ended_at = 0;  ///< in ticks: when the device was done and the submitter was not

  /// Steps of `reached` before the first piece, and of `allowed`: a write whose bytes the copy kernel gathers waits for
  /// its orders.
  std::uint32_t reached_lead() const { return opcode == nvme::Opcode::read || by_kernel || !staged ? 1 : 0; }
  std::uint32_t allowed_lead() const { return by_kernel && opcode == nvme::Opcode::write ? 1 : 0; }
  std::uint32_t pieces() const { return staged ? plan.count : 1; }
  std::uint64_t last_reached() const { return reached + reached_lead() + (staged ? plan.count : 0); }
  std::uint64_t last_allowed() const { return allowed + allowed_lead() + pieces(); }
};

struct alignas(64) StreamOp : StreamOpState {
  StreamOp() = default;
  StreamOp(const StreamOp&) = delete;
  StreamOp& operator=(const StreamOp&) = delete;
  /// For one that has ended.
  void renew() {
    static_cast<StreamOpState&>(*this) = StreamOpState{};
    orphan_taken.store(false, std::memory_order_relaxed);
    enqueued.store(Enqueued::no, std::memory_order_relaxed);
  }
  /// What went wrong: of the worker once `failed`, and of the submitter once it is broken. Only then are they written,
  /// and read: a request that succeeds does not touch the lines that they are in.
  Error* error = nullptr;
  Error* refusal = nullptr;
  /// How far its submitter is. An operation may begin before all of it is enqueued, and never ends before.
  enum class Enqueued : std::uint8_t { no, assumed, yes, broken };
  std::atomic<Enqueued> enqueued{Enqueued::no};
  // Threads whose it is not look at these at any time.
  std::atomic<StreamWorker*> worker{nullptr};  ///< nullptr: its handle was closed; it is let through in its turn
  std::atomic<bool> orphan_taken{false};
};

class Stream {
 public:
  /// Operations, requests and calls that may be pending on one stream. A submission waits for room.
  static constexpr std::uint32_t kOps = 256, kParts = 4096, kHolds = 2048;

  /// The stream of a handle of the runtime's, made known where it is not. `place`: the context of the default stream.
  /// Throws Failure: EINVAL (no stream), EMFILE (too many), and what making words throws. Thread-safe.
  static Stream& of(gpu::Runtime& runtime, gpu::StreamHandle handle, const gpu::Place& place);

  /// Whether there is any in this process.
  static bool any();
  /// Those of a name that are known, of every runtime: a default stream is one for each GPU.
  static std::vector<Stream*> named(gpu::StreamHandle handle);

  /// Enqueues. 0, or -errno with last_error() filled and nothing enqueued. Waits for room, within the deadline of the
  /// handle. The caller has the handle in use. Thread-safe.
  std::int64_t submit(Handle& handle, const StreamCall& call, const Interrupt& interrupt);

  /// Whether none of our requests is pending on it.
  bool idle() const { return front_.load(std::memory_order_acquire) == tail_.load(std::memory_order_acquire); }
  /// The first error on it that nobody was told of, which is told now: a reference that the caller gives back; nullptr
  /// where there is none. Those of calls without a StreamResult are among them.
  StreamResult* take_error();

  gpu::Runtime& runtime() const { return *runtime_; }
  const gpu::Place& place() const { return place_; }

  struct Counters {
    std::atomic<std::uint64_t> requests{0}, bytes{0}, held_by_wait{0}, held_by_kernel{0}, held_by_call{0}, staged{0},
        direct{0};
  };

 private:
  friend class StreamWorker;
  class Submission;

  /// A request, and where its bytes begin among all of the operation.
  struct Part {
    Transfer transfer;
    std::uint64_t begin;
  };
  /// What a call in the runtime's thread stores, or waits for.
  struct Hold {
    std::atomic<std::uint64_t>* word = nullptr;
    std::uint64_t value = 0;
  };
  static void wait_in_call(void* hold);
  static void write_in_call(void* hold);
  /// Streams that are held by waits.
  static std::atomic<std::uint32_t>& waiting_streams(const gpu::Runtime& runtime);
  static bool take_from_idle(gpu::Runtime& runtime, const Stream& taker);
  void give_area_up();
  static Stream* find(const gpu::Runtime& runtime, gpu::StreamHandle handle, const gpu::Place& place, bool anywhere);
  bool is_callers() const;
  void free_words();

  void open(gpu::Runtime& runtime, gpu::StreamHandle handle, const gpu::Place& place);
  StreamOp& op(std::uint64_t number) { return ops_[number % kOps]; }
  Part& part(std::uint64_t number) { return parts_[number % kParts]; }
  /// What of a request lies in one piece of its operation.
  struct Fragment {
    const Transfer* transfer = nullptr;
    std::uint64_t in_transfer = 0, bytes = 0;
    std::uint64_t at = 0;  ///< in the area
    gpu::Address gpu() const { return transfer->buffer.address + transfer->buffer_offset + in_transfer; }
  };
  /// The next fragment in a piece, from the cursor on; false: there is none left.
  bool next(const StreamOp& op, const StreamPlan::Piece& piece, StreamOp::Cursor& cursor, Fragment& fragment);
  /// `passed`: the stream is past everything that was enqueued of it, but for a last wait that is over.
  void retire(StreamOp& op, std::uint64_t number, bool passed);
  void let_orphans_through(std::uint64_t number);
  void orphan(StreamWorker& worker, const Error& error);
  void drop_holds(const StreamOp& op, memory::Ledger& ledger);
  void keep_error(StreamResult* result, const Error& error);

  gpu::Runtime* runtime_ = nullptr;
  gpu::StreamHandle handle_ = nullptr;
  gpu::Place place_;
  std::uint32_t caller_ = 0;  ///< of the per-thread default stream
  gpu::Word reached_, allowed_, status_;
  std::atomic<std::uint64_t> front_{0}, tail_{0};  ///< operations that have ended, and that were submitted
  std::atomic<std::uint32_t> waits_{0};            ///< pending operations that are held by waits
  std::atomic<std::uint32_t> holds_pending_{0}, parts_pending_{0};
  // Of whoever has the operation in front.
  std::uint32_t holds_to_come_ = 0;  ///< of those that were let through before the stream was there
  std::int64_t call_bytes_ = 0;      ///< of what was submitted as one, so far
  int call_error_ = 0;
  std::atomic<std::uint64_t> workers_{0};  ///< those who know it, by their device's number
  std::mutex lock_;                        ///< of submitters
  std::uint64_t next_reached_ = 0, next_allowed_ = 0, next_part_ = 0, next_hold_ = 0;
  bool has_kernels_ = false;
  std::string why_no_kernels_;
  StagingArea area_, orders_;
  StagingArea replaced_;  ///< what pending operations use and later ones do not: the next one gives it back
  std::atomic<bool> area_is_lost_{false};  ///< something that was given up may still use it
  std::unique_ptr<StreamOp[]> ops_;
  std::unique_ptr<Error[]> op_errors_;
  std::unique_ptr<Part[]> parts_;
  std::unique_ptr<Hold[]> holds_;
  std::mutex errors_lock_;
  std::vector<StreamResult*> errors_;
};

/// Closes a registration as Registry::close does. Where a stream has just gone on, the thread that lets go of its
/// memory is waited for, 20 ms at most: on a busy machine it may not run sooner.
int close_registration(const memory::Reference& reference);

/// How long a wait for a stream polls: in a mode that polls, for as long as requests mostly take.
inline constexpr std::uint64_t kPollForMoment = 50'000, kPollForRequest = 10'000'000;

/// Waits for what a stream's thread brings about: polls, then looks again every 50 us. True: `done()` is. False: the
/// time is up, or `interrupt` ended it.
template <class Done>
bool wait_until(Done&& done, std::uint64_t limit_ns, const Interrupt& interrupt,
                std::uint64_t poll_ns = kPollForMoment) {
  constexpr std::uint64_t kAsk = 20'000'000;
  const std::uint64_t start = monotonic_ns();
  Idle idle;
  for (std::uint64_t asked = start; !done();) {
    const std::uint64_t now = monotonic_ns();
    if (now - start >= limit_ns) return false;
    if (now - start < poll_ns) {
      idle.pause({});
      continue;
    }
    if (interrupt.asked != nullptr && now - asked > kAsk) {
      asked = now;
      if (interrupt.asked(interrupt.context)) return false;
    }
    const timespec nap{0, 50'000};
    nanosleep(&nap, nullptr);
  }
  return true;
}

/// Waits until none of our requests is pending on the stream. 0, -EINTR.
std::int64_t wait_for(Stream& stream, const Interrupt& interrupt);

}  // namespace ugds::engine
