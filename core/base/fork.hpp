// SPDX-License-Identifier: Apache-2.0
//
// What becomes of process-wide state in a child of `fork`. A child has neither the threads nor the DMA mappings of its
// parent, so whatever was opened or registered before is dead there, and is left alone: never unmapped, never freed.
// New things can be opened in the child.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <mutex>

namespace ugds {

/// Which locks are taken before which, when more than one is held: a fork takes all of them in this order. What is
/// further down may be taken while holding what stands above it, and never the other way round.
enum class ForkOrder : unsigned char {
  cufile,
  c_driver,
  rdma_regions,
  handles,
  registrations,
  iommu_groups,
  claimed_functions,
  watches,
  subsystems,
  backings,
  descriptors,
  events,
  observed_events,
};

/// A process-wide table that survives `fork`: `prepare` locks it and `parent` unlocks it; in the child `child` empties
/// and unlocks it. Any may be null.
struct ForkHooks {
  void (*prepare)();
  void (*parent)();
  void (*child)();
};

/// Registers the hooks of one table. Call once, before it is first used. Takes no lock, so it may be called under any.
void on_fork(ForkOrder order, const ForkHooks& hooks);

/// The hooks of some tables, by their order: they are prepared in it, and let go of in the other direction.
template <std::size_t places>
class ForkTable {
 public:
  constexpr ForkTable() = default;
  /// Once for a place. Takes no lock: who adds may hold one that a hook, run by a thread that forks, waits for.
  void add(std::size_t place, const ForkHooks& hooks) {
    hooks_[place] = hooks;
    ready_[place].store(true, std::memory_order_release);
  }
  void prepare() {
    lock_.lock();
    for (std::size_t i = 0; i < places; ++i) {
      taken_[i] = ready_[i].load(std::memory_order_acquire);
      if (taken_[i]) call(hooks_[i].prepare);
    }
  }
  void in_parent() {
    for (std::size_t i = places; i-- > 0;)
      if (taken_[i]) call(hooks_[i].parent);
    lock_.unlock();
  }
  /// Those as well that were added since prepare(): another thread may have begun to use such a table, and is not here.
  void in_child() {
    for (std::size_t i = places; i-- > 0;)
      if (ready_[i].load(std::memory_order_acquire)) call(hooks_[i].child);
    lock_.unlock();
  }

 private:
  static void call(void (*hook)()) {
    if (hook != nullptr) hook();
  }

  std::mutex lock_;  ///< from prepare() on, by the thread that forks
  std::array<ForkHooks, places> hooks_{};
  std::array<std::atomic<bool>, places> ready_{};
  std::array<bool, places> taken_{};
};

/// How many forks lie between this process and the one that loaded the library.
unsigned fork_generation();

}  // namespace ugds
