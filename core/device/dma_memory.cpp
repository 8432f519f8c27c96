// SPDX-License-Identifier: Apache-2.0
#include <linux/memfd.h>
#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "base/backing.hpp"
#include "base/error.hpp"
#include "base/steps.hpp"
#include "base/units.hpp"
#include "device/device.hpp"
#include "nvme/prp.hpp"

namespace ugds::device {

namespace {

constexpr std::uint64_t kHugePage = 2_MiB;
constexpr unsigned kHugeMemory = MFD_HUGETLB | MFD_HUGE_2MB;

const char* why_no_huge_page(int error) {
  switch (error) {
    case ENOMEM:
    case ENOSPC: return "no huge page is free";
    case EINVAL:
    case ENODEV:
    case ENOENT:
    case ENOSYS:
    case EOPNOTSUPP: return "the kernel has no huge pages of 2 MiB";
    case EACCES:
    case EPERM: return "this process may have no huge pages";
    case EMFILE:
    case ENFILE: return "there are as many open files as there may be";
    default: return "the kernel gave no huge page";
  }
}

/// Pages at a multiple of kAlignment; nullptr where there are none.
std::byte* allocate_aligned(std::uint64_t size) {
  constexpr std::uint64_t kAlignment = DmaMemory::kAlignment;
  void* memory = mmap(nullptr, size + kAlignment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(memory);
  const std::uint64_t before =
      align_up(reinterpret_cast<std::uintptr_t>(begin), kAlignment) - reinterpret_cast<std::uintptr_t>(begin);
  if (before != 0) munmap(begin, before);
  if (before != kAlignment) munmap(begin + before + size, kAlignment - before);
  return begin + before;
}

}  // namespace

DmaMemory::DmaMemory(Device& device, Bytes size, bool contiguous, Pages pages)
    : device_(&device), size_(Bytes(align_up(size.value, nvme::kPageSize))) {
  setup_step("dma memory: allocate");
  const bool shared = device.limits().memory_from_descriptor;
  pages_ = std::make_unique<std::uint64_t[]>(size_.value / nvme::kPageSize);
  if (take_from_device(contiguous, pages)) return;
  try {
    if (pages == Pages::huge) {
      setup_step("dma memory: huge pages");
      if (allocate_huge(shared)) {
        setup_step("dma memory: map");
        if (map_huge(contiguous)) return;
      }
    }
    allocate(shared);
    setup_step("dma memory: map");
    map(contiguous);
  } catch (...) {
    free();
    throw;
  }
}

/// What need not be contiguous can be had in another way, where the device has no more.
bool DmaMemory::take_from_device(bool contiguous, Pages pages) {
  try {
    const Device::OwnMemory memory = device_->allocate(size_, pages_.get());
    if (memory.data == nullptr) return false;
    data_ = memory.data;
    mapping_ = memory.mapping;
    of_device_ = true;
    if (pages == Pages::huge) why_not_huge_ = "the kernel's own memory for DMA";
    return true;
  } catch (const Failure& failure) {
    if (contiguous || failure.error().code != ENOMEM) throw;
    return false;
  }
}

void DmaMemory::allocate(bool shared) {
  Descriptor memory;
  if (shared) memory = make_shared_memory(size_.value);
  std::byte* const data = shared && !memory ? nullptr : allocate_aligned(size_.value);
  if (data != nullptr && shared &&
      mmap(data, size_.value, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory.get(), 0) == MAP_FAILED) {
    munmap(data, size_.value);
    memory.reset();
  }
  if (data == nullptr || (shared && !memory))
    fail(ENOMEM, "open", "no memory for queues", "free memory, or ask for fewer or shallower queues");
  keep(data, size_.value, std::move(memory), shared);
}

bool DmaMemory::allocate_huge(bool shared) {
  const std::uint64_t bytes = align_up(size_.value, kHugePage);
  Descriptor memory = make_shared_memory(bytes, kHugeMemory);
  // A huge page that is lacking when it is touched is a SIGBUS, whatever was reserved: limits and policies are applied
  // then. So they are all there before they are mapped.
  const int error = memory ? allocate_pages(memory, bytes) : errno;
  void* const data =
      error == 0 ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0) : MAP_FAILED;
  if (data == MAP_FAILED) {
    why_not_huge_ = why_no_huge_page(error != 0 ? error : errno);
    return false;
  }
  keep(static_cast<std::byte*>(data), bytes, std::move(memory), shared);
  huge_ = true;
  return true;
}

/// Where nobody needs the descriptor, the mapping alone keeps the memory.
void DmaMemory::keep(std::byte* data, std::uint64_t bytes, Descriptor descriptor, bool shared) {
  data_ = data;
  allocated_ = bytes;
  madvise(data_, allocated_, MADV_DONTFORK);
  if (!shared) return;
  descriptor_ = std::move(descriptor);
  remember_backing(data_, allocated_, descriptor_.get());
}

void DmaMemory::map(bool contiguous) {
  mapping_ = device_->map(data_, size_, Access::read_write, pages_.get());
  for (std::uint64_t i = 1; contiguous && i < size_.value / nvme::kPageSize; ++i) {
    if (pages_[i] == pages_[0] + i * nvme::kPageSize) continue;
    device_->unmap(mapping_);
    fail(ENOMEM, "open", "the transport gave no contiguous memory for a queue", "ask for shallower queues");
  }
}

bool DmaMemory::map_huge(bool contiguous) {
  try {
    map(contiguous);
    return true;
  } catch (const Failure&) {
    free();
    why_not_huge_ = "the huge page could not be mapped to the device";
    return false;
  }
}

DmaMemory::~DmaMemory() {
  if (data_ == nullptr) return;
  if (of_device_) {
    device_->free({data_, mapping_});
    return;
  }
  device_->unmap(mapping_);
  free();
}

void DmaMemory::free() noexcept {
  if (data_ == nullptr) return;
  if (descriptor_) forget_backing(data_);
  munmap(data_, allocated_);
  data_ = nullptr;
  huge_ = false;
  descriptor_.reset();
}

DmaMemory::DmaMemory(DmaMemory&& other) noexcept { *this = std::move(other); }

DmaMemory& DmaMemory::operator=(DmaMemory&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(allocated_, other.allocated_);
  std::swap(huge_, other.huge_);
  std::swap(of_device_, other.of_device_);
  std::swap(why_not_huge_, other.why_not_huge_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(mapping_, other.mapping_);
  std::swap(pages_, other.pages_);
  return *this;
}

Iova DmaMemory::iova(std::uint64_t offset) const {
  return Iova(pages_[offset >> nvme::kPageShift] + (offset & (nvme::kPageSize - 1)));
}

void DmaMemory::leak() noexcept { data_ = nullptr; }

}  // namespace ugds::device
