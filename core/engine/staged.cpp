// SPDX-License-Identifier: Apache-2.0
#include "engine/staged.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "base/clock.hpp"
#include "engine/staging.hpp"

namespace ugds::engine {

using gpu::Runtime;
using gpu::WordOp;
using nvme::Opcode;

namespace {

/// Callers that may stage at once.
constexpr std::size_t kLanes = 8;
/// Pieces at the device at once.
constexpr std::size_t kFlight = 16;
constexpr std::uint64_t kSmallestPiece = 128 * 1024, kLargestPiece = 1024 * 1024;
/// Of files: what each piece costs on the way through the kernel takes longer than to copy it.
constexpr std::uint64_t kFilePiece = 512 * 1024;
/// Up to here the copy engine brings a write's only piece sooner than a kernel, which has to start first.
constexpr std::uint64_t kSmallWrite = 128 * 1024;
/// Of the kernel that copies: so many fill the bus.
constexpr std::uint64_t kBlocks = 4;
static_assert(kBlocks <= gpu::Pieces::kMostBlocks);
constexpr std::uint64_t kInterruptInterval = 20'000'000;
/// How long the copies of a request may be polled for before the driver is asked.
constexpr std::uint64_t kPatience = 2'000'000;

/// What one caller stages with: memory, a stream for each GPU, and the word by which the stream tells how many copies
/// are done.
class Lane {
 public:
  bool try_take() { return !taken_.exchange(true, std::memory_order_acquire); }
  void give_back() { taken_.store(false, std::memory_order_release); }

  /// Makes what is missing for a GPU. Throws Failure.
  void prepare(Runtime& runtime, const gpu::Place& place);
  /// Commands of an abandoned request may still use the memory.
  void give_area_up(Runtime& runtime) { Staging::of(runtime).give_up(std::exchange(area_, {})); }

  const StagingArea& area() const { return area_; }
  gpu::StreamHandle stream() const { return stream_; }
  bool has_kernels() const { return has_kernels_; }
  gpu::Word& copied() { return copied_; }
  gpu::Word& allowed() { return allowed_; }
  std::uint64_t count = 0;  ///< of copies that were ever enqueued

 private:
  struct Stream {
    gpu::Place place;
    gpu::StreamHandle stream = nullptr;
    bool has_kernels = false;
  };
  std::atomic<bool> taken_{false};
  StagingArea area_;
  gpu::Word copied_, allowed_;
  gpu::StreamHandle stream_ = nullptr;
  bool has_kernels_ = false;
  std::vector<Stream> streams_;
};

void Lane::prepare(Runtime& runtime, const gpu::Place& place) {
  if (!area_) area_ = Staging::of(runtime).take(Staging::kSlab);
  if (!area_)
    fail(ENOMEM, "stage", "all staging memory is in use", "raise UGDS_STAGING, or end some streams' requests");
  if (copied_.host == nullptr && runtime.has_words(place.device)) copied_ = runtime.make_word();
  auto found = std::find_if(streams_.begin(), streams_.end(), [&](const Stream& s) { return s.place == place; });
  if (found == streams_.end()) {
    streams_.reserve(streams_.size() + 1);
    Stream made{place, runtime.make_stream(place)};
    try {
      if (Staging::may_use_kernels() && copied_.host != nullptr) {
        runtime.load_kernels(place);
        if (allowed_.host == nullptr) allowed_ = runtime.make_word();
        made.has_kernels = true;
      }
    } catch (const Failure&) {
      // The copy engine does it, at the cost of two calls for each piece.
    }
    found = streams_.insert(streams_.end(), made);
  }
  stream_ = found->stream;
  has_kernels_ = found->has_kernels;
}

using Lanes = std::array<Lane, kLanes>;

Lanes& lanes_of(const Runtime& runtime) {
  static auto* all = new std::array<Lanes, 2>();  // NOLINT: a thread that is abandoned at exit may hold one
  return (*all)[runtime.backend() == gpu::Backend::cuda ? 0 : 1];
}

/// A lane for as long as it lives. Throws Failure: EAGAIN, EINTR, ECANCELED.
class TakenLane {
 public:
  TakenLane(Handle& handle, Runtime& runtime, const Interrupt& interrupt) {
    Idle idle;
    const std::uint64_t start = monotonic_ns();
    std::uint64_t asked = start;
    for (std::size_t i = caller_number();; ++i) {
      Lane& lane = lanes_of(runtime)[i % kLanes];
      if (lane.try_take()) {
        lane_ = &lane;
        return;
      }
      if (!idle.pause(handle.turn())) continue;
      if (handle.given_up()) fail(ECANCELED, "stage", "the device is being closed");
      const std::uint64_t now = monotonic_ns();
      if (now - start > handle.policy().deadline_ns) {
        fail(EAGAIN, "stage", "8 requests of other threads are being staged, and none has ended for long",
             "let fewer threads stage at once, or register memory that the device reaches");
      }
      if (interrupt.asked == nullptr || now - asked < kInterruptInterval) continue;
      asked = now;
      if (interrupt.asked(interrupt.context))
        fail(EINTR, "stage", "interrupted while other requests were being staged");
    }
  }
  ~TakenLane() { lane_->give_back(); }
  TakenLane(const TakenLane&) = delete;
  TakenLane& operator=(const TakenLane&) = delete;
  Lane* operator->() const { return lane_; }
  Lane& operator*() const { return *lane_; }

