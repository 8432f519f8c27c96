// SPDX-License-Identifier: Apache-2.0
#include "queue/pacer.hpp"

#include <algorithm>
#include <bit>

#include "base/clock.hpp"
#include "queue/queue_pair.hpp"

namespace ugds::queue {

namespace {

constexpr std::uint32_t kLeastSamples = 16;
/// The least that a command is cut to. A multiple of every block size.
constexpr std::uint64_t kFinePiece = 64u << 10;
/// The least that is allowed in flight beside each request's one command, in pieces.
constexpr std::uint64_t kFloor = 2;
/// How often others are refused for the sake of one that does not come, before it is taken for gone.
constexpr std::uint32_t kPatience = 64;
/// How often the device is looked at nearly idle, and how soon others count as gone for background requests.
constexpr std::uint64_t kEpoch = 2'000'000'000, kActive = 1'000'000;

template <class T>
void lower(std::atomic<T>& word, T value) {
  T now = word.load(std::memory_order_relaxed);
  while (value < now && !word.compare_exchange_weak(now, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

void Pacer::configure(const Pacing& pacing, std::uint32_t piece) {
  latency_low_.store(pacing.latency_low, std::memory_order_relaxed);
  latency_high_.store(pacing.latency_high, std::memory_order_relaxed);
  share_.configure(pacing.background_share, span(kEpoch));
  memory_.store(span(pacing.memory_ns), std::memory_order_relaxed);
  largest_piece_.store(piece, std::memory_order_relaxed);
  piece_.store(piece, std::memory_order_relaxed);
  limit_.store(kNoLimit, std::memory_order_relaxed);
}

std::uint64_t Pacer::span(std::uint64_t ns) const { return virtual_clock_ != nullptr ? ns : ns_to_ticks(ns); }

std::uint32_t Pacer::staged_by_all() const {
  std::uint32_t all = 0;
  for (const QueuePair* pair : pairs_) all += pair->staged();
  return all;
}

std::uint64_t Pacer::moved_by_all() const {
  std::uint64_t all = 0;
  for (const QueuePair* pair : pairs_) all += pair->statistics().bytes[0].get() + pair->statistics().bytes[1].get();
  return all;
}

bool Pacer::Arrivals::look(std::uint32_t all, const std::atomic<std::uint32_t>& others, std::uint64_t now) {
  const std::uint32_t staged = all - others.load(std::memory_order_relaxed);
  std::uint32_t seen = count.load(std::memory_order_relaxed);
  do {
    if (static_cast<std::int32_t>(staged - seen) <= 0) return false;
  } while (!count.compare_exchange_weak(seen, staged, std::memory_order_relaxed));
  at.store(now, std::memory_order_relaxed);
  return true;
}

bool Pacer::is_full(std::uint64_t all, std::uint32_t bytes) const {
  return all != 0 && all + bytes > limit_.load(std::memory_order_relaxed);
}

bool Pacer::Turns::is_turn_of(std::uint64_t since) {
  return since <= longest_.load(std::memory_order_relaxed) ||
         passed_.fetch_add(1, std::memory_order_relaxed) >= kPatience;
}

void Pacer::Turns::wait(std::uint64_t since) { lower(longest_, since); }

void Pacer::Turns::let_in() {
  longest_.store(kNobody, std::memory_order_relaxed);
  passed_.store(0, std::memory_order_relaxed);
}

/// Whether a request may go on as far as large requests are concerned.
bool Pacer::admit(std::uint64_t all, bool full, bool first, std::uint64_t& waits_since) {
  if (!full && large_turns_.nobody_waits()) [[likely]]
    return true;
  refused_.store(true, std::memory_order_relaxed);
  if (!first) return false;  // until what it has in flight has ended at the latest
  if (waits_since == 0) waits_since = std::max<std::uint64_t>(now(ticks()), 1);
  if (full) {
    large_turns_.wait(waits_since);
    return false;
  }
  if (all != 0 && !large_turns_.is_turn_of(waits_since)) return false;
  large_turns_.let_in();
  return true;
}

bool Pacer::take(std::uint32_t bytes, bool background, bool first, std::uint64_t& waits_since) {
  const std::uint64_t all = in_flight_.load(std::memory_order_relaxed);
  const bool taken = background ? take_background(all, bytes, first, waits_since)
                                : admit(all, is_full(all, bytes), first, waits_since);
  if (!taken) return false;
  waits_since = 0;
  const std::uint64_t now_in_flight = in_flight_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  if (background) {
    background_.fetch_add(bytes, std::memory_order_relaxed);
    background_staged_.fetch_add(1, std::memory_order_relaxed);
  }
  staged_.fetch_add(1, std::memory_order_relaxed);
  if (now_in_flight > peak_.load(std::memory_order_relaxed)) peak_.store(now_in_flight, std::memory_order_relaxed);
  return true;
}

/// Background requests have all there is while nobody else comes, and their share while somebody does.
bool Pacer::take_background(std::uint64_t all, std::uint32_t bytes, bool first, std::uint64_t& waits_since) {
  const std::uint64_t now = this->now(ticks());
  const std::uint64_t mine = background_.load(std::memory_order_relaxed), theirs = all - std::min(all, mine);
  foreground_.look(staged_by_all(), background_staged_, now);
  const bool yields = theirs != 0 || foreground_.within(now, span(kActive));
  yields_.store(yields, std::memory_order_relaxed);
  if (!yields) {
    share_.alone();
    return admit(all, is_full(all, bytes), first, waits_since);
  }
  // Their share is small beside the limit, and would be nothing where others always want more than that.
  if (first && waits_since == 0) waits_since = std::max<std::uint64_t>(now, 1);
  if (!background_turns_.nobody_waits() && !(first && background_turns_.is_turn_of(waits_since))) return false;
  if (!share_.take(now, bytes, mine)) {
    if (first) background_turns_.wait(waits_since);
    return false;
  }
  background_turns_.let_in();
  return true;
}

void Pacer::put_back(std::uint32_t bytes, bool background) {
  in_flight_.fetch_sub(bytes, std::memory_order_relaxed);
  if (background) {
    background_.fetch_sub(bytes, std::memory_order_relaxed);
    background_staged_.fetch_sub(1, std::memory_order_relaxed);
  }
  staged_.fetch_sub(1, std::memory_order_relaxed);
}

void Pacer::give(std::uint32_t bytes, bool is_write, bool background, std::uint64_t latency) {
  in_flight_.fetch_sub(bytes, std::memory_order_relaxed);
  if (background) {
    const bool last = background_.fetch_sub(bytes, std::memory_order_relaxed) == bytes;
    share_.note_latency(latency);
    // The queue pair counts these bytes a moment later.
    if (share_.measures()) share_.give(now(ticks()), moved_by_all() + bytes, last);
  }
  if (latency_high_.load(std::memory_order_relaxed) == 0) return;
  sample(bytes, is_write, latency);
  const std::uint64_t flying = in_flight_.load(std::memory_order_relaxed) / piece_.load(std::memory_order_relaxed);
  const auto enough = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(flying, kLeastSamples, 256));
  if (samples_.load(std::memory_order_relaxed) >= enough && !adjusting_.test_and_set(std::memory_order_acquire)) {
    adjust();
    adjusting_.clear(std::memory_order_release);
  }
}

void Pacer::sample(std::uint32_t bytes, bool is_write, std::uint64_t latency) {
  Idle& idle = idle_[is_write][class_of(bytes)];
  lower(idle.now, latency);
  const std::uint64_t lowest =
      std::min(idle.now.load(std::memory_order_relaxed), idle.before.load(std::memory_order_relaxed));
  // Staged under an earlier limit, it says nothing of this one.
  const std::uint64_t now = this->now(ticks());
  if (now - latency < since_.load(std::memory_order_relaxed)) return;
  if (first_at_.load(std::memory_order_relaxed) == 0) {
    first_at_.store(now, std::memory_order_relaxed);
  } else {
    bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }
  const std::uint64_t ratio = latency * 256 / std::max<std::uint64_t>(lowest, 1);
  ratios_.fetch_add(std::min<std::uint64_t>(ratio, 1u << 16), std::memory_order_relaxed);
  samples_.fetch_add(1, std::memory_order_relaxed);
}

/// Once in as many commands as are in flight: is there somebody to protect, and what became of the latency.
void Pacer::adjust() {
  const std::uint64_t now = this->now(ticks());
  const std::uint32_t samples = samples_.exchange(0, std::memory_order_relaxed);
  const std::uint64_t ratios = ratios_.exchange(0, std::memory_order_relaxed);
  small_.look(staged_by_all(), staged_, now);
  const bool protects = small_.within(now, memory_.load(std::memory_order_relaxed));
  const bool began = protects && !protects_.load(std::memory_order_relaxed);
  protects_.store(protects, std::memory_order_relaxed);
  if (!protects) {
    limit_.store(kNoLimit, std::memory_order_relaxed);
  } else if (began) {
    begin_epoch(now);
  } else if (samples != 0) {
    follow(now, ratios / samples);
  }
  refused_.store(false, std::memory_order_relaxed);
  peak_.store(in_flight_.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

/// Looks at the device with little in flight, so that its latency when idle is known and stays known; and with commands
/// as large as they may be, should they be right by now.
void Pacer::begin_epoch(std::uint64_t now) {
  epoch_at_ = now;
  resumed_ = limit_.load(std::memory_order_relaxed);
  for (auto& direction : idle_) {
    for (Idle& idle : direction) idle.before.store(idle.now.exchange(~std::uint64_t{0}, std::memory_order_relaxed));
  }
  piece_.store(largest_piece_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  look(now, 1);
}

void Pacer::look(std::uint64_t now, std::uint64_t commands) {
  looks_with_ = commands;
  limit_.store(commands * piece_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  since_.store(now, std::memory_order_relaxed);
  first_at_.store(0, std::memory_order_relaxed);
  bytes_.store(0, std::memory_order_relaxed);
}

/// Whether a command takes the device longer than it takes to answer. With two in flight the device is always busy
/// then, and from one end to the next is a command's own time; else that is half the latency of one alone.
bool Pacer::is_coarse(std::uint64_t now) const {
  const std::uint64_t piece = piece_.load(std::memory_order_relaxed);
  const std::uint64_t commands = bytes_.load(std::memory_order_relaxed) / piece;
  if (commands == 0 || piece < 2 * kFinePiece) return false;
  std::uint64_t alone = ~std::uint64_t{0};
  for (const auto& direction : idle_) {
    alone = std::min(alone, direction[class_of(piece)].now.load(std::memory_order_relaxed));
  }
  const std::uint64_t busy = (now - first_at_.load(std::memory_order_relaxed)) / commands;
  return busy > (alone - std::min(alone, busy)) * 9 / 8;
}

/// A look is over: with one command in flight, then with two.
void Pacer::end_look(std::uint64_t now) {
  if (looks_with_ < kFloor) return look(now, kFloor);
  if (is_coarse(now)) {
    piece_.store(piece_.load(std::memory_order_relaxed) / 2, std::memory_order_relaxed);
    return look(now, 1);
  }
  looks_with_ = 0;
  // A limit that was none is found anew.
  if (resumed_ != kNoLimit) limit_.store(resumed_, std::memory_order_relaxed);
  since_.store(now, std::memory_order_relaxed);
}

void Pacer::follow(std::uint64_t now, std::uint64_t ratio) {
  if (looks_with_ != 0) return end_look(now);
  const std::uint64_t limit = limit_.load(std::memory_order_relaxed);
  if (now - epoch_at_ > span(kEpoch)) return begin_epoch(now);
  const std::uint64_t least = kFloor * piece_.load(std::memory_order_relaxed);
  std::uint64_t next = limit;
  const std::uint64_t low = latency_low_.load(std::memory_order_relaxed);
  const std::uint64_t high = latency_high_.load(std::memory_order_relaxed);
  if (ratio > high) {
    const std::uint64_t middle = (low + high) / 2;
    next = std::max(least, std::min(limit, peak_.load(std::memory_order_relaxed)) * middle / ratio);
  } else if (ratio < low && refused_.load(std::memory_order_relaxed)) {
    next = limit + std::max(piece_.load(std::memory_order_relaxed), limit / 4);
  }
  if (next == limit) return;
  limit_.store(next, std::memory_order_relaxed);
  since_.store(now, std::memory_order_relaxed);
}

}  // namespace ugds::queue
