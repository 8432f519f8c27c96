// SPDX-License-Identifier: Apache-2.0
//
// A request on its way through one queue pair: cut into commands, staged as there is room, waited for. It lives on its
// caller's stack. This is where every way in comes together.
//
//   Operation operation(handle, transfer);
//   while (!operation.turn()) {}
//   return operation.result();
#pragma once

#include <cstdint>

#include "engine/durability.hpp"
#include "engine/handle.hpp"
#include "engine/idle.hpp"
#include "engine/transfer.hpp"
#include "memory/registry.hpp"
#include "nvme/commands.hpp"
#include "queue/line.hpp"
#include "queue/request.hpp"

namespace ugds::engine {

/// A small number for the calling thread, from 1; 0 until it is given one. Initial-exec: one load instead of a call,
/// and four bytes fit into what the loader keeps for libraries that are opened late.
extern constinit thread_local std::uint32_t this_caller __attribute__((tls_model("initial-exec")));
std::uint32_t number_caller();

/// For spreading threads over queue pairs and counters.
inline std::uint32_t caller_number() { return this_caller != 0 ? this_caller : number_caller(); }

/// What became of one command of a read or write.
enum class Staged : std::uint8_t {
  yes,
  closing,   ///< its registration is being closed: try again shortly
  stale,     ///< its registration is closed
  unmapped,  ///< its registration is not mapped to this device
};

/// Stages one command of `opcode` over `bytes` of a registration from `in_buffer`, for the blocks at `position`. The
/// caller owns the queue pair, which has room, and has checked the ranges and the handle's state. `offset` is the place
/// in the request, `extra` as in queue::Command, `now` in ticks. Commands that move data are made here, and by runs of
/// small ones in Batch::submit.
inline Staged stage_command(Handle& handle, queue::QueuePair& pair, queue::Request& request, nvme::Opcode opcode,
                            const memory::Reference& buffer, std::uint64_t in_buffer, std::uint64_t position,
                            std::uint64_t offset, std::uint32_t bytes, std::uint32_t control, std::uint8_t extra,
                            std::uint64_t now) {
  const Handle::Geometry& g = handle.geometry();
  const memory::Hold hold = memory::hold(pair.ledger(), buffer);
  if (hold != memory::Hold::held) [[unlikely]]
    return hold == memory::Hold::closing ? Staged::closing : Staged::stale;
  const std::uint32_t registration = buffer.registration->index();
  const std::uint64_t* pages = buffer.registration->pages(g.number);
  if (pages == nullptr) [[unlikely]] {
    pair.ledger().remove(registration);
    return Staged::unmapped;
  }
  pair.next() =
      nvme::block_command(opcode, g.namespace_id, Lba(position >> g.block_shift), bytes >> g.block_shift, control);
  pair.stage_data(request, opcode == nvme::Opcode::write, registration, {pages, buffer.page_offset() + in_buffer},
                  offset, bytes, extra, now);
  return Staged::yes;
}

/// What a command's retirement is more than most are.
constexpr std::uint8_t extra_of(bool paced, bool background, bool durable) {
  const int pace = background ? queue::Command::kPaced | queue::Command::kBackground
                   : paced    ? queue::Command::kPaced
                              : 0;
  return static_cast<std::uint8_t>(pace | (durable ? queue::Command::kDurable : 0));
}

/// Records the command that was just staged, whose registration it holds. `offset` is its place in the request.
inline void record_command(queue::QueuePair& pair, const memory::Reference& buffer, std::uint64_t position,
                           std::uint64_t offset, std::uint32_t bytes, bool durable, std::uint64_t submitted) {
  if (pair.trace() == nullptr) [[likely]]
    return;
  const auto kind = static_cast<unsigned>(buffer.registration->kind());
  const bool is_staged = buffer.registration->is_staging();
  const auto route = static_cast<unsigned>(is_staged ? memory::Route::staged : memory::Route::direct);
  pair.record(
      position, bytes, submitted,
      static_cast<std::uint8_t>((offset != 0 ? queue::kTraceContinued : 0) | (durable ? queue::kTraceDurable : 0) |
                                kind << queue::kTraceMemoryShift | route << queue::kTraceRouteShift));
}

class Operation {
 public:
  /// Checks the arguments; on a bad one the operation is done at once. The transfer outlives the operation. `pair`:
  /// goes there, whatever Handle::choose would say.
  Operation(Handle& handle, const Transfer& transfer, queue::QueuePair* pair = nullptr)
      : handle_(handle),
        transfer_(transfer),
        request_(own_request_),
        pair_(pair),
        pinned_(pair != nullptr),
        submitted_(handle.tracing() ? ticks() : 0) {
    if (!check()) request_.done.store(1, std::memory_order_relaxed);
  }
  /// Goes on with a request whose only command was staged on `pair` (one_command.hpp).
  Operation(Handle& handle, const Transfer& transfer, queue::QueuePair& pair, queue::Request& request)
      : handle_(handle),
        transfer_(transfer),
        request_(request),
        pair_(&pair),
        staged_(transfer.size),
        all_staged_(true) {
    choose_way();
  }
  /// Abandons what is still in flight.
  ~Operation() {
    if (!done() || place_.taken) [[unlikely]]
      abandon();
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  bool done() const { return request_.done.load(std::memory_order_acquire) != 0; }
  /// One poll turn: stages what there is room for, or reaps for everyone, or idles. True: done, for good.
  bool turn() { return (done() || (all_staged_ ? wait() : submit())) && (!request_.failed() || !again()); }
  /// Bytes transferred, or -errno with last_error() filled. Only when a turn has said that it is done.
  std::int64_t result() {
    if (learns_) [[unlikely]]
      handle_.scheduler().learn(transfer_.size, sleeps_, born_);
    if (transfer_.opcode == nvme::Opcode::flush) settle_flush();
    if (!request_.failed()) [[likely]]
      return static_cast<std::int64_t>(transfer_.size);
    return explain();
  }
  /// Lets go of the request: its commands run on and keep their memory held until they retire. Then it is done.
  [[gnu::cold]] void abandon();

 private:
  bool check();
  void choose_way();
  bool submit();
  bool wait();
  bool stage(queue::QueuePair& pair);
  bool stage_pieces(queue::QueuePair& pair);
  bool stage_piece(queue::QueuePair& pair, std::uint64_t now);
  void queue_up(queue::QueuePair& pair, bool staged);
  void end_staging() {
    all_staged_ = true;
    request_.on_idle = queue::OnIdle::done;
  }
  bool rest();
  // Cold.
  [[gnu::cold]] bool doze(queue::Wakeup& wakeup);
  [[gnu::cold]] bool refuse_piece(Staged staged);
  [[gnu::cold]] void stage_other(queue::QueuePair& pair);
  [[gnu::cold]] bool attend();
  [[gnu::cold]] void refuse(Refusal refusal);
  [[gnu::cold]] bool again();
  [[gnu::cold]] void settle_flush();
  [[gnu::cold]] std::int64_t explain();

  Handle& handle_;
  const Transfer& transfer_;
  queue::Request own_request_;
  queue::Request& request_;
  queue::QueuePair* pair_ = nullptr;  ///< fixed once a command is in flight
  bool pinned_ = false;               ///< and from the beginning
  queue::Line::Place place_;          ///< where it waits for room
  std::uint64_t staged_ = 0;          ///< bytes
  bool all_staged_ = false;
  std::uint64_t submitted_ = 0;  ///< ticks, where the device is traced
  std::uint64_t segment_ = 0;    ///< of a vectored request: the next one's number, and bytes staged of it
  std::uint64_t in_segment_ = 0;
  Idle idle_;
  std::uint32_t rests_ = 0;
  std::uint64_t waits_since_ = 0;  ///< see Pacer::take
  bool paced_ = false, background_ = false;
  bool sleeps_ = false, learns_ = false;
  std::uint8_t retries_ = 0;
  Durability::Mark mark_{};  ///< of a flush
  Refusal refusal_ = Refusal::none;
  std::uint64_t born_ = 0;   ///< ticks, where the scheduler learns
  std::uint64_t begun_ = 0;  ///< ticks at the first look at the clock
  std::uint64_t looked_ = 0;
};

/// Asked now and then by a long wait, in the waiting thread; true ends the wait and abandons the request.
struct Interrupt {
  bool (*asked)(void* context) = nullptr;
  void* context = nullptr;
};

/// Runs a transfer to its end, in the calling thread. Bytes, or -errno with last_error() filled. Thread-safe.
std::int64_t run(Handle& handle, const Transfer& transfer);
/// The same; -EINTR where `interrupt` ended it.
std::int64_t run(Handle& handle, const Transfer& transfer, const Interrupt& interrupt);
/// Goes on with an operation until it is done.
std::int64_t finish(Operation& operation, const Interrupt& interrupt);

/// Deallocates blocks: they read as zeros afterwards where the device promises that, and need not be kept. Of any size.
std::int64_t discard(Handle& handle, std::uint64_t offset, std::uint64_t size, const Interrupt& interrupt = {});

}  // namespace ugds::engine
