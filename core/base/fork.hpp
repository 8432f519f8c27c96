// SPDX-License-Identifier: Apache-2.0
//
// What becomes of process-wide state in a child of `fork`. A child has neither the threads nor the DMA mappings of its
// parent, so whatever was opened or registered before is dead there, and is left alone: never unmapped, never freed.
// New things can be opened in the child.
#pragma once

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

/// Registers the hooks of one table. Call once, before it is first used.
void on_fork(ForkOrder order, const ForkHooks& hooks);

/// How many forks lie between this process and the one that loaded the library.
unsigned fork_generation();

}  // namespace ugds