 private:
  Lane* lane_ = nullptr;
};

class StagedRun {
 public:
  StagedRun(Handle& handle, const Transfer& transfer, Lane& lane, const memory::GpuBuffer& gpu,
            const Interrupt& interrupt)
      : handle_(handle), t_(transfer), lane_(lane), gpu_(gpu), interrupt_(interrupt) {
    // Enough pieces to keep both sides at work, and few enough that what each costs does not show.
    const std::uint64_t unit = handle.identity().block_size;
    piece_ = handle.geometry().bytewise
                 ? kFilePiece
                 : std::clamp(align_up(t_.size / 8, std::uint64_t{64} * 1024), kSmallestPiece, kLargestPiece);
    piece_ = std::max(align_down(piece_, unit), unit);
    pieces_ = (t_.size + piece_ - 1) / piece_;
    slots_ = std::min<std::uint64_t>(lane.area().size / piece_, pieces_);
    by_kernel_ = lane.has_kernels() && gpu_address(0) % 16 == 0 && piece_ % 16 == 0 &&
                 (t_.opcode == Opcode::read || t_.size > kSmallWrite);
    if (by_kernel_) {
      blocks_ = static_cast<std::uint32_t>(std::min(slots_, kBlocks));
      for (std::uint32_t i = 0; i < blocks_; ++i) lane.copied().host[i].store(0, std::memory_order_relaxed);
      lane.allowed().host->store(0, std::memory_order_relaxed);
    } else if (lane.copied().host != nullptr) {
      lane.copied().host->store(lane.count, std::memory_order_relaxed);
    }
  }

  std::int64_t run() {
    const bool reads = t_.opcode == Opcode::read;
    // The device begins before the kernel is launched, whose turn comes after its first piece.
    if (by_kernel_ && reads) read_turn();
    if (by_kernel_ && failed_ == 0) launch();
    while (reads ? copied() < pieces_ : finished_ < pieces_) {
      const bool moved = reads ? read_turn() : write_turn();
      if (failed_ != 0) return fail_with(failed_);
      if (!moved && look_around()) return fail_with(interrupted());
    }
    return static_cast<std::int64_t>(std::min(t_.size, end_));
  }

 private:
  std::uint64_t bytes_of(std::uint64_t piece) const { return std::min(piece_, t_.size - piece * piece_); }
  std::byte* slot(std::uint64_t piece) const { return lane_.area().data + piece % slots_ * piece_; }
  gpu::Address gpu_address(std::uint64_t piece) const { return t_.buffer.address + t_.buffer_offset + piece * piece_; }

  /// Pieces whose copy is done.
  std::uint64_t copied() {
    if (by_kernel_) {
      // Each block says how many of its own are.
      std::uint64_t all = pieces_;
      for (std::uint64_t i = 0; i < blocks_; ++i) {
        all = std::min(all, lane_.copied().host[i].load(std::memory_order_acquire) * blocks_ + i);
      }
      return all;
    }
    if (lane_.copied().host == nullptr) return synchronized_;
    return lane_.copied().host->load(std::memory_order_acquire) - (lane_.count - enqueued_);
  }

  /// Device first, then the copy.
  bool read_turn() {
    bool moved = false;
    while (begun_ < pieces_ && begun_ - finished_ < kFlight && begun_ < copied() + slots_) {
      begin(begun_++);
      moved = true;
    }
    moved = turn_operations() || moved;
    while (enqueued_ < finished_ && failed_ == 0) {
      enqueue(enqueued_);
      moved = true;
    }
    return moved;
  }

  /// The copy first, then the device.
  bool write_turn() {
    bool moved = false;
    while (enqueued_ < pieces_ && enqueued_ < finished_ + slots_ && failed_ == 0) {
      enqueue(enqueued_);
      moved = true;
    }
    const std::uint64_t there = copied();
    while (begun_ < there && begun_ - finished_ < kFlight) {
      begin(begun_++);
      moved = true;
    }
    return turn_operations() || moved;
  }

