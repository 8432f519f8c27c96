// SPDX-License-Identifier: Apache-2.0
//
// Memory order. Words shared between threads, or with a controller, are accessed by atomics; the two fences here are
// for what acquire and release cannot say.
#pragma once

#include <atomic>

namespace ugds {

/// Orders earlier stores before later loads, for the "I have written mine, now I read yours" pattern on two words.
/// The thread sanitizer does not model fences, so under it this is a read-modify-write of one shared word.
inline void full_fence() {
#if defined(__SANITIZE_THREAD__)
  static std::atomic<unsigned> word{0};
  word.fetch_add(1, std::memory_order_seq_cst);
#elif defined(__x86_64__)
  // A locked operation on the stack is a full barrier and cheaper than MFENCE.
  asm volatile("lock; orl $0, (%%rsp)" ::: "memory", "cc");
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

/// Orders the stores that build a command (submission entry, PRP lists, data in write-back memory) before the store to
/// a doorbell register (uncached). On x86 stores are not reordered with each other, so only the compiler must be told;
/// on Arm the outer-shareable store barrier is what reaches a device.
inline void doorbell_barrier() {
#if defined(__aarch64__)
  asm volatile("dmb oshst" ::: "memory");
#else
  asm volatile("" ::: "memory");
#endif
}

}  // namespace ugds
