// SPDX-License-Identifier: Apache-2.0
//
// What became of requests of a batch, on its way to Python: a cookie and a number each, and for the few that failed
// what is known of it. Whether somebody has looked at a failure is remembered, so that none can be missed.
#pragma once

#include <Python.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "common.hpp"
#include "engine/batch.hpp"

namespace ugds::python {

/// As it lies in memory for NumPy.
struct Result {
  std::uint64_t cookie = 0;
  std::int64_t result = 0;  ///< bytes, or -errno
};

struct Failed;

/// The failures of one batch that nobody has looked at. Thread-safe.
struct Unseen {
  std::atomic<std::uint64_t> count{0};
  std::mutex lock;
  /// Some of them, and some that have been looked at since; the first ones.
  std::vector<std::shared_ptr<Failed>> some;
  static constexpr std::size_t kMost = 64;

  void add(const std::shared_ptr<Failed>& failed);
  /// Those of `some` that nobody has looked at yet.
  std::vector<std::shared_ptr<Failed>> take();
};

struct Failed {
  Error error;
  std::uint64_t cookie = 0;
  std::atomic<bool> seen{false};
  std::shared_ptr<Unseen> unseen;

  void look() {
    if (!seen.exchange(true, std::memory_order_relaxed) && unseen)
      unseen->count.fetch_sub(1, std::memory_order_relaxed);
  }
};

/// Results in the order in which requests ended. Room is made before they come; adding one allocates nothing, unless it
/// is a failure.
class Results {
 public:
  Results() = default;
  Results(Results&& other) noexcept
      : items_(std::exchange(other.items_, nullptr)),
        count_(std::exchange(other.count_, 0)),
        room_(std::exchange(other.room_, 0)),
        failures_(std::move(other.failures_)) {}
  ~Results() { std::free(items_); }
  Results& operator=(const Results&) = delete;

  std::size_t size() const { return count_; }
  const Result* data() const { return items_; }
  void clear() {
    count_ = 0;
    failures_.clear();
  }
  const std::vector<std::shared_ptr<Failed>>& failures() const { return failures_; }

  /// Throws std::bad_alloc; nothing has changed then.
  void make_room(std::size_t more) {
    if (room_ - count_ < more) resize(std::max(count_ + more, 2 * room_));
  }
  /// Gives back what was not used, where that is much.
  void trim() {
    if (room_ > 2 * count_ + 64) resize(count_);
  }

  /// Takes results in a row, where room was made: a sink for engine::Batch::collect. What that returns is then told by
  /// filled().
  class Filling {
   public:
    Filling(Results& results, const std::shared_ptr<Unseen>& unseen)
        : results_(&results), unseen_(&unseen), next_(results.items_ + results.count_) {}
    void operator()(const engine::Done& done) {
      *next_++ = {done.cookie, done.result};
      if (done.error != nullptr) [[unlikely]]
        results_->note(done, *unseen_);
    }

   private:
    Results* results_;
    const std::shared_ptr<Unseen>* unseen_;
    Result* next_;
  };
  /// Returns `collected` again.
  std::int64_t filled(std::int64_t collected) {
    if (collected > 0) count_ += static_cast<std::size_t>(collected);
    return collected;
  }

  /// Moves up to `most` from `from`, whose first `taken` were taken before. Room was made. Returns how many.
  std::size_t move_from(Results& from, std::size_t& taken, std::size_t most);
  /// Puts `other` before what is here, of which the first `taken` were taken. Throws std::bad_alloc.
  void put_back(Results& other, std::size_t& taken);

 private:
  void resize(std::size_t room);
  [[gnu::cold, gnu::noinline]] void note(const engine::Done& done, const std::shared_ptr<Unseen>& unseen) noexcept;

  Result* items_ = nullptr;
  std::size_t count_ = 0, room_ = 0;
  std::vector<std::shared_ptr<Failed>> failures_;  ///< of the negative results, in their order
};

/// Python's Completions.
struct PyCompletions {
  explicit PyCompletions(Results&& taken);
  Results results;
  std::vector<std::size_t> failed_at;  ///< indices of the failures
};

/// A Done of a failure, for `failures` of an error. It has been looked at then.
nb::object done_of(Failed& failed);

void define_completions(nb::module_& m);

}  // namespace ugds::python
