// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/descriptor.hpp"
#include "gpu/runtime.hpp"

namespace ugds::gpu {
struct Exported {
  Descriptor descriptor;
  std::uint64_t offset = 0, length = 0;
  std::string provider;
};
struct Refusal {
  std::string provider;
  int code = 0;
  std::string words;
};
std::optional<Exported> export_memory(Runtime& runtime, const Allocation& allocation, Address address,
                                      std::uint64_t size, std::vector<Refusal>& refusals);
}  // namespace ugds::gpu
