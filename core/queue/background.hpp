// SPDX-License-Identifier: Apache-2.0
//
// What background requests get of a device while others come: a share of what it can move, in commands spread evenly
// over time. What it can move is seen while they have it for themselves, and else by a probe: now and then a few of
// their commands are let in together, and what the device moves meanwhile, of anybody's, is counted.
#pragma once

#include <atomic>
#include <cstdint>

namespace ugds::queue {

/// Times are by one clock, in whatever unit. Thread-safe; a race costs precision.
class BackgroundShare {
 public:
  /// `share` in 256ths; `probe_interval` between two probes.
  void configure(std::uint32_t share, std::uint64_t probe_interval) {
    share_.store(share != 0 ? share : 1, std::memory_order_relaxed);
    interval_.store(probe_interval, std::memory_order_relaxed);
  }

  /// Nobody else comes: there is nothing to share.
  void alone() {
    probing_.store(false, std::memory_order_relaxed);
    measures_.store(true, std::memory_order_relaxed);
  }
  /// Whether a command may be staged beside others', with `in_flight` bytes of background requests' in flight.
  bool take(std::uint64_t now, std::uint32_t bytes, std::uint64_t in_flight);

  /// Whether give() wants to know.
  bool measures() const { return measures_.load(std::memory_order_relaxed); }
  /// A background command has retired. `moved`: bytes that the device has ever moved, this command's among them.
  /// `last`: no other is in flight.
  void give(std::uint64_t now, std::uint64_t moved, bool last);
  void note_latency(std::uint64_t latency) { latency_.store(latency, std::memory_order_relaxed); }

  /// How long the device takes for a MiB; 0: not known.
  std::uint64_t pace() const;

 private:
  void begin_probe();
  bool end_probe(std::uint64_t now, std::uint64_t in_flight);
  std::uint64_t gap(std::uint64_t bytes) const;

  std::atomic<std::uint32_t> share_{1};
  std::atomic<std::uint64_t> interval_{0};
  std::atomic<std::uint64_t> next_{0};      ///< when the next command may be staged
  std::atomic<std::uint64_t> probe_at_{0};  ///< when the next probe is due
  std::atomic<std::int32_t> left_{0};       ///< commands of a probe that are still to be let in
  std::atomic<std::uint64_t> probe_bytes_{0};
  std::atomic<bool> probing_{false}, measures_{false};
  std::atomic<std::uint64_t> latency_{0};                ///< of the last command
  std::atomic<std::uint64_t> pace_{0}, pace_before_{0};  ///< the fastest since the last probe began, and before that
  std::atomic<std::uint32_t> probes_{0};
  std::atomic_flag measuring_;
  // A run of retirements, by who measures.
  std::uint32_t run_probe_ = 0, run_length_ = 0;
  std::uint64_t run_from_ = 0, run_moved_ = 0;
};

}  // namespace ugds::queue
