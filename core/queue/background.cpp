// SPDX-License-Identifier: Apache-2.0
#include "queue/background.hpp"

#include <algorithm>

namespace ugds::queue {

namespace {

/// Commands of a probe, and how many retirements in a row tell how fast the device is.
constexpr std::int32_t kProbe = 6;
constexpr std::uint32_t kRun = 4;
/// The longest gap, in latencies: whatever the device was taken for, something goes on.
constexpr std::uint64_t kLongestGap = 16;

}  // namespace

void BackgroundShare::begin_probe() {
  if (const std::uint64_t pace = pace_.exchange(0, std::memory_order_relaxed); pace != 0) {
    pace_before_.store(pace, std::memory_order_relaxed);
  }
  probe_bytes_.store(0, std::memory_order_relaxed);
  left_.store(kProbe, std::memory_order_relaxed);
  probes_.fetch_add(1, std::memory_order_relaxed);
  measures_.store(true, std::memory_order_relaxed);
  probing_.store(true, std::memory_order_relaxed);
}

/// True: all of the probe's commands have retired. They have had their share for a while then.
bool BackgroundShare::end_probe(std::uint64_t now, std::uint64_t in_flight) {
  if (in_flight != 0) return false;
  probing_.store(false, std::memory_order_relaxed);
  measures_.store(false, std::memory_order_relaxed);
  next_.store(now + gap(probe_bytes_.load(std::memory_order_relaxed)), std::memory_order_relaxed);
  return true;
}

bool BackgroundShare::take(std::uint64_t now, std::uint32_t bytes, std::uint64_t in_flight) {
  std::uint64_t due = probe_at_.load(std::memory_order_relaxed);
  if (now >= due && probe_at_.compare_exchange_strong(due, now + interval_.load(std::memory_order_relaxed),
                                                      std::memory_order_relaxed)) {
    begin_probe();
  }
  if (probing_.load(std::memory_order_relaxed)) {
    if (left_.load(std::memory_order_relaxed) > 0) {
      left_.fetch_sub(1, std::memory_order_relaxed);
      probe_bytes_.fetch_add(bytes, std::memory_order_relaxed);
      return true;
    }
    if (!end_probe(now, in_flight)) return false;
  }
  const std::uint64_t cost = gap(bytes);
  if (cost == 0) return in_flight == 0;
  std::uint64_t next = next_.load(std::memory_order_relaxed);
  if (now < next) return false;
  // Who looks a little late has not lost it.
  if (!next_.compare_exchange_strong(next, std::max(next + cost, now), std::memory_order_relaxed)) return false;
  measures_.store(false, std::memory_order_relaxed);
  return true;
}

/// How long others have the device after so many bytes; 0: not known.
std::uint64_t BackgroundShare::gap(std::uint64_t bytes) const {
  const std::uint64_t fair = (pace() * bytes >> 20) * 256 / share_.load(std::memory_order_relaxed);
  return std::min(fair, latency_.load(std::memory_order_relaxed) * kLongestGap);
}

std::uint64_t BackgroundShare::pace() const {
  const std::uint64_t now = pace_.load(std::memory_order_relaxed),
                      before = pace_before_.load(std::memory_order_relaxed);
  return now == 0 ? before : before == 0 ? now : std::min(now, before);
}

void BackgroundShare::give(std::uint64_t now, std::uint64_t moved, bool last) {
  if (measuring_.test_and_set(std::memory_order_acquire)) return;
  const std::uint32_t probe = probes_.load(std::memory_order_relaxed);
  if (run_from_ != 0 && run_probe_ == probe && ++run_length_ >= kRun && now > run_from_) {
    const std::uint64_t bytes = std::max<std::uint64_t>(moved - run_moved_, 1);
    const std::uint64_t pace = std::max<std::uint64_t>(((now - run_from_) << 20) / bytes, 1);
    const std::uint64_t fastest = pace_.load(std::memory_order_relaxed);
    if (fastest == 0 || pace < fastest) pace_.store(pace, std::memory_order_relaxed);
    run_from_ = 0;
  }
  if (last && !probing_.load(std::memory_order_relaxed)) {
    run_from_ = 0;  // the device may have nothing to do now
  } else if (run_from_ == 0 || run_probe_ != probe) {
    run_from_ = now;
    run_probe_ = probe;
    run_moved_ = moved;
    run_length_ = 0;
  }
  measuring_.clear(std::memory_order_release);
}

}  // namespace ugds::queue