  void begin(std::uint64_t piece) {
    Transfer& transfer = transfers_[piece % kFlight];
    transfer = t_;
    transfer.buffer = lane_.area().slab;
    transfer.buffer_offset = lane_.area().offset + static_cast<std::uint64_t>(slot(piece) - lane_.area().data);
    transfer.offset = t_.offset + piece * piece_;
    transfer.size = bytes_of(piece);
    operations_[piece % kFlight].emplace(handle_, transfer);
  }

  /// A turn of each operation; those that are done are taken in order.
  bool turn_operations() {
    bool moved = false;
    for (std::uint64_t piece = finished_; piece < begun_; ++piece) operations_[piece % kFlight]->turn();
    while (finished_ < begun_ && operations_[finished_ % kFlight]->turn()) {
      const std::int64_t result = operations_[finished_ % kFlight]->result();
      handle_.count_staged(result < 0 ? last_error().completed : static_cast<std::uint64_t>(result));
      const std::uint64_t wanted = bytes_of(finished_);
      if (result >= 0 && static_cast<std::uint64_t>(result) < wanted) {
        // The file has become shorter. All of the piece is copied: zeros, and nothing that was here before.
        std::memset(slot(finished_) + result, 0, wanted - static_cast<std::uint64_t>(result));
        end_ = std::min(end_, finished_ * piece_ + static_cast<std::uint64_t>(result));
      }
      if (result < 0) {
        right_ = finished_ * piece_ + last_error().completed;
        failed_ = static_cast<int>(-result);
        return true;
      }
      operations_[finished_ % kFlight].reset();
      ++finished_;
      moved = true;
    }
    return moved;
  }

  /// One launch copies all pieces, each when it is allowed to.
  void launch() {
    gpu::Pieces pieces;
    pieces.reached = lane_.copied().device;
    pieces.reached_at = ~std::uint64_t{0};
    pieces.allowed = lane_.allowed().device;
    const gpu::Address area = lane_.area().device;
    pieces.gathers = t_.opcode == Opcode::write;
    pieces.copy = {pieces.gathers ? gpu_address(0) : area, pieces.gathers ? area : gpu_address(0), t_.size};
    pieces.piece = piece_;
    pieces.area = slots_ * piece_;
    pieces.count = pieces_;
    pieces.most = std::min(piece_, t_.size);
    pieces.tell = gpu::Pieces::copied;
    pieces.blocks = blocks_;
    if (const int code = gpu_.runtime().enqueue_pieces(gpu_.place(), lane_.stream(), pieces); code != 0)
      refuse_copy(code);
  }

  void enqueue(std::uint64_t piece) {
    if (by_kernel_) return lane_.allowed().host->store(++enqueued_, std::memory_order_release);
    Runtime& runtime = gpu_.runtime();
    const gpu::Place& place = gpu_.place();
    int code =
        t_.opcode == Opcode::read
            ? runtime.enqueue_to_device(place, lane_.stream(), gpu_address(piece), slot(piece), bytes_of(piece))
            : runtime.enqueue_from_device(place, lane_.stream(), slot(piece), gpu_address(piece), bytes_of(piece));
    ++lane_.count;
    ++enqueued_;
    if (code == 0 && lane_.copied().host != nullptr) {
      const WordOp tell[] = {{WordOp::Kind::write, lane_.copied().device, lane_.count}};
      code = runtime.enqueue_words(place, lane_.stream(), tell);
    } else if (code == 0) {
      code = runtime.synchronize(place, lane_.stream());
      synchronized_ = enqueued_;
    }
    if (code != 0) refuse_copy(code);
  }

  [[gnu::cold]] void refuse_copy(int code) {
    Error& error = last_error() = Error{};
    error.code = failed_ = EIO;
    right_ = 0;
    set_cause(error, "the GPU did not copy to or from staging memory: %s", gpu_.runtime().words(code).c_str());
    set_hint(error, "a kernel of the program may have faulted; no byte of the request is to be used");
  }

