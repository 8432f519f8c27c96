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
#include <type_traits>

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

/// A request as it is submitted: Transfer's fields, with the registration that begin_run gave.
struct Wanted {
  std::uint64_t offset = 0, size = 0, buffer_offset = 0, cookie = 0;
  std::uint64_t write = 0;  ///< 0 or 1; any other number is malformed
  bool durable = false;

  nvme::Opcode opcode() const {
    static_assert(static_cast<int>(nvme::Opcode::read) == 2 && static_cast<int>(nvme::Opcode::write) == 1);
    return static_cast<nvme::Opcode>(2 - write);
  }
};

/// What became of one request of a batch.
struct Done {
  std::uint64_t cookie = 0;
  std::int64_t result = 0;       ///< bytes, or -errno
  const Error* error = nullptr;  ///< where it failed; valid during the call that hands it out
};

class Batch {
 public:
  explicit Batch(Handle& handle) : handle_(handle), pair_(handle.batch_pair()), keeps_(handle.retries() != 0) {}
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  /// Makes room for `capacity` requests. Returns the generation that the other calls name. Throws Failure(EINVAL),
  /// std::bad_alloc. `priority`: of all its requests.
  std::uint32_t open(std::uint32_t capacity, Priority priority);
  /// Cancels what was not given to the device, waits for the rest within the bounds of recovery, and frees. False: it
  /// was closed before. Results that nobody collected are gone.
  bool close(std::uint32_t generation);
  /// The last generation: one that had it is not opened again.
  static constexpr std::uint32_t kLastGeneration = ~std::uint32_t{0};
  /// For tests, of one that is closed: the next generation is `odd`, as after very many.
  void age(std::uint32_t odd) { generation_ = odd - 1; }

  /// What a call answers that found the batch closed, and one that would take all or nothing.
  static constexpr std::int64_t kClosed = -1, kFull = -2, kMalformed = -3;

  /// Takes up to `count` requests, as many as there is capacity for, and gives the device what it has room for; never
  /// waits. A request that breaks a rule is taken too, and its error is collected. Returns how many were taken, or
  /// kClosed; with `all`, kFull where there is not capacity for every one.
  ///
  /// `requests` is copied and asked by number: `begin_run(i)` for the registration of the i-th, `same_buffer(i)`
  /// whether the i-th is of that one too, `requests(i)` for a Wanted. `malformed(i)` is asked, from some i on, where
  /// something is not as most requests are: true undoes the whole submission, and kMalformed is returned.
  template <class Requests, class Malformed>
  std::int64_t submit(std::uint32_t generation, std::size_t count, bool all, Requests requests, Malformed&& malformed);

  /// Waits until `least` results are there, all that can come have, or for `limit_ns`, and hands up to `most` of them
  /// to `sink(const Done&)`: copied and so cheap to copy; a state of its own is kept where it can be assigned.
  /// `interrupt` ends it early. Returns how many, or kClosed.
  template <class Sink>
  std::int64_t collect(std::uint32_t generation, std::size_t least, std::size_t most, std::uint64_t limit_ns,
                       const Interrupt& interrupt, Sink sink);

  /// Goes on until every request that was taken has been given to the device, or has failed; false: interrupted.
  bool settle(std::uint32_t generation, const Interrupt& interrupt);
  /// Whether there is nothing to wait for in settle().
  bool is_settled(std::uint32_t generation);
  /// Takes back what was not given to the device: it ends with ECANCELED, and what is right of it is told. Returns how
  /// many requests that were, or kClosed.
  std::int64_t cancel(std::uint32_t generation);

  std::uint32_t capacity() const { return capacity_; }
  /// Requests taken and not yet collected, or 0 where it is closed.
  std::uint64_t outstanding(std::uint32_t generation);
  /// The same of whichever generation it has.
  std::uint64_t outstanding();
  /// Gives the device what waits for room, for who drains it. Whether something still waits.
  bool push();
  /// Of results that nobody will collect, since the handle is closed: how many are failures, and the first. What was
  /// never given to the device is among them.
  std::uint64_t lost(Error& first);
  /// Called by a recovery, which owns the queue pair: what a reset ended, and nobody was told of yet, is submitted
  /// again, as often as the handle's policy allows.
  void submit_again();

