// SPDX-License-Identifier: Apache-2.0
//
// A device without a controller: registers are an array, IOVAs are handed out far from each other so that nothing is
// contiguous by accident, and every mapping is remembered.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "device/device.hpp"
#include "nvme/prp.hpp"

namespace ugds::testing {

class FakeDevice final : public device::Device {
 public:
  const std::string& uri() const override { return uri_; }
  device::Transport transport() const override { return device::Transport::vfio; }
  device::Limits limits() const override {
    return {.memory_from_descriptor = memory_from_descriptor, .pins_nvidia = pins_nvidia};
  }
  std::uint32_t read32(std::uint32_t offset) override { return registers[offset]; }
  std::uint64_t read64(std::uint32_t offset) override { return registers[offset]; }
  void write32(std::uint32_t offset, std::uint32_t value) override {
    registers[offset] = value;
    ++writes;
  }
  void write64(std::uint32_t offset, std::uint64_t value) override {
    registers[offset] = static_cast<std::uint32_t>(value);
  }
  std::uint32_t* doorbell(std::uint32_t offset) override { return mapped_doorbells ? &registers[offset] : nullptr; }

  device::Mapping map(void* address, Bytes length, device::Access, std::uint64_t* pages) override {
    if (fail_map || failing_maps-- > 0) fail(ENOSPC, "map", "no more mappings");
    for (std::uint64_t i = 0; i < length.value / nvme::kPageSize; ++i) {
      pages[i] = next_ + i * (contiguous ? nvme::kPageSize : 3 * nvme::kPageSize);
      memory[pages[i]] = static_cast<std::byte*>(address) + i * nvme::kPageSize;
    }
    const std::uint64_t token = next_;
    next_ += length.value * 4 + (1u << 20);
    mappings[token] = length.value;
    return {token, length};
  }
  device::Mapping map_descriptor(const device::DescriptorRange& range, device::Access access,
                                 std::uint64_t* pages) override {
    if (fail_descriptors) fail(EOPNOTSUPP, "map", "no way leads there");
    return map(nullptr, range.length, access, pages);
  }
  device::Mapping map_nvidia(std::uint64_t address, Bytes length, device::Access access,
                             std::uint64_t* pages) override {
    nvidia = {address, length.value};
    return map(nullptr, length, access, pages);
  }
  void unmap(const device::Mapping& mapping) noexcept override { mappings.erase(mapping.token); }
  OwnMemory allocate(Bytes size, std::uint64_t* pages) override {
    if (!own_memory) return {};
    if (fail_allocate) fail(ENOMEM, "open", "no memory of its own");
    auto* const data = new std::byte[size.value]();
    return {data, map(data, size, device::Access::read_write, pages)};
  }
  void free(const OwnMemory& own) noexcept override {
    unmap(own.mapping);
    delete[] own.data;
  }
  bool is_revoked(const device::Mapping& mapping) noexcept override { return revoked.contains(mapping.token); }
  bool reset() noexcept override { return true; }

  std::byte* at(std::uint64_t iova) { return memory.at(align_down(iova, nvme::kPageSize)) + iova % nvme::kPageSize; }

  std::map<std::uint32_t, std::uint32_t> registers;
  std::map<std::uint64_t, std::uint64_t> mappings;
  std::map<std::uint64_t, std::byte*> memory;
  bool contiguous = true, mapped_doorbells = true, fail_map = false;
  bool memory_from_descriptor = false;
  bool own_memory = false, fail_allocate = false;
  std::set<std::uint64_t> revoked;  ///< tokens
  bool pins_nvidia = false, fail_descriptors = false;
  std::pair<std::uint64_t, std::uint64_t> nvidia{};  ///< address and length that it was asked for
  int failing_maps = 0;                              ///< so many of the next fail
  int writes = 0;

 private:
  std::string uri_ = "fake:";
  std::uint64_t next_ = std::uint64_t{1} << 50;
};

}  // namespace ugds::testing
