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

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.hpp"
#include "base/event_log.hpp"
#include "device/device.hpp"
#include "memory/registry.hpp"
#include "nvme/commands.hpp"
#include "nvme/prp.hpp"
#include "queue/doorbell.hpp"
#include "queue/line.hpp"
#include "queue/pacer.hpp"
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
  std::uint16_t list = kNoList;  ///< first of its list pages, with kLists
  std::uint8_t extra = 0;        ///< what its retirement is more than most are: kLists and the like
  std::uint8_t is_write = 0;
  std::uint32_t id = kNoId;  ///< its identifier while it is in flight
  std::uint64_t staged = 0;  ///< when, in ticks
  std::uint64_t begun = 0;   ///< the same by the pacer's clock, with kPaced
  std::uint32_t registration = kNoRegistration;

  static constexpr std::uint32_t kNoRegistration = memory::Ledger::kNone;
  static constexpr std::uint8_t kLists = 1;       ///< has list pages
  static constexpr std::uint8_t kPaced = 2;       ///< counts against what large requests may have in flight
  static constexpr std::uint8_t kBackground = 4;  ///< with kPaced: and against what background requests may
  static constexpr std::uint8_t kTraced = 8;      ///< its retirement is recorded
  static constexpr std::uint8_t kContinued = 16;  ///< not the first of its request
  static constexpr std::uint8_t kDurable = 32;    ///< a write that is durable when it completes (FUA)
  static constexpr std::uint16_t kNoList = 0xffff;
  static constexpr std::uint32_t kNoId = 0x10000;

  bool in_flight() const { return id != kNoId; }
};

struct Shape {
  std::uint16_t id = 0;
  std::uint32_t depth = 64;             ///< entries of the submission ring, at least 2; one is always left free
  std::uint32_t completion_depth = 64;  ///< of the completion ring, at least `depth`
  std::uint64_t page_size = 4096;       ///< CC.MPS
  std::uint32_t list_pages = 64;        ///< for commands over more than two pages
  Pacer* pacer = nullptr;               ///< of the device; may be missing where nothing is paced
  EventSource* events = nullptr;        ///< of the device; may be missing where nobody is told
  bool huge = false;                    ///< rings in huge pages, where some are free
  bool bytewise = false;                ///< of a device::Limits::bytewise device
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
  /// Where huge pages were asked for: why the rings are not in some, or "" where they are.
  const char* why_not_huge() const {
    return submission_memory_.huge() ? completion_memory_.why_not_huge() : submission_memory_.why_not_huge();
  }
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
  /// Commands ever staged, modulo 2^32.
  std::uint32_t staged() const { return next_free_.load(std::memory_order_relaxed); }
  /// Commands in flight; a hint for whoever does not own the queue.
  std::uint32_t load() const { return depth_ - 1 - free_count_.load(std::memory_order_relaxed); }

  bool try_acquire() {
    return owner_.load(std::memory_order_relaxed) == 0 && owner_.exchange(1, std::memory_order_acquire) == 0;
  }
  void release() { owner_.store(0, std::memory_order_release); }

  // --- For the owner -----------------------------------------------------------------------------------------------

  /// Whether a command with up to `lists` list pages can be staged now, out of turn: nobody waits for room. Never while
  /// the queue is traced: the short ways, which ask this, pay nothing for tracing and leave requests to the general
  /// ones.
  bool has_room(std::uint32_t lists) const {
    return free_count_.load(std::memory_order_relaxed) != 0 && static_cast<std::int32_t>(lists) <= open_lists_;
  }
  /// The same for a request that waits for room, at its turn.
  bool has_room(std::uint32_t lists, const Line::Place& place) const {
    return free_count_.load(std::memory_order_relaxed) != 0 && lists <= free_lists_ && line_.admits(place);
  }
  /// Those who wait for room.
  const Line& line() const { return line_; }
  void join_line(Line::Place& place);
  void leave_line(Line::Place& place) {
    line_.leave(place);
    set_open();
  }
  /// One turn of who stands in line and is not the first.
  void pass_in_line(std::uint64_t now);