 private:
  struct Entry : queue::ToldRequest {
    Transfer transfer;
    std::uint64_t cookie = 0;
    std::uint64_t staged = 0;     ///< bytes
    std::uint64_t submitted = 0;  ///< ticks, where the device is traced
    Entry* later = nullptr;       ///< of those that wait for room; the free ones are linked by `next`
    Entry* follower() const { return static_cast<Entry*>(next); }
    Refusal refusal = Refusal::none;
    std::uint8_t wrote = 2;  ///< 0 or 1: it went the short way, and this stands for the transfer's opcode
    std::uint8_t retries = 0;
  };
  /// Neighbouring requests of one registration, held once for all of them: see below.
  struct Run;
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
    std::uint64_t start = ticks();
    std::uint32_t rests = 0;
    bool sleeps = false;
  };

  void acquire();
  bool owns(std::uint32_t generation) const { return generation == generation_; }
  void accept(Entry& entry, const Wanted& wanted, const memory::Reference& buffer);
  bool goes_fast() const {
    return handle_.state() == State::ready && small_.first == nullptr && priority_ != Priority::background &&
           !handle_.scheduler().background_writes() && handle_.geometry().write_mask == 0 &&
           handle_.geometry().chunk >= nvme::kPageSize;
  }
  [[gnu::noinline]] Run begin_run(const memory::Reference& buffer);
  template <class Requests>
  std::size_t stage_run(queue::QueuePair::Burst& burst, const Run& run, Requests requests, std::size_t from,
                        std::size_t most, Entry*& next);
  /// Completes what a run has staged, for requests that may be submitted again.
  template <class Requests>
  [[gnu::noinline]] void keep(Entry* entry, Requests requests, std::size_t from, std::size_t count) {
    for (; count != 0; --count, entry = entry->follower()) {
      const Wanted w = requests(from++);
      entry->transfer.buffer = requests.buffer();
      entry->transfer.buffer_offset = w.buffer_offset;
      entry->transfer.durable = w.durable;
      entry->retries = 0;
    }
  }
  template <class Sink>
  std::size_t hand_out(std::size_t most, Sink& sink);
  template <class Sink>
  Sink hand_out_failed(Entry& entry, Sink sink);
  bool is_done() const { return taken_ == finished_.count(); }
  void end(Entry& entry, Refusal refusal);
  bool pump();
  bool pump_small(std::uint64_t now, std::uint32_t& quantum);
  bool pump_large(std::uint64_t now, std::uint32_t& quantum);
  Staged stage_next(Entry& entry, std::uint32_t bytes, bool paced, std::uint64_t now);
  bool has_backlog() const { return small_.first != nullptr || large_.first != nullptr; }
  void end_backlog(Refusal refusal);
  [[gnu::cold]] std::int64_t explain(Entry& entry, Error& error);
  [[gnu::cold]] bool rest(Wait& wait, std::uint32_t generation, std::uint64_t limit_ns, const Interrupt& interrupt);
  [[gnu::cold]] void doze(Wait& wait, std::uint32_t generation, std::uint64_t limit);
  [[gnu::cold]] void attend(std::uint64_t now, std::uint32_t generation);
  [[gnu::cold]] void let_go();
  [[gnu::cold]] void put_back(Entry& entry);

  Handle& handle_;
  queue::QueuePair& pair_;
  const bool keeps_;
  /// When somebody last looked at the device, and when something last moved, in ticks. Of all calls together: a caller
  /// who never waits for long looks at the device all the same.
  std::atomic<std::uint64_t> looked_{0}, moved_{0};
  // Under the ownership of the queue pair.
  std::uint32_t generation_ = 0;  ///< odd while it is open
  std::uint32_t capacity_ = 0;
  Entry* free_ = nullptr;
  queue::Finished finished_;
  std::uint64_t taken_ = 0;  ///< ever
  Backlog small_, large_;
  std::uint64_t large_staged_ = 0;  ///< large requests of which something was staged, ever
  queue::Line::Place place_;
  Priority priority_ = Priority::unsaid;
  std::unique_ptr<Entry[]> entries_;
};

