// SPDX-License-Identifier: Apache-2.0
//
// One queue pair: rings, command identifiers, list pages, phase, doorbells, and the ledger of what its commands hold.
//
// Ownership. Whoever submits or reaps owns the queue pair for that moment, by `try_acquire`; it is never held while
// waiting. Whoever waits reaps for everyone. So callers share a queue pair at depth, and one is enough.
//
// Memory order. A completion's last dword carries the phase: it is loaded first, with acquire, and the rest after. A
// submission entry and its lists are written before the doorbell (doorbell.hpp). What a command did to memory happens
// before its request's `done` is seen.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.hpp"
#include "device/device.hpp"
#include "memory/registry.hpp"
#include "nvme/commands.hpp"
#include "nvme/prp.hpp"
#include "queue/doorbell.hpp"
#include "queue/request.hpp"
#include "queue/statistics.hpp"
#include "queue/trace.hpp"
#include "queue/wakeup.hpp"

namespace ugds::queue {

/// What the slot of a command in flight remembers.
struct alignas(64) Command {
  Request* request = nullptr;  ///< the queue's own `nobody_` where its caller went away
  std::uint64_t offset = 0;    ///< of its data in the request
  std::uint32_t bytes = 0;
  std::uint16_t list = kNoList;  ///< first of its list pages, with kTraced set where it is recorded
  bool is_write = false;
  std::uint32_t id = kNoId;  ///< its identifier while it is in flight
  std::uint64_t staged = 0;  ///< when, in ticks
  std::uint32_t registration = kNoRegistration;

  static constexpr std::uint32_t kNoRegistration = memory::Ledger::kNone;
  static constexpr std::uint16_t kNoList = 0xffff;
  /// A command that is recorded is told by what is looked at anyway when one retires.
  static constexpr std::uint16_t kTraced = 0x8000, kTracedNoList = 0xfffe;
  static constexpr std::uint32_t kNoId = 0x10000;

  bool in_flight() const { return id != kNoId; }
};

struct Shape {
  std::uint16_t id = 0;
  std::uint32_t depth = 64;             ///< entries of the submission ring, at least 2; one is always left free
  std::uint32_t completion_depth = 64;  ///< of the completion ring, at least `depth`
  std::uint64_t page_size = 4096;       ///< CC.MPS
  std::uint32_t list_pages = 64;        ///< for commands over more than two pages
};

class QueuePair {
 public:
  /// Allocates and maps the rings; the controller does not know of them yet. Throws Failure, all undone.
  QueuePair(device::Device& device, const Shape& shape, Doorbell submission, Doorbell completion);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  std::uint16_t id() const { return shape_.id; }
  std::uint32_t depth() const { return shape_.depth; }
  std::uint32_t completion_depth() const { return shape_.completion_depth; }
  Iova submission_ring() const { return submission_memory_.iova(0); }
  Iova completion_ring() const { return completion_memory_.iova(0); }
  const Statistics& statistics() const { return statistics_; }
  /// How to sleep for completions; nullptr where they are polled for.
  Wakeup* wakeup() const { return wakeup_.get(); }
  /// Before the controller knows of the queue: the completion doorbell will be rung for every completion, since a
  /// controller may leave out interrupts while it sees entries that nobody has taken.
  void use_wakeup(std::unique_ptr<Wakeup> wakeup);
  /// Submission doorbell stores: as many as commands staged, but for those that shared one.
  std::uint64_t doorbells() const { return statistics_.commands() + load() - statistics_.coalesced.get(); }
  /// Commands in flight; a hint for whoever does not own the queue.
  std::uint32_t load() const { return depth_ - 1 - free_count_.load(std::memory_order_relaxed); }

  bool try_acquire() {
    return owner_.load(std::memory_order_relaxed) == 0 && owner_.exchange(1, std::memory_order_acquire) == 0;
  }
  void release() { owner_.store(0, std::memory_order_release); }

  // --- For the owner -----------------------------------------------------------------------------------------------

  /// Whether a command with `lists` list pages can be staged now. Never while the queue is traced: the short way
  /// (engine/one_command.hpp), which asks this, pays nothing for tracing, and leaves requests to the general one.
  bool has_room(std::uint32_t lists) const {
    return free_count_.load(std::memory_order_relaxed) != 0 && static_cast<std::int32_t>(lists) <= free_lists_;
  }
  /// The same for who calls record(), traced or not.
  bool has_room_recorded(std::uint32_t lists) const {
    return free_count_.load(std::memory_order_relaxed) != 0 &&
           static_cast<std::int32_t>(lists) <= free_lists_ + hidden_lists_;
  }