  /// The ring's entry for the next command. The caller, who has checked has_room, fills it and then stages it; nothing
  /// is rung yet.
  nvme::SubmissionEntry& next() { return submission_[tail_]; }
  /// Stages next() over `bytes` of held memory: its data pointer is set here. `registration` is held in ledger();
  /// `offset` is the data's place in the request.
  /// `extra` is Command::kPaced and the like, `now` in ticks.
  void stage_data(Request& request, bool is_write, std::uint32_t registration, const nvme::PageAddresses& memory,
                  std::uint64_t offset, std::uint32_t bytes, std::uint8_t extra, std::uint64_t now);
  void stage_data(Request& request, bool is_write, std::uint32_t registration, const nvme::PageAddresses& memory,
                  std::uint64_t offset, std::uint32_t bytes) {
    stage_data(request, is_write, registration, memory, offset, bytes, 0, ticks());
  }
  /// Stages many small ones at once; see below.
  class Burst;
  /// Undoes the last so many of what was staged and not rung, small commands all. Their registrations are held no more.
  void take_back(std::uint32_t commands);
  /// Stages next() without data.
  void stage(Request& request) { push(request, next(), false, Command::kNoRegistration, 0, 0, 0, ticks()); }
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
  void reap_until(const Request& request);
  /// Whether the controller has posted a completion that no command was waiting for, since the last restart. It cannot
  /// be trusted then: its next one may name a command that is not done. May be asked by anybody.
  bool distrusted() const { return distrusted_.load(std::memory_order_relaxed); }
  memory::Ledger& ledger() { return ledger_; }

  /// Takes a request's commands from it: they are retired for their holds alone. For a caller that goes away.
  void orphan(Request& request);
  /// The same for those of a batch. Their requests have nothing in flight any more.
  void orphan(const Finished& list);
  /// Where what is staged from now on is recorded; nullptr where nothing is. Gives the one before.
  std::unique_ptr<Trace> trace_into(std::unique_ptr<Trace> trace);
  Trace* trace() const { return trace_.get(); }
  /// When the request's oldest command was staged, in ticks; 0 if it has none in flight. `cid` gets its identifier.
  std::uint64_t oldest(const Request& request, std::uint16_t& cid) const;
  /// The same over the requests of a batch.
  std::uint64_t oldest(const Finished& list, std::uint16_t& cid) const;
  /// The same over commands whose callers have gone.
  std::uint64_t oldest_orphan(std::uint16_t& cid);
  /// The same of all.
  std::uint64_t oldest(std::uint16_t& cid) const;
  /// Whether there may be such commands. May be asked by anybody.
  bool has_orphans() const { return has_orphans_.load(std::memory_order_relaxed); }
  /// Says of the request of a command in flight that it was overdue.
  void expire(std::uint16_t cid, std::uint64_t staged);
  /// Fills an event with what is known of a command: queue, identifier, operation and blocks.
  void describe(std::uint16_t cid, Event& event) const;
  /// Counts a request that is submitted again.
  void count_retry() { statistics_.retries.add(1); }
  /// Appends what the rings still hold of the last commands, in the order of staging: at most `depth` records. Those
  /// that are in flight have no time of completion, and nor have those of which nobody took note.
  void last_commands(std::vector<TraceRecord>& out, std::uint32_t block_shift) const;
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
            std::uint8_t extra, std::uint64_t offset, std::uint32_t bytes, std::uint64_t now);
  std::uint16_t build_lists(nvme::SubmissionEntry& entry, const nvme::PageAddresses& memory, std::uint32_t bytes);
  /// The slot that push() will take.
  Command& next_command() { return commands_[free_ids_[staged() & id_mask_]]; }
  void count(std::uint32_t change) {
    free_count_.store(free_count_.load(std::memory_order_relaxed) + change, std::memory_order_relaxed);
  }
  std::uint16_t take_lists(std::uint32_t count);
  void give_lists(std::uint16_t first);
  void set_open() { open_lists_ = line_.empty() && trace_ == nullptr ? free_lists_ : -1; }
  [[gnu::cold]] void record_staged(std::uint64_t offset, std::uint32_t bytes, std::uint64_t submitted,
                                   std::uint8_t flags);
  bool has_completion() const;
  void retire(std::uint32_t slot, std::uint16_t status, std::uint32_t result, std::uint64_t now, bool stopped);
  void finish(Request& request, std::uint32_t result);
  void retire_extra(Command& command, std::uint16_t status, std::uint64_t now);
  void retire_other(Command& command, std::uint16_t status, std::uint32_t result, std::uint64_t now, bool stopped);
  template <class Chosen>
  std::uint64_t oldest_of(Chosen&& chosen, std::uint16_t& cid) const;
  bool is_of(const Command& command, const Finished& list) const;
  void fail(const Command& command, std::uint16_t status, std::uint32_t detail, bool stopped);
  [[gnu::cold]] void tell_failure(const Command& command, std::uint16_t status, std::uint32_t detail);
  void tell_file(Event& event, std::uint32_t detail) const;
  void distrust(const nvme::CompletionEntry& entry);
  std::uint32_t turn_head(std::uint32_t head);
  void set_next_turn(std::uint32_t head);
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
  std::atomic<std::uint32_t> next_free_{0};
  std::uint32_t id_mask_ = 0;  ///< of a slot's number in an identifier, and of a place in the ring of free ones
  std::uint32_t phase_ = 1;
  std::int32_t open_lists_ = 0;  ///< free_lists_, or -1 while somebody waits for room or the queue is traced
  std::uint16_t first_list_ = Command::kNoList;
  std::uint16_t free_lists_ = 0;
  Doorbell submission_doorbell_;
  Doorbell completion_doorbell_;
  std::atomic<bool> distrusted_{false};
  std::atomic<bool> has_orphans_{false};

  Line line_;
  Request nobody_;  ///< whose commands orphans are
  Shape shape_;
  const device::Device& device_;
  device::DmaMemory submission_memory_, completion_memory_, list_memory_;
  std::vector<Command> command_slots_;
  std::vector<std::uint16_t> id_slots_;
  std::vector<std::uint16_t> next_list_;
  std::unique_ptr<Wakeup> wakeup_;
  std::unique_ptr<Trace> trace_;
  memory::Ledger ledger_;
  Statistics statistics_;
};

