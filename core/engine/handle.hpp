// SPDX-License-Identifier: Apache-2.0
//
// A handle: one open device with its controller brought up, its queue pairs, and the state that decides whether a
// request may be submitted. Requests themselves are operations (operation.hpp); recovery is in recovery.cpp.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/event_log.hpp"
#include "device/bytewise.hpp"
#include "device/device.hpp"
#include "engine/bring_up.hpp"
#include "engine/durability.hpp"
#include "engine/idle.hpp"
#include "engine/policy.hpp"
#include "engine/scheduler.hpp"
#include "memory/registry.hpp"
#include "queue/queue_pair.hpp"

namespace ugds::engine {

enum class State : std::uint32_t {
  ready,
  recovering,  ///< a command is overdue or the controller failed: nothing is submitted, waiters wait
  wedged,      ///< the controller could not be stopped: its commands' memory is quarantined
  failed,      ///< the controller was stopped and could not be started again; nothing is held
  lost,        ///< the device has gone from the bus; nothing is held
};
const char* state_name(State state);

class Batch;
class Bounce;
class StreamWorker;

/// A batch as its users know it. A stale one, of a closed batch or handle, finds nothing.
struct BatchId {
  std::uint32_t slot = 0;
  std::uint32_t generation = 0;  ///< 0: none
};

class Handle {
 public:
  /// Opens and brings up. Throws Failure with everything undone.
  Handle(const std::string& uri, const Policy& policy);
  /// Shuts the controller down and releases everything; what a wedged controller may still use is leaked instead.
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  const std::string& uri() const { return device_->uri(); }
  device::Device& device() { return *device_; }
  const Identity& identity() const { return identity_; }
  const Policy& policy() const { return policy_; }
  /// How often a read or write that a reset ended is submitted again.
  std::uint32_t retries() const { return policy_.retry.value_or(0); }
  EventSource& events() { return events_; }
  State state() const { return state_.load(std::memory_order_acquire); }
  const std::vector<std::unique_ptr<queue::QueuePair>>& queues() const { return queues_; }

  /// What every request looks at, together.
  struct Geometry {
    std::uint64_t capacity = 0;
    std::uint64_t block_mask = 0;  ///< block size less one
    std::uint32_t namespace_id = 0;
    std::uint32_t block_shift = 0;
    std::uint32_t chunk = 0;        ///< bytes of one command
    std::uint32_t fast[2] = {};     ///< bytes of a read and of a write that may go the short way (one_command.hpp)
    std::uint32_t lists = 0;        ///< list pages that a chunk may need
    std::uint32_t number = ~0u;     ///< by which registrations know the device
    std::uint32_t queue_count = 0;  ///< of queue pairs that `choose` chooses from
    std::unique_ptr<queue::QueuePair>* queues = nullptr;
    std::uint32_t memory_mask = 3;  ///< the controller addresses memory in dwords; 0 where it takes any
    bool bytewise = false;          ///< a file: see device/bytewise.hpp
    std::uint32_t write_mask = 0;   ///< of a file that takes whole blocks alone (device::Medium::write_unit), less one

    /// 0 for what is neither read nor write.
    std::uint32_t fast_for(nvme::Opcode opcode) const {
      return opcode == nvme::Opcode::read ? fast[0] : opcode == nvme::Opcode::write ? fast[1] : 0;
    }
    /// Of `bytes`, which a request has more than from `position` on, how many its next command takes: of a file up to a
    /// page's beginning.
    std::uint32_t cut(std::uint64_t position, std::uint32_t bytes) const {
      const auto beyond = static_cast<std::uint32_t>((position + bytes) & (device::kBytewiseCut - 1));
      return bytewise && bytes > beyond ? bytes - beyond : bytes;
    }
    /// List pages that one command of so many bytes may need.
    std::uint32_t lists_for(std::uint64_t bytes) const { return bytes <= nvme::kPageSize ? 0 : lists; }
  };
  const Geometry& geometry() const { return geometry_; }
  /// Bytes of the device, or of a file as it is now. May call the kernel.
  std::uint64_t capacity() const { return geometry_.bytewise ? device_->medium().size : geometry_.capacity; }
  /// Where the file that a position lies in ends now, on the device; of Geometry::bytewise. May call the kernel.
  std::uint64_t end_at(std::uint64_t position) const { return device_->end_at(position); }

