// SPDX-License-Identifier: Apache-2.0
#include "memory/address_index.hpp"

namespace ugds::memory {

constinit thread_local std::size_t last_found = 0;

std::size_t AddressIndex::upper_bound(const Entry* entries, std::size_t count, std::uint64_t address) {
  std::size_t low = 0;
  while (count > 0) {
    const std::size_t half = count / 2;
    if (entries[low + half].begin.load(std::memory_order_acquire) <= address) {
      low += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return low;
}

std::size_t AddressIndex::search(const Entry* entries, std::size_t count, std::uint64_t address) {
  const std::size_t after = upper_bound(entries, count, address);
  if (after == 0 || !entries[after - 1].holds(address)) return count;
  return last_found = after - 1;
}

bool AddressIndex::overlaps(std::uint64_t begin, std::uint64_t end) const {
  const Entry* entries = entries_.load(std::memory_order_relaxed);
  const std::size_t after = upper_bound(entries, count_.load(std::memory_order_relaxed), end - 1);
  return after != 0 && entries[after - 1].end.load(std::memory_order_relaxed) > begin;
}

void AddressIndex::reserve_one() {
  const std::size_t count = count_.load(std::memory_order_relaxed);
  if (count < capacity_) return;
  const std::size_t capacity = capacity_ == 0 ? 64 : 2 * capacity_;
  arrays_.reserve(arrays_.size() + 1);
  auto larger = std::make_unique<Entry[]>(capacity);
  const Entry* entries = entries_.load(std::memory_order_relaxed);
  for (std::size_t i = 0; i < count; ++i) copy(larger[i], entries[i]);
  arrays_.push_back(std::move(larger));
  capacity_ = capacity;
  begin_write();
  entries_.store(arrays_.back().get(), std::memory_order_release);
  end_write();
}

void AddressIndex::copy(Entry& to, const Entry& from) noexcept {
  to.begin.store(from.begin.load(std::memory_order_relaxed), std::memory_order_release);
  to.end.store(from.end.load(std::memory_order_relaxed), std::memory_order_release);
  to.generation.store(from.generation.load(std::memory_order_relaxed), std::memory_order_release);
  to.tag.store(from.tag.load(std::memory_order_relaxed), std::memory_order_release);
}

void AddressIndex::begin_write() noexcept {
  sequence_.store(sequence_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

void AddressIndex::end_write() noexcept {
  sequence_.store(sequence_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

void AddressIndex::insert(std::uint64_t begin, std::uint64_t end, std::uint64_t tag,
                          std::uint64_t generation) noexcept {
  Entry* entries = entries_.load(std::memory_order_relaxed);
  const std::size_t count = count_.load(std::memory_order_relaxed);
  const std::size_t at = upper_bound(entries, count, begin);
  begin_write();
  for (std::size_t i = count; i > at; --i) copy(entries[i], entries[i - 1]);
  entries[at].begin.store(begin, std::memory_order_release);
  entries[at].end.store(end, std::memory_order_release);
  entries[at].generation.store(generation, std::memory_order_release);
  entries[at].tag.store(tag, std::memory_order_release);
  count_.store(count + 1, std::memory_order_release);
  end_write();
}

void AddressIndex::erase(std::uint64_t begin) noexcept {
  Entry* entries = entries_.load(std::memory_order_relaxed);
  const std::size_t count = count_.load(std::memory_order_relaxed);
  const std::size_t after = upper_bound(entries, count, begin);
  if (after == 0 || entries[after - 1].begin.load(std::memory_order_relaxed) != begin) return;
  begin_write();
  for (std::size_t i = after; i < count; ++i) copy(entries[i - 1], entries[i]);
  count_.store(count - 1, std::memory_order_release);
  end_write();
}

void AddressIndex::clear() noexcept {
  begin_write();
  count_.store(0, std::memory_order_release);
  end_write();
}

}  // namespace ugds::memory