  /// The ring's entry for the next command. The caller, who has checked has_room, fills it and then stages it; nothing
  /// is rung yet.
  nvme::SubmissionEntry& next() { return submission_[tail_]; }
  /// Stages next() over `bytes` of held memory: its data pointer is set here. `registration` is held in ledger();
  /// `offset` is the data's place in the request.
  void stage_data(Request& request, bool is_write, std::uint32_t registration, const nvme::PageAddresses& memory,
                  std::uint64_t offset, std::uint32_t bytes);
  /// Stages next() without data.
  void stage(Request& request) { push(request, next(), false, Command::kNoRegistration, Command::kNoList, 0, 0); }
  /// Stages next(), whose data is one list page of the queue's own, and returns that page, to be filled before ring().
  std::uint64_t* stage_with_page(Request& request);
  /// Records the command that was just staged, where the queue is traced: its data's place on the device, and when the
  /// request reached the library. Before it is rung.
  void record(std::uint64_t offset, std::uint32_t bytes, std::uint64_t submitted, std::uint8_t flags) {
    if (trace_ != nullptr) [[unlikely]]
      record_staged(offset, bytes, submitted, flags);
  }
  /// Tells the controller of everything staged, if anything was.
  void ring() {
    if (rung_tail_ == tail_) return;
    statistics_.coalesced.add((tail_ + depth_ - rung_tail_) % depth_ - 1);
    ring_staged();
    if (trace_ != nullptr) [[unlikely]]
      trace_->rung(ticks());
  }
  /// The same, for who has just staged one command that is not recorded.
  void ring_staged() {
    rung_tail_ = tail_;
    submission_doorbell_.ring(tail_);
  }
  /// Retires the completions that are there. Returns how many.
  std::uint32_t reap();
  /// The same, and stops when `request` is done.
  void reap_until(const Request& request) {
    while (reap_one() && request.done.load(std::memory_order_relaxed) == 0) {
    }
  }
  /// Whether the controller has posted a completion that no command was waiting for, since the last restart. It cannot
  /// be trusted then: its next one may name a command that is not done. May be asked by anybody.
  bool distrusted() const { return distrusted_.load(std::memory_order_relaxed); }
  memory::Ledger& ledger() { return ledger_; }

  /// Takes a request's commands from it: they are retired for their holds alone. For a caller that goes away.
  void orphan(Request& request);
  /// Counts a staged command that is not the first of its request.
  void count_continued() { statistics_.continued.add(1); }
  /// Where what is staged from now on is recorded; nullptr where nothing is. Gives the one before.
  std::unique_ptr<Trace> trace_into(std::unique_ptr<Trace> trace);
  Trace* trace() const { return trace_.get(); }
  /// When the request's oldest command was staged, in ticks; 0 if it has none in flight. `cid` gets its identifier.
  std::uint64_t oldest(const Request& request, std::uint16_t& cid) const;
  /// Whether a command is still in flight, by identifier and the time that `oldest` gave.
  bool is_in_flight(std::uint16_t cid, std::uint64_t staged) const;

  /// The controller is known to have stopped: retires everything in flight as failed with `status`, and puts the rings
  /// into their initial state, with new doorbells.
  void restart(std::uint16_t status, Doorbell submission, Doorbell completion);
  /// Nothing that is posted from now on is taken for a completion, until a restart.
  void disbelieve() { phase_ = kNoPhase; }
  /// The controller may still touch the rings and lists: their memory is never given back.
  void leak();

 private:
  std::uint64_t* list_entries(std::uint16_t page) const {
    return reinterpret_cast<std::uint64_t*>(list_memory_.data() + page * shape_.page_size);
  }
  std::uint64_t list_iova(std::uint16_t page) const { return list_memory_.iova(page * shape_.page_size).value; }
  void push(Request& request, nvme::SubmissionEntry& entry, bool is_write, std::uint32_t registration,
            std::uint16_t list, std::uint64_t offset, std::uint32_t bytes);
  std::uint16_t build_lists(nvme::SubmissionEntry& entry, const nvme::PageAddresses& memory, std::uint32_t bytes);
  void count(std::uint32_t change) {
    free_count_.store(free_count_.load(std::memory_order_relaxed) + change, std::memory_order_relaxed);
  }
  std::uint16_t take_lists(std::uint32_t count);
  void give_lists(std::uint16_t first);
  void record_staged(std::uint64_t offset, std::uint32_t bytes, std::uint64_t submitted, std::uint8_t flags);
  void let_go(std::uint32_t slot, std::uint16_t status);
  bool reap_one();
  void retire(std::uint32_t slot, std::uint16_t status, std::uint32_t result, bool stopped);
  void fail(const Command& command, std::uint16_t status, bool stopped);
  void distrust();
  void turn_head();
  void set_next_turn();
  void initialise_rings();

  static constexpr std::uint32_t kNoPhase = 2;