  /// The queue pair for the next request: the caller's own if it is idle, else the least loaded.
  queue::QueuePair& choose(std::uint32_t caller) {
    queue::QueuePair& home = *geometry_.queues[caller % geometry_.queue_count];
    return home.load() == 0 || geometry_.queue_count == 1 ? home : least_loaded();
  }

  /// Where batches go: a queue pair of their own where there is more than one.
  queue::QueuePair& batch_pair() { return *queues_.back(); }
  /// What the batch queue's rings are in, in words: huge pages, or why not.
  const std::string& batch_memory() const { return batch_memory_; }
  /// Makes a batch. Throws Failure: EMFILE, and what Batch::open throws. The handle frees it, when it is closed itself
  /// at the latest.
  BatchId open_batch(std::uint32_t capacity, Priority priority);
  bool close_batch(BatchId id);
  /// The batch of a slot, open or not: its calls compare the generation. nullptr where there has been none.
  Batch* batch(std::uint32_t slot) const {
    return slot < kMostBatches ? batches_[slot].load(std::memory_order_acquire) : nullptr;
  }
  static constexpr std::uint32_t kMostBatches = 256;

  /// The thread for streams' requests, made at the first call. Throws Failure.
  StreamWorker& stream_worker();
  /// The same where it is there; nullptr elsewhere.
  StreamWorker* streams() const { return streams_.load(std::memory_order_acquire); }
  /// Bytes that went through pinned memory of ours, of those that queue pairs count. Thread-safe.
  void count_staged(std::uint64_t bytes) { staged_bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  std::uint64_t staged_bytes() const { return staged_bytes_.load(std::memory_order_relaxed); }
  /// Operations that are pending on streams.
  std::uint64_t stream_operations() const;

  Scheduler& scheduler() { return *scheduler_; }

  /// What an empty poll turn runs, for a `pump=caller` controller; cached, so that no request asks the device.
  const Turn& turn() const { return turn_; }
  /// For a simulation of many callers in one thread, which runs the controller itself when none of them has anything
  /// left to do: the empty poll turn of one would move time on before the others have had theirs. Not thread-safe.
  void set_turn(const Turn& turn) { turn_ = turn; }

  /// Whether a doorbell may wait for another process to answer.
  bool rings_may_block() const { return rings_may_block_; }
  /// Whether waiters sleep on some queue until the controller interrupts.
  bool interrupts() const { return interrupts_.load(std::memory_order_relaxed); }
  /// Whether the controller looks at doorbells in memory, so that most rings need no register write.
  bool shadow_doorbells() const { return shadow_doorbells_.load(std::memory_order_relaxed); }
  /// How completions are noticed: "interrupt", "polling", or either with why it is not what was asked for.
  std::string completion() const;

  /// Retires what has completed on every queue pair: for who waits for what others have in flight, wherever that is.
  /// They may not be looking.
  void reap_all();
  /// What keeps it from being closed, in words: commands by queue, batches, streams' operations, or that it is wedged;
  /// "" where nothing does. Thread-safe.
  std::string holders() const;
  /// Commands in flight over all queues.
  std::uint64_t in_flight() const;
  /// Bytes of writes that have completed and are not durable by themselves, ever.
  std::uint64_t written() const;
  Durability& durability() { return durability_; }
  /// Times that the controller was stopped by a recovery, and Abort commands that were given to it.
  std::uint64_t resets() const { return resets_.load(std::memory_order_relaxed); }
  std::uint64_t aborts() const { return aborts_.load(std::memory_order_relaxed); }
  /// Of batches' results that nobody has collected: how many are failures, and the first.
  std::uint64_t lost_results(Error& first) const;
  /// Reaps until nothing is in flight, nor waits for room in a batch, for at most `limit_ns`; recovers as any waiter
  /// would, also where the callers are elsewhere. True: nothing is.
  bool drain(std::uint64_t limit_ns);
  /// Ends every wait on the handle at its next look; the commands run on until the controller is stopped.
  void give_up() { given_up_.store(true, std::memory_order_relaxed); }
  bool given_up() const { return given_up_.load(std::memory_order_relaxed); }
  /// For a handle that is wedged: resets the function from outside, and releases the quarantine if that stops it.
  bool force_stop();

  // --- Tracing (trace.cpp) -----------------------------------------------------------------------------------------

  /// Records every command that is staged from now on, with room for `capacity` on each queue pair. False: it is being
  /// done already. Throws std::bad_alloc.
  bool start_trace(std::size_t capacity);
  /// Appends the records of commands that are done. False: nothing is traced.
  bool take_trace(std::vector<queue::TraceRecord>& out);
  /// How many commands found no room; what was not taken is gone.
  std::uint64_t stop_trace();
  bool tracing() const { return tracing_.load(std::memory_order_relaxed); }

  // --- Called by waiters, all cold (recovery.cpp) ------------------------------------------------------------------

  /// A command is overdue. Aborts it, or resets the controller. Returns when that has been tried by somebody.
  void recover_overdue(queue::QueuePair& pair, std::uint16_t cid, std::uint64_t staged);
  /// The controller is in a state that only a reset ends: CSTS.CFS, or a completion that no command was waiting for.
  void recover_broken(const char* why);
  /// The system has stopped the device's DMA, as when memory that it reached is taken back.
  void recover_halted();
  /// The registers read as all ones.
  void lose();
  /// The system wants the device back: lets what is in flight end, within a bound, and gives it up.
  void give_back();
  /// Looks at the controller's registers and recovers if they ask for it.
  void check_controller();
  /// What unaligned requests go through (unaligned.hpp).
  Bounce& bounce() { return *bounce_; }
  /// Why the state is not `ready`, for messages.
  std::string why() const;

 private:
  void set_up(const std::string& text, const Uri& uri);
  void tear_down();
  std::uint32_t plan_queues();
  void set_geometry();
  void make_queues();
  void make_queue(std::uint16_t id, std::uint32_t depth, std::uint32_t lists, bool huge);
  void make_batch_queue(std::uint16_t id, std::uint32_t depth);
  void make_wakeups();
  bool set_interrupts();
  void end_interrupts() noexcept;
  void create_queue(queue::QueuePair& pair);
  void poll_instead(queue::QueuePair& pair, const std::string& why);
  queue::QueuePair& least_loaded();
  void acquire(queue::QueuePair& pair);
  void acquire_all();
  void release_all();
  void retire_all(std::uint16_t status);
  bool start_again();
  bool stop(const char** how = nullptr);
  bool reset_function();
  bool reset_and_restart(const char* why);
  void check_deadline(queue::QueuePair& pair, bool all);
  bool push_batches();
  void set_state(State state, const char* why);
  void submit_again();
  void tell(const char* event, Level level, const char* action, const char* detail, const char* remedy = "");
  void tell_wedged(const char* why);
  void set_lost(const char* why);
  bool confirmed_abort(queue::QueuePair& pair, std::uint16_t cid, std::uint64_t staged, const char*& said);

  Policy policy_;
  EventSource events_;
  std::optional<Scheduler> scheduler_;
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<Bringup> controller_;
  Identity identity_;
  std::atomic<State> state_{State::ready};
  std::atomic<bool> given_up_{false};
  std::atomic<bool> tracing_{false};
  std::atomic<std::uint64_t> staged_bytes_{0}, resets_{0}, aborts_{0};
  Durability durability_;
  Geometry geometry_;
  Turn turn_;
  std::atomic<bool> interrupts_{false}, shadow_doorbells_{false};  ///< a recovery may end them
  bool rings_may_block_ = false;
  std::string batch_memory_;
  std::string polled_because_;  ///< why a queue is polled although interrupts were asked for; under why_lock_
  std::vector<std::unique_ptr<queue::QueuePair>> queues_;
  std::unique_ptr<Bounce> bounce_;
  std::mutex streams_lock_;
  std::atomic<StreamWorker*> streams_{nullptr};
  std::mutex batches_lock_;
  std::array<std::atomic<Batch*>, kMostBatches> batches_{};
  std::array<bool, kMostBatches> batch_is_open_{};
  std::mutex recovery_lock_;
  mutable std::mutex why_lock_;
  std::string why_;
};

}  // namespace ugds::engine
