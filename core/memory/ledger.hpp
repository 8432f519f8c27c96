// SPDX-License-Identifier: Apache-2.0
//
// The commands in flight of one queue, counted by registration. Only the queue's owner writes it, so a count is a plain
// load and store; the registry sums the ledgers of all queues, and only when a registration is being closed.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

namespace ugds::memory {

/// Registrations that a process may have at once.
inline constexpr std::uint32_t kMaxRegistrations = 65536;

class Ledger {
 public:
  /// The number of a count that nobody sums, for commands that hold no registration.
  static constexpr std::uint32_t kNone = kMaxRegistrations;

  /// `whose`: in words, for who is told that something is still in flight, such as "on queue 1 of emulated:1GiB".
  /// Reserves address space for all registrations; pages are touched as they are used. Throws Failure(ENOMEM).
  explicit Ledger(std::string whose = "");
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  void add(std::uint32_t registration, std::uint32_t commands = 1) {
    std::atomic<std::uint32_t>& count = counts_[registration];
    count.store(count.load(std::memory_order_relaxed) + commands, std::memory_order_relaxed);
  }
  /// Release: what the command did to the memory happens before the registry sees the count go.
  void remove(std::uint32_t registration, std::uint32_t commands = 1) {
    std::atomic<std::uint32_t>& count = counts_[registration];
    count.store(count.load(std::memory_order_relaxed) - commands, std::memory_order_release);
  }
  /// The same for a ledger that several threads write.
  void add_shared(std::uint32_t registration) { counts_[registration].fetch_add(1, std::memory_order_relaxed); }
  void remove_shared(std::uint32_t registration) { counts_[registration].fetch_sub(1, std::memory_order_release); }
  std::uint32_t count(std::uint32_t registration) const {
    return counts_[registration].load(std::memory_order_acquire);
  }

  /// Before the registry knows it.
  void set_whose(std::string whose) { whose_ = std::move(whose); }
  const std::string& whose() const { return whose_; }

 private:
  std::string whose_;
  std::atomic<std::uint32_t>* counts_;
};

}  // namespace ugds::memory