// The path of every request, inline so that it is one run of instructions.

inline void QueuePair::push(Request& request, nvme::SubmissionEntry& entry, bool is_write, std::uint32_t registration,
                            std::uint8_t extra, std::uint64_t offset, std::uint32_t bytes, std::uint64_t now) {
  // Ring positions of free identifiers are [next_free_, next_free_ + free_count_); see retire().
  const std::uint32_t next = next_free_.load(std::memory_order_relaxed);
  const std::uint32_t slot = free_ids_[next & id_mask_];
  next_free_.store(next + 1, std::memory_order_relaxed);
  count(-1u);
  Command& command = commands_[slot];
  // Above the slot's number, what nobody can foresee: a completion that the controller makes up, or posts late, does
  // not pass for one of a command that has the slot by then.
  const auto cid = static_cast<std::uint16_t>(slot | (static_cast<std::uint32_t>(now) & ~id_mask_));
  entry.cid = cid;
  command.request = &request;
  command.offset = offset;
  command.bytes = bytes;
  command.extra = extra;
  command.is_write = is_write;
  command.id = cid;
  command.staged = now;
  command.registration = registration;
  ++request.in_flight;
  if (++tail_ == depth_) tail_ = 0;
}

inline void QueuePair::stage_data(Request& request, bool is_write, std::uint32_t registration,
                                  const nvme::PageAddresses& memory, std::uint64_t offset, std::uint32_t bytes,
                                  std::uint8_t extra, std::uint64_t now) {
  nvme::SubmissionEntry& entry = next();
  const std::uint64_t first = memory.at(0);
  const std::uint64_t in_first = shape_.page_size - (first & (shape_.page_size - 1));
  entry.prp1 = first;
  if (bytes > in_first) [[unlikely]] {
    if (bytes - in_first <= shape_.page_size) {
      entry.prp2 = memory.at(in_first);
    } else {
      next_command().list = build_lists(entry, memory, bytes);
      extra |= Command::kLists;
    }
  }
  if (offset != 0) extra |= Command::kContinued;
  if ((extra & Command::kPaced) != 0) next_command().begun = shape_.pacer->now(now);
  push(request, entry, is_write, registration, extra, offset, bytes, now);
}

inline void QueuePair::finish(Request& request, std::uint32_t result) {
  if (request.on_idle == OnIdle::done) {
    request.result = result;
    request.done.store(1, std::memory_order_release);
  } else if (is_told(request.on_idle) && ending(request.on_idle) == request.on_idle) {
    auto& told = static_cast<ToldRequest&>(request);
    told.list->append(told);
  }
}

/// One completion alone.
inline void QueuePair::retire(std::uint32_t slot, std::uint16_t status, std::uint32_t result, std::uint64_t now,
                              bool stopped) {
  Command& command = commands_[slot];
  command.id = Command::kNoId;
  free_ids_[(staged() + free_count_.load(std::memory_order_relaxed)) & id_mask_] = static_cast<std::uint16_t>(slot);
  count(1);
  ledger_.remove(command.registration);
  statistics_.latency[latency_bucket(now - command.staged)].add(1);
  if ((status | command.extra) == 0) [[likely]] {
    statistics_.bytes[command.is_write].add(command.bytes);
  } else {
    retire_other(command, status, result, now, stopped);
  }
  Request* request = command.request;
  if (--request->in_flight == 0) finish(*request, result);
}

