// SPDX-License-Identifier: Apache-2.0
#include "gpu/exporters.hpp"

#include "base/error.hpp"
namespace ugds::gpu {
Runtime* hip(std::string*) { return nullptr; }
std::optional<Exported> export_memory(Runtime&, const Allocation&, Address, std::uint64_t, std::vector<Refusal>&) {
  return std::nullopt;
}
}  // namespace ugds::gpu
