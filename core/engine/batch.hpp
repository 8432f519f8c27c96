// SPDX-License-Identifier: Apache-2.0
//
// A batch: any number of requests in flight at once, whose ends are collected in the order in which they come. All of
// its memory is made at set-up.
//
// Requests that find room are staged at once, all of one submission under one doorbell; the others wait in the batch
// and are staged by turns of whoever submits or collects. Everything here happens under the ownership of the queue
// pair, and nothing of it is held while waiting: threads may submit and collect at the same time.
#pragma once

#include <cstdint>
#include <memory>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "engine/handle.hpp"
#include "engine/idle.hpp"
#include "engine/operation.hpp"
#include "engine/transfer.hpp"
#include "queue/line.hpp"
#include "queue/request.hpp"

namespace ugds::engine {

/// Most requests of one batch that may be submitted and not yet collected.
inline constexpr std::uint32_t kMaxBatchCapacity = 1u << 20;

/// What became of one request of a batch.
struct Done {
  std::uint64_t cookie = 0;
  std::int64_t result = 0;       ///< bytes, or -errno
  const Error* error = nullptr;  ///< where it failed; valid during the call that hands it out
};

class Batch {
 public:
  explicit Batch(Handle& handle) : handle_(handle), pair_(handle.batch_pair()) {}
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  /// Makes room for `capacity` requests. Returns the generation that the other calls name. Throws Failure(EINVAL),
  /// std::bad_alloc. `priority`: of all its requests.
  std::uint32_t open(std::uint32_t capacity, Priority priority);
  /// Cancels what was not given to the device, waits for the rest within the bounds of recovery, and frees. False: it
  /// was closed before. Results that nobody collected are gone.
  bool close(std::uint32_t generation);

  /// What a call answers that found the batch closed, and one that would take all or nothing.
  static constexpr std::int64_t kClosed = -1, kFull = -2;

  /// Takes up to `count` requests, as many as there is capacity for, and gives the device what it has room for; never
  /// waits. `fill(i, transfer, cookie)` fills opcode, buffer, offset, size, buffer_offset and durable of the i-th, each
  /// time all of them. A request that breaks a rule is taken too, and its error is collected. Returns how many were
  /// taken, or kClosed; with `all`, kFull where there is not capacity for every one.
  template <class Fill>
  std::int64_t submit(std::uint32_t generation, std::size_t count, bool all, Fill&& fill);

  /// Waits until `least` results are there, all that can come have, or for `limit_ns`, and hands up to `most` of them
  /// to `sink(const Done&)`. `interrupt` ends it early. Returns how many, or kClosed.
  template <class Sink>
  std::int64_t collect(std::uint32_t generation, std::size_t least, std::size_t most, std::uint64_t limit_ns,
                       const Interrupt& interrupt, Sink&& sink);

  /// Goes on until every request that was taken has been given to the device, or has failed; false: interrupted.
  bool settle(std::uint32_t generation, const Interrupt& interrupt);
  /// Takes back what was not given to the device: it ends with ECANCELED, and what is right of it is told. Returns how
  /// many requests that were, or kClosed.
  std::int64_t cancel(std::uint32_t generation);

  std::uint32_t capacity() const { return capacity_; }
  /// Requests taken and not yet collected, or 0 where it is closed.
  std::uint64_t outstanding(std::uint32_t generation);

 private:
  struct Entry : queue::ToldRequest {
    Transfer transfer;
    std::uint64_t cookie = 0;
    std::uint64_t staged = 0;  ///< bytes
    Entry* later = nullptr;    ///< of the free ones, or of those that wait
    Refusal refusal = Refusal::none;
    bool open = false;  ///< taken, and not collected
  };
  /// Those that wait for room, in order.
  struct Backlog {
    Entry* first = nullptr;
    Entry* last = nullptr;
    void push(Entry& entry);
    void pop();
  };
  /// One wait: how it idles and looks around.
  struct Wait {
    Idle idle;
    std::uint64_t start = ticks(), looked = start, moved = start;
    std::uint32_t rests = 0;
    bool sleeps = false;
  };

  void acquire();
  bool owns(std::uint32_t generation) const { return generation == generation_; }
  void accept(Entry& entry);
  bool is_done() const { return taken_ == finished_.count; }
  std::uint64_t ready() const { return finished_.count - collected_; }
  void end(Entry& entry, Refusal refusal);
  bool pump();
  bool pump_small(std::uint64_t now, std::uint32_t& quantum);
  bool pump_large(std::uint64_t now, std::uint32_t& quantum);
  Staged stage_next(Entry& entry, std::uint32_t bytes, std::uint8_t extra, std::uint64_t now);
  bool has_backlog() const { return small_.first != nullptr || large_.first != nullptr; }
  void end_backlog(Refusal refusal);
  [[gnu::cold]] void explain(Entry& entry, Error& error);
  std::int64_t free_entry(Entry& entry);
  [[gnu::cold]] bool rest(Wait& wait, std::uint32_t generation, std::uint64_t limit_ns, const Interrupt& interrupt);
  [[gnu::cold]] void doze(Wait& wait, std::uint32_t generation, std::uint64_t limit);
  [[gnu::cold]] void attend(Wait& wait, std::uint32_t generation);
  [[gnu::cold]] void let_go();

