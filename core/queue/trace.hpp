// SPDX-License-Identifier: Apache-2.0
//
// The life of each command of one queue pair, recorded while somebody traces the device. The buffer is of a fixed size
// and there before the first command: recording allocates nothing. Only the queue pair's owner calls any of this.
//
//   trace.staged(slot, …);   // an entry was written
//   trace.rung(now);         // the controller was told of everything staged
//   trace.retired(slot, …);  // in any order
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ugds::queue {

/// One command. Times are ticks (base/clock.hpp), 0 where something did not happen or nobody looked at the clock. The
/// layout is what Python's records have: python/bindings/trace.cpp tells of it, and a test compares.
struct TraceRecord {
  std::uint64_t submitted = 0;  ///< the request of which this is a command reached the library
  std::uint64_t staged = 0;     ///< the entry was in the ring
  std::uint64_t rung = 0;       ///< the doorbell store that told of it was over
  std::uint64_t completed = 0;  ///< somebody took the completion
  std::uint64_t offset = 0;     ///< bytes on the device
  std::uint32_t bytes = 0;      ///< all bits set: that many or more
  std::uint16_t queue = 0;
  std::uint16_t cid = 0;
  std::uint16_t status = 0;  ///< type in bits 10:8, code in 7:0
  std::uint8_t opcode = 0;
  std::uint8_t flags = 0;
};

/// Bits of TraceRecord::flags. Above them are the kind of memory and the route that the data took, each as the number
/// of its enumerator in memory/registry.hpp.
inline constexpr std::uint8_t kTraceContinued = 1;  ///< not the first command of its request
inline constexpr std::uint8_t kTraceDurable = 2;    ///< FUA
inline constexpr unsigned kTraceMemoryShift = 4;    ///< two bits
inline constexpr unsigned kTraceRouteShift = 6;     ///< two bits

class Trace {
 public:
  /// Room for `capacity` commands, finished or not, between two calls of take(), of a queue pair with `slots` slots.
  Trace(std::size_t capacity, std::size_t slots, std::uint16_t queue)
      : records_(capacity), open_(slots, kNotRecorded), queue_(queue) {}

  void staged(std::uint32_t slot, std::uint16_t cid, std::uint8_t opcode, std::uint64_t offset, std::uint32_t bytes,
              std::uint64_t submitted, std::uint64_t now, std::uint8_t flags = 0);
  /// Stamps what was staged since the last call.
  void rung(std::uint64_t now);
  /// A command that was not recorded when it was staged is passed over.
  void retired(std::uint32_t slot, std::uint16_t status, std::uint64_t now);

  /// Appends the finished records to `out`, in the order of staging, and makes room for as many. Those of commands in
  /// flight stay, and are finished when the commands are. Allocates only what `out` lacks of capacity().
  void take(std::vector<TraceRecord>& out);
  std::size_t capacity() const { return records_.size(); }
  /// Commands that found no room, since the beginning.
  std::uint64_t dropped() const { return dropped_; }

 private:
  static constexpr std::uint32_t kNotRecorded = ~std::uint32_t{0};

  std::vector<TraceRecord> records_;  ///< of which `count_` are in use, in the order of staging
  std::vector<std::uint32_t> open_;   ///< of each slot: its record, while its command is in flight
  std::size_t count_ = 0;
  std::size_t rung_ = 0;  ///< the first record that no doorbell told of yet
  std::uint64_t dropped_ = 0;
  std::uint16_t queue_;
};

}  // namespace ugds::queue