/// Requests of one registration that follow each other: it is held and its addresses are found once for all of them.
struct Batch::Run {
  const std::uint64_t* pages = nullptr;
  std::uint64_t first = 0;  ///< of its first byte, in its first page
  std::uint64_t end = 0;    ///< before this a request may begin: a page's length before the last byte; 0: not held
  std::uint32_t registration = memory::Ledger::kNone;
};

/// Stages the `most` requests from `from` on, or those before the first that is not of the run's registration and
/// within a page, or breaks a rule, or is more than most are (durable). `most` does not go beyond where a ring wraps.
/// At the very ends of the device and of the registration it may say no to what is allowed: that goes the long way.
/// Returns how many were staged; `next` is the next free entry.
template <class Requests>
std::size_t Batch::stage_run(queue::QueuePair::Burst& burst, const Run& run, Requests requests, std::size_t from,
                             std::size_t most, Entry*& next) {
  constexpr std::uint64_t kPage = nvme::kPageSize;
  const Handle::Geometry& g = handle_.geometry();
  const std::uint64_t last = g.capacity - std::min(g.capacity, kPage), mask = g.block_mask;
  const std::uint32_t shift = g.block_shift, registration = run.registration;
  const std::uint64_t first = run.first, end = run.end;
  const std::uint64_t* const pages = run.pages;
  queue::QueuePair::Burst::Stretch stretch(burst, most);
  Entry* entry = next;
  for (; !stretch.full(); ++from) {
    if constexpr (!Requests::kOffsetsTell) {
      if (!requests.same_buffer(from)) break;
    }
    const Wanted w = requests(from);
    // What lies in one of the memory's pages lies in one of the controller's. A size of 0 wraps to the largest.
    const std::uint64_t at = first + w.buffer_offset, in_page = at & (kPage - 1), rest = w.size - 1;
    if (w.buffer_offset >= end || ((in_page + rest) | rest) >= kPage || w.offset > last ||
        (((w.offset | w.size) & mask) | (at & 3) | (w.write & ~std::uint64_t{1})) != 0 || w.durable) [[unlikely]]
      break;
    entry->cookie = w.cookie;
    entry->wrote = static_cast<std::uint8_t>(w.write);
    entry->transfer.offset = w.offset;
    entry->transfer.size = w.size;
    const auto bytes = static_cast<std::uint32_t>(w.size);
    stretch.stage(*entry, w.write, Lba(w.offset >> shift), bytes >> shift, 0, pages[at >> nvme::kPageShift] + in_page,
                  bytes, registration);
    entry = entry->follower();
  }
  next = entry;
  return stretch.commit(burst);
}

