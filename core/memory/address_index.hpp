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

class AddressIndex {
 public:
  AddressIndex();

  struct Found {
    std::uint32_t slot;
    std::uint64_t generation;  ///< 0: nothing is registered there
    std::uint64_t begin, end;
  };
  /// The registration whose bytes include `address`. Wait-free while nobody writes; thread-safe.
  Found find(std::uint64_t address) const;

  // For the registry, under its lock.
  /// Whether a byte of [begin, end) is registered.
  bool overlaps(std::uint64_t begin, std::uint64_t end) const;
  /// Makes room for one more entry; throws std::bad_alloc and changes nothing then.
  void reserve_one();
  void insert(std::uint64_t begin, std::uint64_t end, std::uint32_t slot, std::uint64_t generation) noexcept;
  void erase(std::uint64_t begin) noexcept;
  void clear() noexcept;

 private:
  struct Entry {
    std::atomic<std::uint64_t> begin{0}, end{0}, generation{0};
    std::atomic<std::uint32_t> slot{0};
  };
  void copy(Entry& to, const Entry& from) noexcept;
  void begin_write() noexcept;
  void end_write() noexcept;
  std::size_t upper_bound(const Entry* entries, std::size_t count, std::uint64_t address) const;

  std::atomic<std::uint64_t> sequence_{0};  ///< odd while a writer is at work
  std::atomic<Entry*> entries_{nullptr};
  std::atomic<std::size_t> count_{0};
  std::size_t capacity_ = 0;
  std::vector<std::unique_ptr<Entry[]>> arrays_;
};

}  // namespace ugds::memory