  /// Nothing moved. True: the caller was interrupted.
  bool look_around() {
    if (!idle_.pause(handle_.turn())) return false;
    const std::uint64_t now = ticks();
    if (looked_ == 0) looked_ = moved_at_ = now;
    if (now - moved_at_ > ns_to_ticks(kPatience) && begun_ == finished_ && enqueued_ != 0 && lane_.copied().host) {
      // Only copies are waited for, and they take long: the driver says whether they can still come to an end.
      moved_at_ = now;
      bool ended = !by_kernel_;
      const int code = by_kernel_ ? gpu_.runtime().poll(gpu_.place(), lane_.stream(), ended)
                                  : gpu_.runtime().synchronize(gpu_.place(), lane_.stream());
      if (code != 0 || (by_kernel_ && ended && copied() < enqueued_)) refuse_copy(code);
      return false;
    }
    if (interrupt_.asked == nullptr || now - looked_ < ns_to_ticks(kInterruptInterval)) return false;
    looked_ = now;
    return interrupt_.asked(interrupt_.context);
  }

  int interrupted() {
    right_ = 0;
    Error& error = last_error() = Error{};
    error.code = EINTR;
    set_cause(error, "interrupted while the device was at work");
    return EINTR;
  }

  /// The operations that are still in flight are let go of, and what was enqueued is waited for: the caller may free
  /// its memory next.
  std::int64_t fail_with(int code) {
    Error error = last_error();
    for (auto& operation : operations_) operation.reset();
    if (by_kernel_) lane_.allowed().host->store(gpu::Pieces::kGivenUp, std::memory_order_release);
    gpu_.runtime().synchronize(gpu_.place(), lane_.stream());
    if (begun_ != finished_) lane_.give_area_up(gpu_.runtime());
    set_transfer(error, handle_, t_);
    error.completed = t_.opcode == Opcode::read ? std::min(right_, enqueued_ * piece_) : right_;
    last_error() = error;
    return -code;
  }

  Handle& handle_;
  const Transfer& t_;
  Lane& lane_;
  const memory::GpuBuffer& gpu_;
  const Interrupt& interrupt_;
  bool by_kernel_ = false;
  std::uint32_t blocks_ = 1;
  std::uint64_t piece_ = 0, pieces_ = 0, slots_ = 0;
  std::uint64_t begun_ = 0, finished_ = 0;         ///< pieces at the device, in order
  std::uint64_t enqueued_ = 0, synchronized_ = 0;  ///< pieces at the copy engine, in order
  std::uint64_t right_ = 0;
  std::uint64_t end_ = ~std::uint64_t{0};  ///< where a read met the end of the file
  int failed_ = 0;
  Idle idle_;
  std::uint64_t looked_ = 0, moved_at_ = 0;
  std::array<Transfer, kFlight> transfers_{};
  std::array<std::optional<Operation>, kFlight> operations_{};
};

std::int64_t refuse(Handle& handle, const Transfer& t, const Error& why) {
  Error& error = last_error() = why;
  set_transfer(error, handle, t);
  return -error.code;
}

}  // namespace

std::int64_t run_staged(Handle& handle, const Transfer& whole, const Interrupt& interrupt) try {
  Error error;
  Transfer t = whole;
  if (const Refusal refusal = check_transfer(handle.geometry(), t); refusal != Refusal::none) {
    set_refusal(error, handle, t, refusal);
    return refuse(handle, t, error);
  }
  if (handle.geometry().bytewise && t.opcode == Opcode::read) {
    const std::uint64_t end = handle.end_at(t.offset);
    t.size = t.offset < end ? std::min(t.size, end - t.offset) : 0;
  }
  if (t.size == 0) return 0;
  // The runtime of the memory is known while the registration is held; some ledger must do so before there is a lane.
  static memory::Ledger* const door = [] {
    auto* made = new memory::Ledger("of staged requests");  // NOLINT: callers are counted in it at any time
    memory::Registry::instance().add_ledger(*made);
    return made;
  }();
  memory::Hold hold;
  Idle idle;
  while ((hold = memory::hold_shared(*door, t.buffer)) == memory::Hold::closing) idle.pause(handle.turn());
  if (hold == memory::Hold::stale) {
    set_refusal(error, handle, t, Refusal::stale);
    return refuse(handle, t, error);
  }
  struct Held {
    memory::Ledger& ledger;
    std::uint32_t registration;
    ~Held() { ledger.remove_shared(registration); }
  } held{*door, t.buffer.registration->index()};
  const memory::GpuBuffer& gpu = *t.buffer.registration->gpu();
  if (!gpu.is_alive()) {
    set_freed(error);
    return refuse(handle, t, error);
  }
  const TakenLane lane(handle, gpu.runtime(), interrupt);
  lane->prepare(gpu.runtime(), gpu.place());
  return StagedRun(handle, t, *lane, gpu, interrupt).run();
} catch (const Failure& failure) {
  return refuse(handle, whole, failure.error());
}

}  // namespace ugds::engine
