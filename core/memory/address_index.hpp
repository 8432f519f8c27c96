// SPDX-License-Identifier: Apache-2.0
//
// From an address to the registration that holds it, without a lock: a sorted array behind a sequence counter. Readers
// repeat when a writer was there; arrays that were outgrown are kept, so that a late reader finds memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace ugds::memory {

/// A place in the index; only a hint. Initial-exec: see engine/operation.hpp.
extern constinit thread_local std::size_t last_found __attribute__((tls_model("initial-exec")));

class AddressIndex {
 public:
  constexpr AddressIndex() = default;

  struct Found {
    std::uint64_t tag = 0;  ///< what `insert` was given; 0: nothing is registered there
    std::uint64_t generation = 0;
    std::uint64_t begin = 0, end = 0;
  };
  /// The entry whose bytes include `address`. Wait-free while nobody writes; thread-safe.
  Found find(std::uint64_t address) const {
    // Every load of an entry is an acquire and every store a release, so that the second look at the counter cannot
    // move before them, nor the first store of a writer before its odd count.
    for (;;) {
      const std::uint64_t before = sequence_.load(std::memory_order_acquire);
      // The count is read before the array, and written after it: an array is never shorter than the count says.
      const std::size_t count = count_.load(std::memory_order_acquire);
      const Entry* entries = entries_.load(std::memory_order_acquire);
      // Where this thread found something last, or else by search.
      std::size_t at = last_found;
      if (at >= count || !entries[at].holds(address)) [[unlikely]]
        at = search(entries, count, address);
      Found found;
      if (at < count) [[likely]] {
        const Entry& entry = entries[at];
        found.begin = entry.begin.load(std::memory_order_acquire);
        found.end = entry.end.load(std::memory_order_acquire);
        found.generation = entry.generation.load(std::memory_order_acquire);
        found.tag = entry.tag.load(std::memory_order_acquire);
      }
      if ((before & 1) == 0 && sequence_.load(std::memory_order_relaxed) == before) [[likely]]
        return found;
    }
  }

  // For the registry, under its lock.
  /// Whether a byte of [begin, end) is registered.
  bool overlaps(std::uint64_t begin, std::uint64_t end) const;
  /// Makes room for one more entry; throws std::bad_alloc and changes nothing then.
  void reserve_one();
  void insert(std::uint64_t begin, std::uint64_t end, std::uint64_t tag, std::uint64_t generation) noexcept;
  void erase(std::uint64_t begin) noexcept;
  void clear() noexcept;

 private:
  struct Entry {
    std::atomic<std::uint64_t> begin{0}, end{0}, generation{0}, tag{0};

    bool holds(std::uint64_t address) const {
      return begin.load(std::memory_order_acquire) <= address && address < end.load(std::memory_order_acquire);
    }
  };
  /// The place of the entry that holds `address`, which becomes last_found, or `count`.
  static std::size_t search(const Entry* entries, std::size_t count, std::uint64_t address);
  static std::size_t upper_bound(const Entry* entries, std::size_t count, std::uint64_t address);
  void copy(Entry& to, const Entry& from) noexcept;
  void begin_write() noexcept;
  void end_write() noexcept;

  std::atomic<std::uint64_t> sequence_{0};  ///< odd while a writer is at work
  std::atomic<std::size_t> count_{0};
  std::atomic<Entry*> entries_{nullptr};
  std::size_t capacity_ = 0;
  std::vector<std::unique_ptr<Entry[]>> arrays_;
};

}  // namespace ugds::memory
