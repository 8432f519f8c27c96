// SPDX-License-Identifier: Apache-2.0
//
// What becomes of process-wide state in a child of `fork`. A child has neither the threads nor the DMA mappings of its
// parent, so whatever was opened or registered before is dead there, and is left alone: never unmapped, never freed.
// New things can be opened in the child.
#pragma once

namespace ugds {

/// A process-wide table that survives `fork`. The hooks are run by pthread_atfork, in order of registration at
/// `parent` and `child` and in reverse at `prepare`. A child's hook empties the table.
struct ForkHooks {
  void (*prepare)();
  void (*parent)();
  void (*child)();
};

/// Registers the hooks. Call once a table, from its construction.
void on_fork(const ForkHooks& hooks);

/// How many forks lie between this process and the one that loaded the library.
unsigned fork_generation();

}  // namespace ugds
