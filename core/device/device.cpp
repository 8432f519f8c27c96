// SPDX-License-Identifier: Apache-2.0
#include "device/device.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "base/backing.hpp"
#include "base/error.hpp"
#include "base/steps.hpp"
#include "base/text.hpp"
#include "device/emulated.hpp"
#include "device/vfio.hpp"
#include "device/vfio_user.hpp"
#include "nvme/prp.hpp"

namespace ugds::device {

const char* transport_name(Transport transport) {
  switch (transport) {
    case Transport::emulated: return "emulated";
    case Transport::vfio_user: return "vfio-user";
    case Transport::vfio: return "vfio";
    case Transport::ugds_drv: return "ugds_drv";
  }
  return "unknown";
}

namespace {

/// Zeroed pages at a multiple of kAlignment, of a descriptor if there is one; nullptr where there are none.
std::byte* allocate(std::uint64_t size, int descriptor) {
  constexpr std::uint64_t kAlignment = DmaMemory::kAlignment;
  void* memory = mmap(nullptr, size + kAlignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(memory);
  const std::uint64_t before =
      align_up(reinterpret_cast<std::uintptr_t>(begin), kAlignment) - reinterpret_cast<std::uintptr_t>(begin);
  if (before != 0) munmap(begin, before);
  if (before != kAlignment) munmap(begin + before + size, kAlignment - before);
  std::byte* const data = begin + before;
  if (descriptor < 0) return data;
  if (mmap(data, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor, 0) != MAP_FAILED) return data;
  munmap(data, size);
  return nullptr;
}

}  // namespace

DmaMemory::DmaMemory(Device& device, Bytes size, bool contiguous)
    : device_(&device), size_(Bytes(align_up(size.value, nvme::kPageSize))) {
  setup_step("dma memory: allocate");
  const bool shared = device.limits().memory_from_descriptor;
  if (shared) descriptor_ = make_shared_memory(size_.value);
  if (!shared || descriptor_) data_ = allocate(size_.value, descriptor_.get());
  if (data_ == nullptr)
    fail(ENOMEM, "open", "no memory for queues", "free memory, or ask for fewer or shallower queues");
  try {
    madvise(data_, size_.value, MADV_DONTFORK);
    if (shared) remember_backing(data_, size_.value, descriptor_.get());
    pages_ = std::make_unique<std::uint64_t[]>(size_.value / nvme::kPageSize);
    setup_step("dma memory: map");
    mapping_ = device.map(data_, size_, Access::read_write, pages_.get());
    for (std::uint64_t i = 1; contiguous && i < size_.value / nvme::kPageSize; ++i) {
      if (pages_[i] == pages_[0] + i * nvme::kPageSize) continue;
      device.unmap(mapping_);
      fail(ENOMEM, "open", "the transport gave no contiguous memory for a queue", "ask for shallower queues");
    }
  } catch (...) {
    free();
    throw;
  }
}

DmaMemory::~DmaMemory() {
  if (data_ == nullptr) return;
  device_->unmap(mapping_);
  free();
}

void DmaMemory::free() noexcept {
  if (descriptor_) forget_backing(data_);
  munmap(data_, size_.value);
}

DmaMemory::DmaMemory(DmaMemory&& other) noexcept { *this = std::move(other); }

DmaMemory& DmaMemory::operator=(DmaMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(mapping_, other.mapping_);
  std::swap(pages_, other.pages_);
  return *this;
}

Iova DmaMemory::iova(std::uint64_t offset) const {
  return Iova(pages_[offset >> nvme::kPageShift] + (offset & (nvme::kPageSize - 1)));
}

void DmaMemory::leak() noexcept { data_ = nullptr; }

Mapping Device::map_descriptor(const DescriptorRange&, Access, std::uint64_t*) {
  fail(EOPNOTSUPP, "map", "this transport cannot reach memory that is known by a descriptor alone",
       "map it into this process and register that");
}

void Device::require_vectors(std::size_t count) const {
  const std::uint32_t vectors = limits().interrupt_vectors;
  if (count > vectors) fail(EINVAL, "open", "the device has " + std::to_string(vectors) + " interrupt vectors");
}

void Device::set_interrupts(std::span<const int> eventfds) {
  if (!eventfds.empty()) fail(EOPNOTSUPP, "open", "this transport has no interrupts", "completions are polled");
}

std::unique_ptr<Device> open(const std::string& text, const Uri& uri) {
  if (uri.scheme == "emulated") return std::make_unique<EmulatedDevice>(text, uri);
  if (uri.scheme == "vfio-user") return std::make_unique<VfioUserDevice>(text, uri);
  if (uri.scheme == "pci") return std::make_unique<VfioDevice>(text, uri);
  const std::string near = nearest(uri.scheme, {"emulated", "pci", "vfio-user"});
  fail(EINVAL, "open", "\"" + uri.scheme + ":\" names no transport of this release",
       near.empty() ? "use pci:ADDRESS, vfio-user:SOCKET, or emulated:SIZE, such as emulated:1GiB"
                    : "did you mean " + near + ":?");
}

}  // namespace ugds::device
