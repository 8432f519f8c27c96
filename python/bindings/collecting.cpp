// SPDX-License-Identifier: Apache-2.0
//
// How results come out of a batch. Any number of threads may be at it: a result is in the engine, in the hands of a
// call that makes room, or waiting here, and who looks for it finds it in one of the three.
#include <sched.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "base/clock.hpp"
#include "batch.hpp"

namespace ugds::python {

namespace {

using engine::Batch;
using engine::Table;

constexpr std::uint64_t kPollWithLock = 15'000;  // ns; as a synchronous read does
/// A poll gives the engine, so often, so much time: shorter waits never look at the device or at deadlines.
constexpr std::uint64_t kLookEvery = 10'000'000, kLookFor = 150'000;

/// Dropped while requests were in flight.
struct Retired {
  engine::HandleId handle = 0;
  engine::BatchId id;
};
std::mutex retired_lock;
std::vector<Retired>& retired() {
  static auto* list = new std::vector<Retired>;  // NOLINT: outlives the interpreter's own teardown
  return *list;
}

/// Closes a batch if that takes no waiting. Results are gone.
bool close_now(const Retired& item) {
  const Table::Use handle(Table::instance(), item.handle);
  if (!handle) return true;
  Batch& batch = *handle->batch(item.id.slot);
  constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();
  if (batch.cancel(item.id.generation) == Batch::kClosed) return true;
  batch.collect(item.id.generation, kAll, kAll, 0, {}, [](const engine::Done&) {});
  if (batch.outstanding(item.id.generation) != 0) return false;
  handle->close_batch(item.id);
  return true;
}

}  // namespace

PyBatch::~PyBatch() {
  if (closed || handle == 0) return;
  if (!close_now({handle, id})) retire();
}

void PyBatch::retire() {
  std::lock_guard guard(retired_lock);
  retired().push_back({handle, id});
  count_retired(1);
}

void collect_retired_batches() {
  std::lock_guard guard(retired_lock);
  const std::size_t closed = std::erase_if(retired(), close_now);
  count_retired(-static_cast<std::ptrdiff_t>(closed));
}

void PyBatch::take_waiting(Results& out, std::size_t most) {
  if (waiting() == 0) [[likely]]
    return;
  std::lock_guard guard(lock_);
  out.make_room(std::min(most, waiting()));
  const std::size_t moved = out.move_from(ready_, ready_taken_, most);
  waiting_.fetch_sub(moved, std::memory_order_relaxed);
  told.fetch_add(moved, std::memory_order_relaxed);
}

void PyBatch::put_back(Results& results) {
  if (results.size() == 0) return;
  std::lock_guard guard(lock_);
  const std::size_t count = results.size();
  ready_.put_back(results, ready_taken_);
  waiting_.fetch_add(count, std::memory_order_relaxed);
  told.fetch_sub(count, std::memory_order_relaxed);
}

bool PyBatch::make_room(Batch& batch, Results& portion, std::size_t most, const engine::Interrupt& interrupt) {
  struct Moving {
    std::atomic<std::uint32_t>& count;
    explicit Moving(std::atomic<std::uint32_t>& counted) : count(counted) { count.fetch_add(1); }
    ~Moving() { count.fetch_sub(1); }
  } moving(moving_);
  const std::int64_t collected = portion.filled(batch.collect(
      id.generation, 1, most, std::numeric_limits<std::int64_t>::max(), interrupt, Results::Filling(portion, unseen)));
  if (collected <= 0) return collected == 0;  // none is left: there is room
  std::lock_guard guard(lock_);
  std::size_t taken = 0;
  ready_.make_room(portion.size());
  waiting_.fetch_add(ready_.move_from(portion, taken, portion.size()));
  return true;
}

/// Nothing is in the engine: whether nothing is anywhere.
bool PyBatch::nothing_comes() {
  if (moving_.load() != 0) {
    without_lock([] { sched_yield(); });
    return false;
  }
  return waiting_.load() == 0;
}

PyBatch::Ended PyBatch::collect(engine::Handle& in, Batch& batch, Results& out, std::size_t least, std::size_t most,
                                std::uint64_t limit_ns) {
  const std::uint64_t start = ticks();
  std::uint64_t limit = limit_ns;
  if (limit < kLookFor && ticks_to_ns(start - looked.load(std::memory_order_relaxed)) > kLookEvery) {
    looked.store(start, std::memory_order_relaxed);
    limit = kLookFor;
  }
  for (bool with_lock = !in.interrupts() && !in.rings_may_block();; with_lock = false) {
    take_waiting(out, most - out.size());
    const std::size_t room = std::min<std::uint64_t>(most - out.size(), batch.outstanding(id.generation));
    if (room == 0) {
      if (out.size() >= least || out.size() == most) return Ended::enough;
      if (closed.load(std::memory_order_relaxed)) return Ended::closed;
      if (nothing_comes()) return Ended::nothing_left;
      continue;
    }
    out.make_room(room);
    const std::size_t wanted = least <= out.size() ? 0 : std::min(least - out.size(), room);
    const std::uint64_t spent = ticks_to_ns(ticks() - start), left = spent < limit ? limit - spent : 0;
    const auto take = [&](std::uint64_t time, const engine::Interrupt& interrupt) {
      return out.filled(batch.collect(id.generation, wanted, room, time, interrupt, Results::Filling(out, unseen)));
    };
    const std::int64_t taken = with_lock ? take(std::min(left, kPollWithLock), {})
                                         : without_lock([&] { return take(left, python_interrupt()); });
    if (taken > 0) told.fetch_add(static_cast<std::uint64_t>(taken), std::memory_order_relaxed);
    if (out.size() >= least || out.size() == most) return Ended::enough;
    if (taken < 0) return Ended::closed;
    if (!with_lock && PyErr_Occurred() != nullptr) return Ended::interrupted;
    if (ticks_to_ns(ticks() - start) >= limit) return Ended::timed_out;
  }
}

}  // namespace ugds::python