  // What every request touches, by the owner alone but for the two atomics.
  alignas(64) std::atomic<std::uint32_t> owner_{0};
  std::atomic<std::uint32_t> free_count_{0};  ///< identifiers, and with them ring entries
  nvme::SubmissionEntry* submission_ = nullptr;
  nvme::CompletionEntry* completion_ = nullptr;
  Command* commands_ = nullptr;
  std::uint16_t* free_ids_ = nullptr;  ///< a ring: an identifier rests as long as possible before it is used again
  std::uint32_t depth_ = 0;
  std::uint32_t tail_ = 0;
  std::uint32_t rung_tail_ = 0;
  std::uint32_t head_ = 0;     ///< of the completion queue
  std::uint32_t turning_ = 0;  ///< the head at which something is to be done: see turn_head()
  std::uint32_t next_free_ = 0;
  std::uint32_t id_mask_ = 0;  ///< of a slot's number in an identifier, and of a place in the ring of free ones
  std::uint32_t phase_ = 1;
  std::uint16_t first_list_ = Command::kNoList;
  std::int32_t free_lists_ = 0;  ///< less hidden_lists_
  Doorbell submission_doorbell_;
  Doorbell completion_doorbell_;
  std::atomic<bool> distrusted_{false};

  Request nobody_;  ///< whose commands orphans are
  Shape shape_;
  device::DmaMemory submission_memory_, completion_memory_, list_memory_;
  std::vector<Command> command_slots_;
  std::vector<std::uint16_t> id_slots_;
  std::vector<std::uint16_t> next_list_;
  std::unique_ptr<Wakeup> wakeup_;
  std::unique_ptr<Trace> trace_;
  std::int32_t hidden_lists_ = 0;  ///< while the queue is traced, more than there are
  memory::Ledger ledger_;
  Statistics statistics_;
};

// The path of every request, inline so that it is one run of instructions.

inline void QueuePair::push(Request& request, nvme::SubmissionEntry& entry, bool is_write, std::uint32_t registration,
                            std::uint16_t list, std::uint64_t offset, std::uint32_t bytes) {
  // Ring positions of free identifiers are [next_free_, next_free_ + free_count_); see retire().
  const std::uint32_t slot = free_ids_[next_free_++ & id_mask_];
  count(-1u);
  Command& command = commands_[slot];
  const std::uint64_t now = ticks();
  // Above the slot's number, what nobody can foresee: a completion that the controller makes up, or posts late, does
  // not pass for one of a command that has the slot by then.
  const auto cid = static_cast<std::uint16_t>(slot | (static_cast<std::uint32_t>(now) & ~id_mask_));
  entry.cid = cid;
  command.request = &request;
  command.offset = offset;
  command.bytes = bytes;
  command.list = list;
  command.is_write = is_write;
  command.id = cid;
  command.staged = now;
  command.registration = registration;
  ++request.in_flight;
  if (++tail_ == depth_) tail_ = 0;
}

inline void QueuePair::stage_data(Request& request, bool is_write, std::uint32_t registration,
                                  const nvme::PageAddresses& memory, std::uint64_t offset, std::uint32_t bytes) {
  nvme::SubmissionEntry& entry = next();
  const std::uint64_t first = memory.at(0);
  const std::uint64_t in_first = shape_.page_size - (first & (shape_.page_size - 1));
  std::uint16_t list = Command::kNoList;
  entry.prp1 = first;
  if (bytes > in_first) [[unlikely]] {
    if (bytes - in_first <= shape_.page_size) {
      entry.prp2 = memory.at(in_first);
    } else {
      list = build_lists(entry, memory, bytes);
    }
  }
  push(request, entry, is_write, registration, list, offset, bytes);
}

inline void QueuePair::retire(std::uint32_t slot, std::uint16_t status, std::uint32_t result, bool stopped) {
  Command& command = commands_[slot];
  command.id = Command::kNoId;
  free_ids_[(next_free_ + free_count_.load(std::memory_order_relaxed)) & id_mask_] = static_cast<std::uint16_t>(slot);
  count(1);
  if (command.list != Command::kNoList) let_go(slot, status);
  ledger_.remove(command.registration);
  statistics_.latency[latency_bucket(ticks() - command.staged)].add(1);
  if (status == 0) [[likely]] {
    statistics_.bytes[command.is_write].add(command.bytes);
  } else {
    fail(command, status, stopped);
  }
  Request* request = command.request;
  request->result = result;
  if (--request->in_flight == 0 && (request->complete_when_idle || request->failed())) {
    request->done.store(1, std::memory_order_release);
  }
}

inline bool QueuePair::reap_one() {
  nvme::CompletionEntry& entry = completion_[head_];
  const nvme::CompletionWord word{std::atomic_ref(entry.last).load(std::memory_order_acquire)};
  if (static_cast<std::uint32_t>(word.phase()) != phase_) return false;
  const std::uint32_t slot = word.cid() & id_mask_;
  if (commands_[slot].id == word.cid() && entry.sq_head < depth_) [[likely]] {
    retire(slot, word.status(), entry.result, false);
  } else {
    distrust();
  }
  if (++head_ == turning_) [[unlikely]]
    turn_head();
  return true;
}

inline std::uint32_t QueuePair::reap() {
  std::uint32_t reaped = 0;
  while (reaped != depth_ && reap_one()) ++reaped;  // bounded: others may want the queue
  return reaped;
}

}  // namespace ugds::queue