/// Stages reads and writes of at most a page each, one after the other, by stretches. What it changes is kept here
/// until commit(): nothing else may be staged or retired meanwhile. Nothing is rung.
class QueuePair::Burst {
 public:
  Burst(const QueuePair& pair, std::uint64_t now, std::uint32_t nsid)
      : pair_(pair),
        now_(now),
        first_word_(std::uint64_t{nsid} << 32 | static_cast<std::uint64_t>(nvme::Opcode::read)),
        tail_(pair.tail_),
        next_(pair.staged()) {}

  /// Commands that there was room for, out of turn.
  std::uint32_t room() const { return pair_.open_lists_ < 0 ? 0 : pair_.free_count_.load(std::memory_order_relaxed); }
  /// A count of what was staged: differences of it are numbers of commands.
  std::uint32_t position() const { return next_; }
  /// Commands until a ring wraps.
  std::uint32_t stretch() const {
    return std::min(pair_.depth_ - tail_, pair_.id_mask_ + 1 - (next_ & pair_.id_mask_));
  }
  void commit(QueuePair& pair) const {
    pair.count(pair.staged() - next_);
    pair.next_free_.store(next_, std::memory_order_relaxed);
    pair.tail_ = tail_;
  }

  /// Up to `most` commands without a wrap. A plain value, for a loop to keep in registers.
  class Stretch {
   public:
    Stretch(const Burst& burst, std::size_t most)
        : now_(burst.now_),
          first_word_(burst.first_word_),
          high_(static_cast<std::uint32_t>(burst.now_) & ~burst.pair_.id_mask_ & 0xffff),
          commands_(burst.pair_.commands_),
          id_(burst.pair_.free_ids_ + (burst.next_ & burst.pair_.id_mask_)),
          at_(burst.pair_.submission_ + burst.tail_),
          end_(at_ + most) {}
    bool full() const { return at_ == end_; }
    /// `request` has nothing in flight, and no other command. `write` is 0 or 1.
    void stage(Request& request, std::uint64_t write, Lba lba, std::uint32_t blocks, std::uint32_t control,
               std::uint64_t prp1, std::uint32_t bytes, std::uint32_t registration) {
      static_assert(static_cast<int>(nvme::Opcode::read) - 1 == static_cast<int>(nvme::Opcode::write));
      const std::uint32_t slot = *id_++;
      const std::uint32_t cid = slot | high_;
      nvme::write_block_command(*at_++, (first_word_ | std::uint64_t{cid} << 16) - write, lba, blocks, control, prp1);
      // A command at rest has an offset of 0 and nothing extra.
      Command& command = commands_[slot];
      command.request = &request;
      command.bytes = bytes;
      command.is_write = static_cast<std::uint8_t>(write);
      command.id = cid;
      command.staged = now_;
      command.registration = registration;
      request.in_flight = 1;
    }
    /// Returns how many.
    std::uint32_t commit(Burst& burst) const {
      const auto staged = static_cast<std::uint32_t>(at_ - (burst.pair_.submission_ + burst.tail_));
      burst.next_ += staged;
      burst.tail_ += staged;
      if (burst.tail_ == burst.pair_.depth_) burst.tail_ = 0;
      return staged;
    }

   private:
    std::uint64_t now_, first_word_;
    std::uint32_t high_;
    Command* commands_;
    const std::uint16_t* id_;
    nvme::SubmissionEntry* at_;
    nvme::SubmissionEntry* end_;
  };

 private:
  const QueuePair& pair_;
  std::uint64_t now_, first_word_;
  std::uint32_t tail_, next_;
};

inline bool QueuePair::has_completion() const {
  const nvme::CompletionWord word{std::atomic_ref(completion_[head_].last).load(std::memory_order_acquire)};
  return static_cast<std::uint32_t>(word.phase()) == phase_;
}

inline void QueuePair::reap_until(const Request& request) {
  if (!has_completion()) return;
  const std::uint64_t now = ticks();
  do {
    const nvme::CompletionEntry& entry = completion_[head_];
    const nvme::CompletionWord word{entry.last};
    const std::uint32_t slot = word.cid() & id_mask_;
    if (commands_[slot].id == word.cid() && entry.sq_head < depth_) [[likely]] {
      retire(slot, word.status(), entry.result, now, false);
    } else {
      distrust(entry);
    }
    if (++head_ == turning_) [[unlikely]]
      head_ = turn_head(head_);
  } while (request.done.load(std::memory_order_relaxed) == 0 && has_completion());
}

}  // namespace ugds::queue
