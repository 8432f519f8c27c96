// SPDX-License-Identifier: Apache-2.0
//
// Atomics and mutexes whose every step the explorer sees. One thread of the system runs all of an exploration, so a
// value is a plain one; what other threads see of it when is the explorer's choice: each thread has a store buffer, as
// processors of the x86 family do (total store order), which a fence, an exchange and the like empty.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

namespace ugds::explore {

/// Whether every atomic access is a step at which another thread may go on.
extern bool fine;

/// Another thread may go on here, where `fine`.
void step();
/// The same, after the store buffer was emptied.
void fence();
/// To the store buffer, where `fine`.
void buffered_store(void* to, const void* from, std::uint32_t bytes);
/// What the thread itself sees of `bytes` at `from`.
void buffered_load(void* to, const void* from, std::uint32_t bytes);

template <class T>
inline T load(const T& at) {
  if (!fine) [[likely]]
    return at;
  step();
  T value;
  buffered_load(&value, &at, sizeof value);
  return value;
}
template <class T>
inline void store(T& at, T value, std::memory_order order) {
  if (!fine) [[likely]] {
    at = value;
    return;
  }
  step();
  buffered_store(&at, &value, sizeof value);
  if (order == std::memory_order_seq_cst) fence();
}
/// A read-modify-write: one step, and nothing stays in the store buffer.
template <class T, class Change>
inline T change(T& at, Change&& next) {
  if (fine) fence();
  const T old = at;
  at = next(old);
  return old;
}

template <class T>
class explored_atomic {
 public:
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  using value_type = T;
  constexpr explored_atomic() noexcept : value_{} {}
  constexpr explored_atomic(T value) noexcept : value_(value) {}  // NOLINT: as std::atomic
  explored_atomic(const explored_atomic&) = delete;
  explored_atomic& operator=(const explored_atomic&) = delete;

  T load(std::memory_order = std::memory_order_seq_cst) const { return explore::load(value_); }
  void store(T value, std::memory_order order = std::memory_order_seq_cst) { explore::store(value_, value, order); }
  operator T() const { return load(); }  // NOLINT
  T operator=(T value) {                 // NOLINT
    store(value);
    return value;
  }
  T exchange(T value, std::memory_order = std::memory_order_seq_cst) {
    return change(value_, [&](T) { return value; });
  }
  bool compare_exchange_strong(T& expected, T value, std::memory_order = std::memory_order_seq_cst,
                               std::memory_order = std::memory_order_seq_cst) {
    const T wanted = expected;
    expected = change(value_, [&](T now) { return now == wanted ? value : now; });
    return expected == wanted;
  }
  bool compare_exchange_weak(T& expected, T value, std::memory_order = std::memory_order_seq_cst,
                             std::memory_order = std::memory_order_seq_cst) {
    return compare_exchange_strong(expected, value);
  }
  template <class D>
  T fetch_add(D by, std::memory_order = std::memory_order_seq_cst) {
    return change(value_, [&](T now) { return static_cast<T>(now + by); });
  }
  template <class D>
  T fetch_sub(D by, std::memory_order = std::memory_order_seq_cst) {
    return change(value_, [&](T now) { return static_cast<T>(now - by); });
  }
  T fetch_and(T by, std::memory_order = std::memory_order_seq_cst) {
    return change(value_, [&](T now) { return static_cast<T>(now & by); });
  }
  T fetch_or(T by, std::memory_order = std::memory_order_seq_cst) {
    return change(value_, [&](T now) { return static_cast<T>(now | by); });
  }
  T operator++() { return static_cast<T>(fetch_add(1) + 1); }
  T operator--() { return static_cast<T>(fetch_sub(1) - 1); }
  T operator++(int) { return fetch_add(1); }
  T operator--(int) { return fetch_sub(1); }

 private:
  T value_;
};

template <class T>
class explored_atomic_ref {
 public:
  explicit explored_atomic_ref(T& value) : value_(value) {}
  T load(std::memory_order = std::memory_order_seq_cst) const { return explore::load(value_); }
  void store(T value, std::memory_order order = std::memory_order_seq_cst) const {
    explore::store(value_, value, order);
  }
  T fetch_add(T by, std::memory_order = std::memory_order_seq_cst) const {
    return change(value_, [&](T now) { return static_cast<T>(now + by); });
  }
  T exchange(T value, std::memory_order = std::memory_order_seq_cst) const {
    return change(value_, [&](T) { return value; });
  }

 private:
  T& value_;
};

class explored_mutex {
 public:
  constexpr explored_mutex() noexcept = default;
  explored_mutex(const explored_mutex&) = delete;
  explored_mutex& operator=(const explored_mutex&) = delete;
  void lock();
  bool try_lock();
  void unlock();

 private:
  bool taken_ = false;
};

}  // namespace ugds::explore
