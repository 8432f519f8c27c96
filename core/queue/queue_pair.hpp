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

namespace ugds::queue {

/// What the slot of a command in flight remembers.
struct Command {
  Request* request = nullptr;      ///< nullptr: its caller went away; it is retired for its holds alone
  std::uint64_t offset = 0;        ///< of its data in the request
  std::uint64_t staged = 0;        ///< when, in ticks
  std::uint32_t bytes = 0;
  std::uint32_t registration = kNoRegistration;
  std::uint16_t list = kNoList;    ///< first of its list pages
  std::uint8_t opcode = 0;
  bool in_flight = false;

  static constexpr std::uint32_t kNoRegistration = 0xffffffffu;
  static constexpr std::uint16_t kNoList = 0xffff;
};

struct Shape {
  std::uint16_t id = 0;
  std::uint32_t depth = 64;        ///< entries of either ring, at least 2; one is always left free
  std::uint64_t page_size = 4096;  ///< CC.MPS
  std::uint32_t list_pages = 64;   ///< for commands over more than two pages
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
  Iova submission_ring() const { return submission_memory_.iova(0); }
  Iova completion_ring() const { return completion_memory_.iova(0); }
  const Statistics& statistics() const { return statistics_; }
  /// Commands in flight; a hint for whoever does not own the queue.
  std::uint32_t load() const { return in_flight_.load(std::memory_order_relaxed); }

  bool try_acquire() {
    return owner_.load(std::memory_order_relaxed) == 0 && owner_.exchange(1, std::memory_order_acquire) == 0;
  }
  void release() { owner_.store(0, std::memory_order_release); }

  // --- For the owner -----------------------------------------------------------------------------------------------

  /// Whether a command with `lists` list pages can be staged now.
  bool has_room(std::uint32_t lists) const { return free_count_ != 0 && lists <= free_lists_; }

  /// Puts a command over `bytes` of held memory into the ring, without ringing. The caller has checked has_room and
  /// holds `registration` in ledger(). `offset` is the data's place in the request.
  void stage_data(Request& request, nvme::SubmissionEntry& entry, std::uint32_t registration,
                  const nvme::PageAddresses& memory, std::uint64_t offset, std::uint32_t bytes);
  /// Puts a command without data, or whose data pointer is set, into the ring.
  void stage(Request& request, nvme::SubmissionEntry& entry);
  /// Stages a command whose data is one list page of the queue's own, and returns that page, to be filled before ring().
  std::uint64_t* stage_with_page(Request& request, nvme::SubmissionEntry& entry);
  /// Tells the controller of everything staged.
  void ring() {
    if (rung_tail_ == tail_) return;
    rung_tail_ = tail_;
    statistics_.doorbells.add(1);
    submission_doorbell_.ring(tail_);
  }
  /// Retires every completion that is there. Returns how many.
  std::uint32_t reap();
  /// Whether the controller has posted a completion that no command was waiting for, since the last restart. It cannot
  /// be trusted then: its next one may name a command that is not done. May be asked by anybody.
  bool distrusted() const { return distrusted_.load(std::memory_order_relaxed); }
  memory::Ledger& ledger() { return ledger_; }

  /// Takes a request's commands from it: they are retired for their holds alone. For a caller that goes away.
  void orphan(Request& request);
  /// When the request's oldest command was staged, in ticks; 0 if it has none in flight. `cid` gets its identifier.
  std::uint64_t oldest(const Request& request, std::uint16_t& cid) const;
  /// Whether a command is still in flight, by identifier and the time that `oldest` gave.
  bool is_in_flight(std::uint16_t cid, std::uint64_t staged) const;

  /// The controller is known to have stopped: retires everything in flight as failed with `status`, and puts the rings
  /// into their initial state, with new doorbells.
  void restart(std::uint16_t status, Doorbell submission, Doorbell completion);
  /// The controller may still touch the rings and lists: their memory is never given back.
  void leak();

 private:
  std::uint64_t* list_entries(std::uint16_t page) const {
    return reinterpret_cast<std::uint64_t*>(list_memory_.data() + page * shape_.page_size);
  }
  std::uint64_t list_iova(std::uint16_t page) const { return list_memory_.iova(page * shape_.page_size).value; }
  void push(Request& request, nvme::SubmissionEntry& entry, std::uint32_t registration, std::uint16_t list,
            std::uint64_t offset, std::uint32_t bytes);
  std::uint16_t take_lists(std::uint32_t count);
  void give_lists(std::uint16_t first);
  void retire(std::uint16_t cid, std::uint16_t status, std::uint32_t result, bool stopped);
  void initialise_rings();

  // What every request touches, by the owner alone but for the two atomics.
  alignas(64) std::atomic<std::uint32_t> owner_{0};
  std::atomic<std::uint32_t> in_flight_{0};
  nvme::SubmissionEntry* submission_ = nullptr;
  nvme::CompletionEntry* completion_ = nullptr;
  Command* commands_ = nullptr;
  std::uint16_t* free_ids_ = nullptr;  ///< a ring: an identifier rests as long as possible before it is used again
  std::uint32_t depth_ = 0;
  std::uint32_t tail_ = 0;
  std::uint32_t rung_tail_ = 0;
  std::uint32_t head_ = 0;  ///< of the completion queue
  std::uint32_t free_count_ = 0;
  std::uint32_t next_free_ = 0;
  std::uint32_t phase_ = 1;
  std::uint32_t submission_head_ = 0;  ///< as the controller last reported it
  std::uint16_t first_list_ = Command::kNoList;
  std::uint16_t free_lists_ = 0;
  Doorbell submission_doorbell_;
  Doorbell completion_doorbell_;
  std::atomic<bool> distrusted_{false};

  Shape shape_;
  device::DmaMemory submission_memory_, completion_memory_, list_memory_;
  std::vector<Command> command_slots_;
  std::vector<std::uint16_t> id_slots_;
  std::vector<std::uint16_t> next_list_;
  memory::Ledger ledger_;
  Statistics statistics_;
};

}  // namespace ugds::queue