template <class Requests, class Malformed>
std::int64_t Batch::submit(std::uint32_t generation, std::size_t count, bool all, Requests requests,
                           Malformed&& malformed) {
  acquire();
  const std::size_t room = capacity_ - static_cast<std::size_t>(taken_ - finished_.taken());
  if (!owns(generation) || (all && count > room)) [[unlikely]] {
    const std::int64_t why = owns(generation) ? kFull : kClosed;
    pair_.release();
    return why;
  }
  const std::size_t total = std::min(count, room);
  // Requests within a page that nobody is before go to the ring as they come.
  const std::uint64_t now = ticks();
  moved_.store(now, std::memory_order_relaxed);
  queue::QueuePair::Burst burst(pair_, now, handle_.geometry().namespace_id);
  const std::uint32_t start = burst.position();
  const std::uint32_t last = start + (goes_fast() ? burst.room() : 0);
  Entry* next = free_;
  std::size_t taken = 0;
  bool asked = false, refused = false;
  while (taken != total) {
    const Run run = begin_run(requests.begin_run(taken));
    do {
      std::size_t most = 0, staged = 0;
      do {
        most = std::min<std::size_t>({total - taken, last - burst.position(), burst.stretch()});
        Entry* const begun = next;
        staged = stage_run(burst, run, requests, taken, most, next);
        if (keeps_) [[unlikely]]
          keep(begun, requests, taken, staged);
        taken += staged;
        if (staged != 0) pair_.ledger().add(run.registration, static_cast<std::uint32_t>(staged));
      } while (staged == most && staged != 0 && taken != total);
      if (taken == total || !requests.same_buffer(taken)) break;
      if (!asked) {
        asked = true;
        std::size_t i = taken;
        while (i < count && !malformed(i)) ++i;
        refused = i < count;
        if (refused) break;
      }
      Entry& entry = *next;
      next = entry.follower();
      accept(entry, requests(taken), requests.buffer());
      ++taken;
    } while (taken != total && requests.same_buffer(taken));
    if (run.registration != memory::Ledger::kNone) pair_.ledger().remove(run.registration);
    if (refused) break;
  }
  burst.commit(pair_);
  if (refused) [[unlikely]] {
    // All that was taken so far has been staged.
    pair_.take_back(burst.position() - start);
    for (Entry* entry = free_; taken != 0; entry = entry->follower(), --taken) entry->in_flight = 0;
    pair_.release();
    return kMalformed;
  }
  free_ = next;
  taken_ += taken;
  if (has_backlog()) [[unlikely]]
    pump();
  pair_.ring();
  pair_.release();
  return static_cast<std::int64_t>(taken);
}

/// Up to `most` of what has finished, to the sink.
template <class Sink>
std::size_t Batch::hand_out(std::size_t most, Sink& sink) {
  const std::size_t count = std::min<std::size_t>(most, finished_.size());
  if (count == 0) return 0;
  Sink to = sink;  // a copy in registers
  queue::ToldRequest* const first = finished_.first();
  queue::ToldRequest& last = finished_.take(count, [&](queue::ToldRequest& request) {
    auto& entry = static_cast<Entry&>(request);
    if (!entry.failed()) [[likely]] {
      to(Done{entry.cookie, static_cast<std::int64_t>(entry.transfer.size), nullptr});
    } else {
      if constexpr (std::is_copy_assignable_v<Sink>) {
        to = hand_out_failed(entry, to);
      } else {
        hand_out_failed(entry, to);
      }
    }
  });
  // All of them are free again.
  last.next = free_;
  free_ = static_cast<Entry*>(first);
  if constexpr (std::is_copy_assignable_v<Sink>) sink = to;
  return count;
}

template <class Sink>
[[gnu::cold, gnu::noinline]] Sink Batch::hand_out_failed(Entry& entry, Sink sink) {
  Error error;
  const std::int64_t result = explain(entry, error);
  sink(Done{entry.cookie, result, result < 0 ? &error : nullptr});
  return sink;
}

template <class Sink>
std::int64_t Batch::collect(std::uint32_t generation, std::size_t least, std::size_t most, std::uint64_t limit_ns,
                            const Interrupt& interrupt, Sink sink) {
  // Who waits for nothing lets the controller have a turn all the same, and looks at it now and then.
  if (least == 0) least = 1, limit_ns = 0;
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
    collected += hand_out(most - collected, sink);
    const bool done = collected >= least || collected == most || (is_done() && finished_.empty());
    pair_.release();
    if (done) return static_cast<std::int64_t>(collected);
    if (reaped != 0 || pumped) {
      const std::uint64_t now = ticks();
      moved_.store(now, std::memory_order_relaxed);
      wait.rests = 0;
      if (now - wait.start <= ns_to_ticks(limit_ns)) continue;
    }
    if (!rest(wait, generation, limit_ns, interrupt)) return static_cast<std::int64_t>(collected);
  }
}

}  // namespace ugds::engine
