// SPDX-License-Identifier: Apache-2.0
#include "device/emulated.hpp"

#include <cerrno>
#include <utility>

#include "base/error.hpp"
#include "nvme/prp.hpp"

namespace ugds::device {

EmulatedDevice::EmulatedDevice(std::string text, const Uri& uri)
    : uri_(std::move(text)), controller_(emulator::parse_options(uri.place, uri.query)) {}

std::uint32_t EmulatedDevice::read32(std::uint32_t offset) {
  return static_cast<std::uint32_t>(controller_.read(offset, 4));
}

std::uint64_t EmulatedDevice::read64(std::uint32_t offset) { return controller_.read(offset, 8); }

void EmulatedDevice::write32(std::uint32_t offset, std::uint32_t value) { controller_.write(offset, value, 4); }

void EmulatedDevice::write64(std::uint32_t offset, std::uint64_t value) { controller_.write(offset, value, 8); }

std::uint32_t* EmulatedDevice::doorbell(std::uint32_t offset) { return controller_.doorbell(offset); }

namespace {

Mapping consecutive(std::uint64_t iova, Bytes length, std::uint64_t* pages) {
  for (std::uint64_t i = 0; i < length.value / nvme::kPageSize; ++i) pages[i] = iova + i * nvme::kPageSize;
  return {iova, length};
}

}  // namespace

Mapping EmulatedDevice::map(void* address, Bytes length, Access access, std::uint64_t* pages) {
  return consecutive(controller_.map(address, length.value, access == Access::read_write), length, pages);
}

Mapping EmulatedDevice::map_foreign(const ForeignRange& range, Access access, std::uint64_t* pages) {
  return consecutive(controller_.map(range, access == Access::read_write), range.length, pages);
}

void EmulatedDevice::unmap(const Mapping& mapping) noexcept { controller_.unmap(mapping.token); }

void EmulatedDevice::set_interrupts(std::span<const int> eventfds) {
  require_vectors(eventfds.size());
  const std::uint32_t vectors = controller_.options().vector_count();
  for (std::uint32_t i = 0; i < vectors; ++i) {
    controller_.set_interrupt(static_cast<std::uint16_t>(i), i < eventfds.size() ? eventfds[i] : -1);
  }
}

bool EmulatedDevice::reset() noexcept { return controller_.function_reset(); }

Device::Turn EmulatedDevice::turn() const {
  return controller_.pumped_by_caller() ? &emulator::Controller::turn : nullptr;
}

void* EmulatedDevice::turn_context() const {
  return controller_.pumped_by_caller() ? const_cast<emulator::Controller*>(&controller_) : nullptr;
}

}  // namespace ugds::device
