// SPDX-License-Identifier: Apache-2.0
#include "engine/batch.hpp"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/steps.hpp"

namespace ugds::engine {

using nvme::Opcode;

namespace {

/// Commands that are staged in one turn while others wait for the same queue pair.
constexpr std::uint32_t kQuantum = 16;
/// Turns before a wait sleeps, where it may, and the longest that it sleeps without looking around.
constexpr std::uint32_t kRests = 32;
constexpr std::uint64_t kNap = 10'000'000, kInterruptInterval = 20'000'000;
/// How often a wait looks at the device while nothing ends, and while something does: a command may hang among others.
constexpr std::uint64_t kLookInterval = 100'000, kBusyInterval = 10'000'000;

}  // namespace

void Batch::Backlog::push(Entry& entry) {
  entry.later = nullptr;
  (first == nullptr ? first : last->later) = &entry;
  last = &entry;
}

void Batch::Backlog::pop() {
  Entry* gone = first;
  first = gone->later;
  gone->later = nullptr;
}

void Batch::acquire() {
  // Owners hold a queue pair for a bounded moment.
  if (pair_.try_acquire()) [[likely]]
    return;
  Idle idle;
  while (!pair_.try_acquire()) idle.pause(handle_.turn());
}

std::uint32_t Batch::open(std::uint32_t capacity, Priority priority) {
  if (capacity == 0 || capacity > kMaxBatchCapacity) {
    fail(EINVAL, "batch", "a batch of " + std::to_string(capacity) + " requests",
         "use 1 to " + std::to_string(kMaxBatchCapacity));
  }
  setup_step("batch: entries");
  auto entries = std::make_unique<Entry[]>(capacity);
  for (std::uint32_t i = 0; i < capacity; ++i) {
    entries[i].list = &finished_;
    entries[i].on_idle = queue::OnIdle::tell;
    entries[i].next = i + 1 < capacity ? &entries[i + 1] : nullptr;
  }
  acquire();
  entries_ = std::move(entries);
  capacity_ = capacity;
  free_ = &entries_[0];
  priority_ = priority;
  const std::uint32_t generation = ++generation_;
  looked_.store(ticks(), std::memory_order_relaxed);
  moved_.store(ticks(), std::memory_order_relaxed);
  pair_.release();
  return generation;
}

bool Batch::close(std::uint32_t generation) {
  if (cancel(generation) == kClosed) return false;
  collect(generation, ~std::size_t{0}, ~std::size_t{0}, ~std::uint64_t{0} >> 1, {}, [](const Done&) {});
  std::unique_ptr<Entry[]> entries;
  acquire();
  const bool mine = owns(generation);
  if (mine) {
    ++generation_;
    pair_.leave_line(place_);
    entries = std::move(entries_);
    free_ = nullptr;
    capacity_ = 0;
  }
  pair_.release();
  return mine;
}

std::uint64_t Batch::outstanding(std::uint32_t generation) {
  acquire();
  const std::uint64_t count = owns(generation) ? taken_ - finished_.taken() : 0;
  pair_.release();
  return count;
}

std::uint64_t Batch::outstanding() {
  acquire();
  const std::uint64_t count = taken_ - finished_.taken();
  pair_.release();
  return count;
}

void Batch::submit_again() {
  if (!keeps_) return;
  finished_.take_back(
      [&](const queue::ToldRequest& request) {
        const auto& entry = static_cast<const Entry&>(request);
        return entry.failed() && entry.stopped && entry.refusal == Refusal::none && entry.retries < handle_.retries();
      },
      [&](queue::ToldRequest& request) { put_back(static_cast<Entry&>(request)); });
}

/// Into the backlog, to go on where it is right.
void Batch::put_back(Entry& entry) {
  Transfer& t = entry.transfer;
  if (entry.wrote <= 1) {
    t.opcode = entry.wrote != 0 ? Opcode::write : Opcode::read;
    t.priority = priority_ != Priority::unsaid ? priority_ : Priority::normal;
    entry.wrote = 2;
  }
  const bool large =
      t.size > std::min<std::uint64_t>(kSmall, handle_.geometry().chunk) || t.priority == Priority::background;
  ++entry.retries;
  entry.staged = entry.failed_at;
  if (large) {
    finished_.uncount_large();
    if (entry.staged == 0) --large_staged_;  // it begins anew
  }
  entry.failed_at = queue::kNoFailure;
  entry.stopped = entry.expired = false;
  entry.status = 0;
  entry.on_idle = large ? queue::OnIdle::wait_to_count : queue::OnIdle::wait_to_tell;
  // One of which not all was staged is there still, as the first.
  if (large_.first != &entry) (large ? large_ : small_).push(entry);
  pair_.count_retry();
  moved_.store(ticks(), std::memory_order_relaxed);
}

/// Holds the registration, where there is one: its user gives that back when the commands are counted.
Batch::Run Batch::begin_run(const memory::Reference& buffer) {
  Run run;
  if (!buffer || buffer.readonly || memory::hold(pair_.ledger(), buffer) != memory::Hold::held) return run;
  run.registration = buffer.registration->index();
  run.pages = buffer.registration->pages(handle_.geometry().number);
  run.first = buffer.page_offset();
  if (run.pages != nullptr && buffer.size >= nvme::kPageSize) run.end = buffer.size - nvme::kPageSize + 1;
  return run;
}

/// A request that does not go to the ring as it comes: refused, or put in order.
void Batch::accept(Entry& entry, const Wanted& w, const memory::Reference& buffer) {
  Transfer& t = entry.transfer;
  t = {.opcode = w.opcode(), .buffer = buffer, .offset = w.offset, .size = w.size, .buffer_offset = w.buffer_offset};
  t.durable = w.durable;
  entry.cookie = w.cookie;
  entry.wrote = 2;
  entry.retries = 0;
  entry.staged = 0;
  entry.submitted = handle_.tracing() ? ticks() : 0;
  const Refusal refusal = check_transfer(handle_.geometry(), t);
  if (refusal != Refusal::none || t.size == 0) return end(entry, refusal);
  const bool background = t.opcode == Opcode::write && handle_.scheduler().background_writes();
  t.priority = priority_ != Priority::unsaid ? priority_ : background ? Priority::background : Priority::normal;
  // What a small one holds is one command.
  const std::uint64_t small = std::min<std::uint64_t>(kSmall, handle_.geometry().chunk);
  const bool large = t.size > small || t.priority == Priority::background;
  entry.on_idle = large ? queue::OnIdle::wait_to_count : queue::OnIdle::wait_to_tell;
  (large ? large_ : small_).push(entry);
}

/// Nothing more of it is staged. It is in no backlog.
void Batch::end(Entry& entry, Refusal refusal) {
  if (refusal != Refusal::none) {
    entry.refusal = refusal;
    entry.failed_at = std::min(entry.failed_at, entry.staged);
  }
  // What was never staged is not among the large ones that were.
  entry.on_idle = entry.staged == 0 ? queue::OnIdle::tell : queue::ending(entry.on_idle);
  if (entry.in_flight == 0) finished_.append(entry);
}

Staged Batch::stage_next(Entry& entry, std::uint32_t bytes, bool paced, std::uint64_t now) {
  const Transfer& t = entry.transfer;
  const std::uint8_t extra =
      extra_of(paced, t.priority == Priority::background, t.durable && t.opcode == Opcode::write);
  const Staged staged =
      stage_command(handle_, pair_, entry, t.opcode, t.buffer, t.buffer_offset + entry.staged, t.offset + entry.staged,
                    entry.staged, bytes, t.durable ? nvme::kForceUnitAccess : 0, extra, now);
  if (staged != Staged::yes) return staged;
  record_command(pair_, t.buffer, t.offset + entry.staged, entry.staged, bytes, t.durable, entry.submitted);
  entry.staged += bytes;
  return staged;
}

/// Stages what waits, as far as there is room and it is this batch's turn. Whether anything was.
bool Batch::pump() {
  if (handle_.state() != State::ready) return false;
  const Handle::Geometry& g = handle_.geometry();
  const std::uint32_t lists = small_.first != nullptr ? g.lists_for(small_.first->transfer.size) : g.lists;
  if (!pair_.has_room(lists, place_)) {
    pair_.join_line(place_);
    pair_.pass_in_line(ticks());
    return false;
  }
  // A few more completions first, where the mode would rather ring less often.
  const std::uint32_t room = pair_.depth() - 1 - pair_.load();
  if (room < handle_.scheduler().refill() && pair_.load() > pair_.depth() / 2 && !place_.taken) return false;
  const std::uint64_t now = ticks();
  std::uint32_t quantum = pair_.line().empty() ? ~0u : kQuantum;
  bool staged = pump_small(now, quantum);
  staged = pump_large(now, quantum) || staged;
  // Behind those who have waited meanwhile, where more is left.
  const bool others = !pair_.line().empty();
  if (place_.taken) pair_.leave_line(place_);
  if (others && small_.first != nullptr) pair_.join_line(place_);
  return staged;
}

bool Batch::pump_small(std::uint64_t now, std::uint32_t& quantum) {
  bool any = false;
  const Handle::Geometry& g = handle_.geometry();
  while (small_.first != nullptr && quantum != 0 && pair_.has_room(g.lists_for(small_.first->transfer.size), place_)) {
    Entry& entry = *small_.first;
    entry.on_idle = queue::OnIdle::tell;
    const Staged staged = stage_next(entry, static_cast<std::uint32_t>(entry.transfer.size), false, now);
    if (staged == Staged::closing) {
      entry.on_idle = queue::OnIdle::wait_to_tell;
      return any;
    }
    small_.pop();
    if (staged != Staged::yes) {
      end(entry, staged == Staged::stale ? Refusal::stale : Refusal::unmapped);
      continue;
    }
    any = true;
    --quantum;
  }
  return any;
}

bool Batch::pump_large(std::uint64_t now, std::uint32_t& quantum) {
  const Handle::Geometry& g = handle_.geometry();
  Scheduler& scheduler = handle_.scheduler();
  // The last quarter of the ring is for small requests.
  const std::uint32_t most = pair_.depth() - 1 - pair_.depth() / 4;
  bool any = false;
  while (large_.first != nullptr && quantum != 0 && pair_.has_room(g.lists, place_)) {
    Entry& entry = *large_.first;
    if (entry.failed()) {  // a piece of it did: it has ended, or ends with the last of them
      large_.pop();
      continue;
    }
    const bool background = entry.transfer.priority == Priority::background;
    // Of this batch's large requests that have begun and not ended there is no other.
    const bool first = entry.in_flight == 0 && large_staged_ - finished_.large() == (entry.staged != 0 ? 1u : 0u);
    if (!first && pair_.load() >= most) break;
    const std::uint32_t most_bytes = scheduler.piece(g.chunk, background);
    const std::uint64_t left = entry.transfer.size - entry.staged;
    const std::uint32_t bytes =
        left <= most_bytes ? static_cast<std::uint32_t>(left) : g.cut(entry.transfer.offset + entry.staged, most_bytes);
    if (!scheduler.pacer().take(bytes, background, first, entry.waits_since)) break;
    const bool last = entry.staged + bytes == entry.transfer.size;
    if (last) entry.on_idle = queue::OnIdle::count;
    if (entry.staged == 0) ++large_staged_;
    const Staged staged = stage_next(entry, bytes, true, now);
    if (staged != Staged::yes) {
      scheduler.pacer().put_back(bytes, background);
      if (entry.staged == 0) --large_staged_;
      entry.on_idle = queue::OnIdle::wait_to_count;
      if (staged == Staged::closing) break;
      large_.pop();
      end(entry, staged == Staged::stale ? Refusal::stale : Refusal::unmapped);
      continue;
    }
    any = true;
    --quantum;
    if (last) large_.pop();
  }
  return any;
}

void Batch::end_backlog(Refusal refusal) {
  while (small_.first != nullptr) {
    Entry& entry = *small_.first;
    small_.pop();
    end(entry, refusal);
  }
  while (large_.first != nullptr) {
    Entry& entry = *large_.first;
    large_.pop();
    if (!entry.failed()) end(entry, refusal);  // else it has ended, or does with its last command
  }
  pair_.leave_line(place_);
}

std::int64_t Batch::cancel(std::uint32_t generation) {
  acquire();
  if (!owns(generation)) {
    pair_.release();
    return kClosed;
  }
  std::int64_t count = 0;
  for (Entry* entry = small_.first; entry != nullptr; entry = entry->later) ++count;
  for (Entry* entry = large_.first; entry != nullptr; entry = entry->later) count += !entry->failed();
  end_backlog(Refusal::cancelled);
  pair_.release();
  return count;
}

std::int64_t Batch::explain(Entry& entry, Error& error) {
  if (large_.first == &entry) large_.pop();  // a piece of it failed before all were staged
  if (entry.wrote <= 1) entry.transfer.opcode = entry.wrote != 0 ? Opcode::write : Opcode::read;
  const auto bytes = end_of_file(handle_, entry, entry.refusal);
  if (!bytes) error = describe(handle_, entry.transfer, entry, entry.refusal, entry.retries);
  entry.failed_at = queue::kNoFailure;
  entry.stopped = entry.expired = false;
  entry.refusal = Refusal::none;
  entry.status = 0;
  return bytes ? static_cast<std::int64_t>(*bytes) : -error.code;
}

std::uint64_t Batch::lost(Error& first) {
  std::uint64_t count = 0;
  acquire();
  end_backlog(Refusal::cancelled);
  queue::ToldRequest* request = finished_.first();
  for (std::uint64_t left = finished_.size(); left != 0; --left, request = request->next) {
    auto& entry = static_cast<Entry&>(*request);
    if (!entry.failed()) continue;
    Error error;
    if (explain(entry, error) < 0 && count++ == 0) first = error;
  }
  pair_.release();
  return count;
}

bool Batch::is_settled(std::uint32_t generation) {
  acquire();
  const bool settled = !owns(generation) || !has_backlog();
  pair_.release();
  return settled;
}

bool Batch::push() {
  acquire();
  const State state = handle_.state();
  if (state == State::failed || state == State::lost) end_backlog(Refusal::not_ready);
  if (has_backlog() && pump()) {
    moved_.store(ticks(), std::memory_order_relaxed);
    pair_.ring();
  }
  const bool waits = has_backlog();
  pair_.release();
  return waits;
}

bool Batch::settle(std::uint32_t generation, const Interrupt& interrupt) {
  Wait wait;
  for (;;) {
    acquire();
    const bool settled = !owns(generation) || !has_backlog();
    bool progress = false;
    if (!settled) {
      progress = pair_.reap() != 0;
      if (pump()) {
        progress = true;
        pair_.ring();
      }
    }
    pair_.release();
    if (settled) return true;
    if (progress) {
      moved_.store(ticks(), std::memory_order_relaxed);
      wait.rests = 0;
    } else if (!rest(wait, generation, ~std::uint64_t{0} >> 1, interrupt)) {
      return false;
    }
  }
}

/// Nothing came of a turn. False: the time is up, or the caller was interrupted.
bool Batch::rest(Wait& wait, std::uint32_t generation, std::uint64_t limit_ns, const Interrupt& interrupt) {
  if (wait.rests++ == 0) wait.sleeps = handle_.interrupts() && handle_.scheduler().waiting().sleeps(kSmall * 4);
  const std::uint64_t limit = limit_ns > 1'000'000'000'000'000 ? ~std::uint64_t{0} : ns_to_ticks(limit_ns);
  const queue::Wakeup* wakeup = pair_.wakeup();
  const bool dozes = wait.sleeps && wakeup != nullptr && wait.rests > kRests && wakeup->armed() && pair_.load() != 0;
  if (dozes) {
    doze(wait, generation, limit);
  } else if (!wait.idle.pause(handle_.turn()) && limit_ns != 0) {
    return true;
  }
  const std::uint64_t now = ticks();
  std::uint64_t looked = looked_.load(std::memory_order_relaxed);
  bool ask = false;
  const bool still = now - moved_.load(std::memory_order_relaxed) >= ns_to_ticks(kLookInterval);
  if (now - looked >= ns_to_ticks(still ? kLookInterval : kBusyInterval) &&
      looked_.compare_exchange_strong(looked, now, std::memory_order_relaxed)) {
    const std::uint64_t interval = ns_to_ticks(kInterruptInterval);
    ask = interrupt.asked != nullptr && now / interval != looked / interval;
    if (still) sched_yield();
    attend(now, generation);
  }
  if (now - wait.start >= limit) return false;
  return !ask || !interrupt.asked(interrupt.context);
}

void Batch::doze(Wait& wait, std::uint32_t generation, std::uint64_t limit) {
  const std::uint64_t spent = ticks() - wait.start;
  const std::uint64_t left = limit == ~std::uint64_t{0} ? kNap : spent < limit ? ticks_to_ns(limit - spent) : 0;
  pair_.wakeup()->sleep(
      [&] {
        handle_.turn().take();
        acquire();
        const bool progress = pair_.reap() != 0 || !owns(generation) || !finished_.empty();
        pair_.release();
        return progress;
      },
      std::min(kNap, left));
}

/// Every so often: the device, the deadline.
void Batch::attend(std::uint64_t now, std::uint32_t generation) {
  handle_.check_controller();
  handle_.scheduler().attend(now);
  if (large_.first != nullptr) handle_.reap_all();
  const State state = handle_.state();
  if (state == State::recovering) {
    moved_.store(now, std::memory_order_relaxed);  // who waits for a reset has not waited for room
    return;
  }
  acquire();
  if (!owns(generation)) return pair_.release();
  if (state == State::wedged || handle_.given_up()) {
    let_go();
    return pair_.release();
  }
  if (state != State::ready) {
    end_backlog(Refusal::not_ready);
    return pair_.release();
  }
  std::uint16_t cid = 0;
  const std::uint64_t oldest = pair_.oldest(finished_, cid);
  const std::uint64_t limit = ns_to_ticks(handle_.policy().deadline_ns);
  const bool overdue = oldest != 0 && now > oldest && now - oldest > limit;
  if (overdue) pair_.expire(cid, oldest);
  // Something may have moved since the time was taken: by others, or by a recovery just now.
  const std::uint64_t moved = moved_.load(std::memory_order_relaxed);
  if (oldest == 0 && has_backlog() && now > moved && now - moved > limit) end_backlog(Refusal::no_room);
  pair_.release();
  if (overdue) handle_.recover_overdue(pair_, cid, oldest);
}

/// What is in flight runs on and keeps its memory held; here it has ended.
void Batch::let_go() {
  end_backlog(Refusal::interrupted);
  Entry* flying = nullptr;
  for (std::uint32_t i = 0; i < capacity_; ++i) {
    Entry& entry = entries_[i];
    if (entry.in_flight == 0) continue;
    entry.later = flying;
    flying = &entry;
  }
  pair_.orphan(finished_);
  for (Entry* entry = flying; entry != nullptr; entry = entry->later) {
    entry->refusal = Refusal::interrupted;
    entry->failed_at = 0;
    entry->on_idle = queue::ending(entry->on_idle);
    finished_.append(*entry);
  }
}

}  // namespace ugds::engine
