// SPDX-License-Identifier: Apache-2.0
//
// The open handles of the process, by identifiers that are never reused. Who uses a handle counts in and out on one of
// several counters, so that threads do not contend; closing marks the handle and waits for the counters. A stale
// identifier, from before a close or a fork, finds nothing: it can never reach freed memory.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "base/immortal.hpp"
#include "engine/handle.hpp"
#include "engine/operation.hpp"

namespace ugds::engine {

using HandleId = std::uint64_t;  ///< 0: none

class Table {
 public:
  /// The process's own.
  static Table& instance();
  constexpr Table() = default;

  /// Makes `fork` safe for the table. Called by `open`, and by whoever locks something before calling it.
  void prepare_for_fork();

  /// Opens a device. Throws Failure.
  HandleId open(const std::string& uri, const Policy& policy);

  /// How to close (the C API's uGDSHandleDeregisterEx has the same four).
  enum class Mode : std::uint8_t {
    check,    ///< only if nobody uses it
    bounded,  ///< wait for at most the given time
    wait,     ///< wait for ever
    force,    ///< reset the function from outside first, if it is wedged
  };
  /// Results of batches that failed, and that nobody has collected: how many, and the first.
  struct Lost {
    std::uint64_t count = 0;
    Error first{};
  };
  /// 0, EBUSY (in use, or wedged; the handle is open as before) or ESTALE. While somebody else closes it, waits for
  /// what comes of that. `held`: with EBUSY gets what keeps it, in words.
  /// `lost`: with 0 gets what nobody has collected of batches, where that is failures.
  int close(HandleId id, Mode mode, std::uint64_t limit_ns = 0, std::string* held = nullptr, Lost* lost = nullptr);
  /// Closes whatever the state: waits that run are ended, and a wedged controller's memory is leaked. For garbage
  /// collection and exit. A handle that is not let go of within some seconds is left as it is.
  void abandon(HandleId id);
  /// The identifier of the `n`-th open handle from 0, or 0; for exit and statistics.
  HandleId nth(std::uint32_t n);

  /// Counts its user in, for its lifetime. Empty if the identifier is stale.
  class Use {
   public:
    Use(Table& table, HandleId id) : caller_(caller_number()) {
      Slot& slot = table.slots_[id % kSlots];
      users_ = &slot.users[caller_ % kStripes].count;
      // Ours: count in, then look at the identifier. Closing: mark the identifier, then look at the counts.
      users_->fetch_add(1, std::memory_order_seq_cst);
      if (slot.id.load(std::memory_order_seq_cst) != id) [[unlikely]] {
        // Out again at once: whoever closes the slot waits for its users.
        users_->fetch_sub(1, std::memory_order_release);
        users_ = &table.nobodys_;
        return;
      }
      handle_ = slot.handle;
      if (handle_ == nullptr) __builtin_unreachable();  // a free slot has nobody's identifier
    }
    ~Use() { users_->fetch_sub(1, std::memory_order_release); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    explicit operator bool() const { return handle_ != nullptr; }
    Handle& operator*() const { return *handle_; }
    Handle* operator->() const { return handle_; }
    /// The calling thread's number.
    std::uint32_t caller() const { return caller_; }

   private:
    std::uint32_t caller_;
    std::atomic<std::uint32_t>* users_;
    Handle* handle_ = nullptr;
  };

  /// Fills last_error() for a stale identifier: closed, or from before a fork. Returns -EBADF.
  std::int64_t explain_stale(HandleId id, const char* operation) const;

 private:
  static constexpr std::uint32_t kSlots = memory::kMaxDevices;
  static constexpr std::uint32_t kStripes = 8;

  struct alignas(1024) Slot {
    std::atomic<HandleId> id{0};  ///< nobody(), while it is free or being closed
    Handle* handle = nullptr;     ///< null while it is free or being opened
    bool reserved = false;        ///< under lock_: being opened or closed
    HandleId closing = 0;         ///< under lock_: what is being closed
    struct alignas(64) Stripe {
      std::atomic<std::uint32_t> count{0};
    };
    std::array<Stripe, kStripes> users;
  };

  /// An identifier that belongs to another slot, so that no caller's can be equal to it here.
  HandleId nobody(const Slot& slot) const { return static_cast<HandleId>(&slot - slots_.data()) ^ 1; }
  bool is_open(const Slot& slot) const { return slot.handle != nullptr && slot.id.load() != nobody(slot); }
  std::uint64_t users(const Slot& slot) const;
  Slot* reserve(HandleId id);
  bool is_closing(HandleId id);
  std::string holders(const Slot& slot) const;
  void reopen(Slot& slot, HandleId id);
  void release(Slot& slot, Lost* lost = nullptr);

  std::atomic<std::uint32_t> nobodys_{0};  ///< a count that is never looked at, for uses that found nothing
  std::mutex lock_;
  HandleId next_ = 1;
  HandleId forked_below_ = 0;
  // An unused slot's 0 is no other slot's identifier either; the first has nobody().
  std::array<Slot, kSlots> slots_{{{{1}, nullptr, false, 0, {}}}};
};

extern constinit Immortal<Table> table;
inline Table& Table::instance() { return table.value; }

}  // namespace ugds::engine
