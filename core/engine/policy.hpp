// SPDX-License-Identifier: Apache-2.0
//
// What a caller may choose when opening a device. Zero means: the library decides.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ugds::engine {

/// Whether waiters sleep until the controller interrupts.
enum class Interrupts : std::uint8_t {
  unsaid,  ///< as the URI says, or the environment (UGDS_INTERRUPT_MODE), or no
  no,
  yes,
};

/// What a request is among others.
enum class Priority : std::uint8_t {
  unsaid,      ///< as the mode says: normal, but for writes in mode "priority"
  normal,      ///< also of reads that others must wait for
  background,  ///< behind every other
};

struct Policy {
  std::string mode{};              ///< by name (mode.hpp); empty: as the URI says, or "latency", or of
                                   ///< a file "throughput"
  std::uint32_t namespace_id = 0;  ///< 0: the first that is active
  std::uint32_t queues = 0;        ///< I/O queue pairs asked for, of which the last is for batches where
                                   ///< there is more than one; 0: one a processor, 2 to 16, and that one
  std::uint32_t depth = 0;         ///< entries a queue; 0: 64. Clamped to the device
  std::uint64_t deadline_ns = 0;   ///< longest life of a command before recovery begins; 0: as the URI
                                   ///< says, or kDefaultDeadline
  Interrupts interrupts = Interrupts::unsaid;
  std::optional<std::uint32_t> retry{};  ///< how often a read or write that a reset ended is submitted again; without
                                         ///< it as the URI says, or never
};

inline constexpr std::uint64_t kDefaultDeadline = 30'000'000'000, kLongestDeadline = 1'000'000'000'000'000'000;
/// Largest command, whatever the device would allow: small requests pass between the pieces of a large one.
inline constexpr std::uint64_t kMaxChunk = 4u << 20;
/// For a device that states no limit (MDTS 0).
inline constexpr std::uint64_t kUnstatedMaxTransfer = 128u << 10;
/// Commands that one request keeps in flight on a queue.
inline constexpr std::uint32_t kWindow = 16;
inline constexpr std::uint32_t kDefaultDepth = 64;
inline constexpr std::uint32_t kListPages = 64;
/// Most retries that can be asked for.
inline constexpr std::uint32_t kMostRetries = 16;
/// The batch queue's entries and list pages.
inline constexpr std::uint32_t kBatchDepth = 512, kBatchListPages = 128;

}  // namespace ugds::engine
