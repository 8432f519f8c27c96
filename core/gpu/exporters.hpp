// SPDX-License-Identifier: Apache-2.0
//
// Ways to a DMA-BUF of GPU memory, tried one after another. Each that refuses leaves its reason, so that nobody has to
// guess why a buffer is not reached directly.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/descriptor.hpp"
#include "gpu/runtime.hpp"

namespace ugds::gpu {

/// The memory is [offset, offset + length) of the descriptor, in bytes.
struct Exported {
  Descriptor descriptor;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  std::string provider;
};

struct Refusal {
  std::string provider;
  int code = 0;  ///< a positive errno
  std::string words;
};

/// A descriptor in which memory begins at `offset`.
struct ExportedRange {
  Descriptor descriptor;
  std::uint64_t offset = 0;
};

/// Exports [address, address + size) of the allocation: multiples of 64 KiB, or reaching to the allocation's ends.
/// Throws Failure to refuse.
using Exporter =
    std::function<ExportedRange(Runtime& runtime, const Allocation& allocation, Address address, std::uint64_t size)>;

/// Adds a provider that is tried before those there are. One of the same name and backend is taken away first, and
/// nothing takes its place where `exporter` is empty. Thread-safe.
void register_exporter(const std::string& name, Backend backend, Exporter exporter);

/// A DMA-BUF of `size` bytes from `address` on, which lie in the allocation, by the first provider that gives one; none
/// where all refuse. `refusals` gets those that refused before, in the order in which they were asked. Throws
/// Failure(EINVAL) for a range that the allocation does not hold. Thread-safe.
std::optional<Exported> export_memory(Runtime& runtime, const Allocation& allocation, Address address,
                                      std::uint64_t size, std::vector<Refusal>& refusals);

}  // namespace ugds::gpu