  Handle& handle_;
  queue::QueuePair& pair_;
  // Under the ownership of the queue pair.
  std::uint32_t generation_ = 0;  ///< odd while it is open
  std::uint32_t capacity_ = 0;
  Entry* free_ = nullptr;
  queue::Finished finished_;
  std::uint64_t taken_ = 0, collected_ = 0, bytes_ = 0;
  Backlog small_, large_;
  std::uint64_t large_staged_ = 0;  ///< large requests of which something was staged, ever
  queue::Line::Place place_;
  Priority priority_ = Priority::unsaid;
  std::unique_ptr<Entry[]> entries_;
};

template <class Fill>
std::int64_t Batch::submit(std::uint32_t generation, std::size_t count, bool all, Fill&& fill) {
  const Handle::Geometry& g = handle_.geometry();
  acquire();
  if (!owns(generation) || (all && count > capacity_ - (taken_ - collected_))) [[unlikely]] {
    const std::int64_t why = owns(generation) ? kFull : kClosed;
    pair_.release();
    return why;
  }
  const std::uint64_t now = ticks();
  // Small requests that nobody is before go to the ring as they come.
  const bool open = handle_.state() == State::ready && small_.first == nullptr;
  const bool background = priority_ == Priority::background;
  const memory::Registration* held = nullptr;
  std::size_t taken = 0;
  for (; taken < count && free_ != nullptr; ++taken) {
    Entry& entry = *free_;
    free_ = entry.later;
    Transfer& t = entry.transfer;
    fill(taken, t, entry.cookie);
    entry.open = true;
    const bool write = t.opcode == nvme::Opcode::write;
    // A size of 0 wraps to the largest.
    if (open && !background && t.size - 1 < g.fast[write] && ((t.offset | t.size) & g.block_mask) == 0 &&
        t.offset <= g.capacity - t.size && check_memory(t.buffer, t.buffer_offset, t.size, t.opcode) == Refusal::none &&
        pair_.has_room(g.lists_for(t.size))) [[likely]] {
      entry.on_idle = queue::OnIdle::tell;
      const Staged staged = stage_command(handle_, pair_, entry, t.opcode, t.buffer, t.buffer_offset, t.offset, 0,
                                          static_cast<std::uint32_t>(t.size), t.durable ? nvme::kForceUnitAccess : 0, 0,
                                          now, t.buffer.registration == held);
      if (staged == Staged::yes) [[likely]] {
        held = t.buffer.registration;
        continue;
      }
      entry.on_idle = queue::OnIdle::wait_to_tell;
    }
    accept(entry);
  }
  taken_ += taken;
  if (has_backlog()) [[unlikely]]
    pump();
  pair_.ring();
  pair_.release();
  return static_cast<std::int64_t>(taken);
}

/// The result of a request that succeeded, whose entry is free again; the rest goes the long way.
inline std::int64_t Batch::free_entry(Entry& entry) {
  const std::int64_t result = static_cast<std::int64_t>(entry.transfer.size);
  entry.open = entry.large = false;
  entry.later = free_;
  free_ = &entry;
  ++collected_;
  return result;
}

template <class Sink>
std::int64_t Batch::collect(std::uint32_t generation, std::size_t least, std::size_t most, std::uint64_t limit_ns,
                            const Interrupt& interrupt, Sink&& sink) {
  Wait wait;
  std::size_t collected = 0;
  for (;;) {
    acquire();
    if (!owns(generation)) [[unlikely]] {
      pair_.release();
      return collected != 0 ? static_cast<std::int64_t>(collected) : kClosed;
    }
    const std::uint32_t reaped = pair_.reap();
    const bool pumped = has_backlog() && pump();
    if (pumped) pair_.ring();
    while (collected < most && finished_.first != nullptr) {
      auto& entry = static_cast<Entry&>(finished_.take());
      if (!entry.failed()) [[likely]] {
        const std::uint64_t cookie = entry.cookie;
        sink(Done{cookie, free_entry(entry), nullptr});
      } else {
        Error error;
        explain(entry, error);
        sink(Done{entry.cookie, -error.code, &error});
      }
      ++collected;
    }
    const bool done = collected >= least || collected == most || (is_done() && ready() == 0);
    pair_.release();
    if (done) return static_cast<std::int64_t>(collected);
    if (reaped != 0 || pumped) {
      wait.moved = ticks();
      wait.rests = 0;
      if (wait.moved - wait.start <= ns_to_ticks(limit_ns)) continue;
    }
    if (!rest(wait, generation, limit_ns, interrupt)) return static_cast<std::int64_t>(collected);
  }
}

}  // namespace ugds::engine
