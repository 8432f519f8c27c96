// SPDX-License-Identifier: Apache-2.0
#include "device/vfio.hpp"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/steps.hpp"
#include "device/vfio_abi.hpp"
#include "device/watcher.hpp"
#include "nvme/registers.hpp"

namespace ugds::device {

namespace {

enum class Way : std::uint8_t { automatic, iommufd, type1, none };

Way way_of(const Uri& uri) {
  Way way = Way::automatic;
  for (const auto& [name, value] : uri.query) {
    if (name != "iommu") {
      const std::string near = nearest(name, {"iommu", "ns", "interrupts"});
      fail(EINVAL, "open", "\"" + name + "\" is no parameter of pci:",
           near.empty() ? "the parameters are iommu, ns and interrupts" : "did you mean " + near + "?");
    }
    if (value == "iommufd") {
      way = Way::iommufd;
    } else if (value == "type1") {
      way = Way::type1;
    } else if (value == "none") {
      way = Way::none;
    } else if (value != "auto") {
      fail(EINVAL, "open", "iommu=" + value + " is not known", "use auto, iommufd, type1 or none");
    }
  }
  return way;
}

VfioAccess open_function(const PciFunction& function, Way way) {
  if (function.driver != "vfio-pci") {
    fail(ENXIO, "open",
         function.address +
             (function.driver.empty() ? " is held by no driver" : " is held by the driver " + function.driver),
         "bind it to vfio-pci: `ugds bind " + function.address +
             "`, or to ugds_drv, by which it reaches GPUs' memory: " + "`ugds bind " + function.address +
             " --driver ugds_drv`; both refuse while it is in use");
  }
  switch (way) {
    case Way::iommufd: return open_by_iommufd(function);
    case Way::type1: return open_by_type1(function);
    case Way::none: warn_without_iommu(function.address); return open_without_iommu(function);
    case Way::automatic: break;
  }
  if (function.group_without_iommu) {
    fail(EPERM, "open", function.address + " has no IOMMU, so nothing would keep it from any memory of this machine",
         "turn the IOMMU on; ?iommu=none does without, at your risk");
  }
  // The cdev is there only with iommufd, but its node may be another user's.
  if (!function.cdev.empty() && access("/dev/iommu", R_OK | W_OK) == 0 &&
      access(("/dev/vfio/devices/" + function.cdev).c_str(), R_OK | W_OK) == 0) {
    return open_by_iommufd(function);
  }
  return open_by_type1(function);
}

vfio_region_info region_info(int device, std::uint32_t index) {
  vfio_region_info info{};
  info.argsz = sizeof info;
  info.index = index;
  if (const int result = abi::call(device, VFIO_DEVICE_GET_REGION_INFO, &info); result < 0) {
    fail(-result, "open", std::string("VFIO does not describe the device's regions: ") + std::strerror(-result));
  }
  return info;
}

}  // namespace

VfioDevice::VfioDevice(std::string text, const PciFunction& function, const Uri& uri)
    : uri_(std::move(text)), claim_(std::in_place, function.address) {
  const Way way = way_of(uri);
  access_ = open_function(function, way);
  limits_.physical_addresses = way == Way::none;
  vfio_device_info info{};
  info.argsz = sizeof info;
  if (const int result = abi::call(access_.device.get(), VFIO_DEVICE_GET_INFO, &info); result < 0) {
    fail(-result, "open", std::string("VFIO does not describe the device: ") + std::strerror(-result));
  }
  can_reset_ = (info.flags & VFIO_DEVICE_FLAGS_RESET) != 0;
  map_registers();
  try {
    enable_bus_master();
    find_interrupts();
  } catch (...) {
    munmap(registers_, register_bytes_);
    throw;
  }
}

VfioDevice::~VfioDevice() {
  notify({});
  release();
  munmap(registers_, register_bytes_);
}

void VfioDevice::map_registers() {
  setup_step("vfio: registers");
  const vfio_region_info bar = region_info(access_.device.get(), VFIO_PCI_BAR0_REGION_INDEX);
  constexpr std::uint64_t kLeast = nvme::kDoorbellBase + 8;  // the registers, and the admin queue's doorbells
  if ((bar.flags & VFIO_REGION_INFO_FLAG_MMAP) == 0 || bar.size < kLeast) {
    fail(EOPNOTSUPP, "open",
         "the controller's registers (BAR0, " + std::to_string(bar.size) + " bytes) cannot be mapped",
         "the kernel may have disabled the BAR: look at its log");
  }
  register_bytes_ = limits_.register_bytes = bar.size;
  void* memory =
      mmap(nullptr, bar.size, PROT_READ | PROT_WRITE, MAP_SHARED, access_.device.get(), static_cast<off_t>(bar.offset));
  if (memory == MAP_FAILED) fail(errno, "open", std::string("BAR0 cannot be mapped: ") + std::strerror(errno));
  registers_ = static_cast<std::byte*>(memory);
  madvise(registers_, register_bytes_, MADV_DONTFORK);
}

/// VFIO clears bus mastering when it opens a device.
void VfioDevice::enable_bus_master() {
  setup_step("vfio: bus master");
  const auto config = static_cast<off_t>(region_info(access_.device.get(), VFIO_PCI_CONFIG_REGION_INDEX).offset);
  constexpr off_t kCommand = 4;
  constexpr std::uint16_t kMemory = 2, kBusMaster = 4;
  std::uint16_t command = 0;
  if (pread(access_.device.get(), &command, sizeof command, config + kCommand) != sizeof command) {
    fail(EIO, "open", "the device's configuration space cannot be read", "check that the device answers: lspci -vv");
  }
  command |= kMemory | kBusMaster;
  if (pwrite(access_.device.get(), &command, sizeof command, config + kCommand) != sizeof command) {
    fail(EIO, "open", "bus mastering cannot be turned on", "check that the device answers: lspci -vv");
  }
}

void VfioDevice::find_interrupts() {
  vfio_irq_info info{};
  info.argsz = sizeof info;
  info.index = VFIO_PCI_MSIX_IRQ_INDEX;
  if (abi::call(access_.device.get(), VFIO_DEVICE_GET_IRQ_INFO, &info) >= 0 &&
      (info.flags & VFIO_IRQ_INFO_EVENTFD) != 0) {
    limits_.interrupt_vectors = info.count;
  }
  info = {};
  info.argsz = sizeof info;
  info.index = VFIO_PCI_REQ_IRQ_INDEX;
  tells_removal_ = abi::call(access_.device.get(), VFIO_DEVICE_GET_IRQ_INFO, &info) >= 0 && info.count != 0;
}

void VfioDevice::set_trigger(std::uint32_t index, std::span<const int> eventfds) {
  std::vector<std::uint64_t> storage((sizeof(vfio_irq_set) + eventfds.size_bytes() + 7) / 8);
  auto* const set = reinterpret_cast<vfio_irq_set*>(storage.data());
  set->argsz = static_cast<std::uint32_t>(sizeof(vfio_irq_set) + eventfds.size_bytes());
  set->flags = VFIO_IRQ_SET_ACTION_TRIGGER | (eventfds.empty() ? VFIO_IRQ_SET_DATA_NONE : VFIO_IRQ_SET_DATA_EVENTFD);
  set->index = index;
  set->start = 0;
  set->count = static_cast<std::uint32_t>(eventfds.size());
  if (!eventfds.empty()) std::memcpy(set->data, eventfds.data(), eventfds.size_bytes());
  if (const int result = abi::call(access_.device.get(), VFIO_DEVICE_SET_IRQS, set); result < 0) {
    fail(-result, "open", std::string("VFIO did not set the interrupts: ") + std::strerror(-result),
         "completions can be polled instead: leave interrupts out");
  }
}

void VfioDevice::set_interrupts(std::span<const int> eventfds) {
  std::lock_guard guard(lock_);
  require_vectors(eventfds.size());
  if (!access_.device) return;
  // Older kernels take a new set of vectors only while none is set; every kernel refuses to end what is not.
  if (std::exchange(has_interrupts_, false)) set_trigger(VFIO_PCI_MSIX_IRQ_INDEX, {});
  if (eventfds.empty()) return;
  set_trigger(VFIO_PCI_MSIX_IRQ_INDEX, eventfds);
  has_interrupts_ = true;
}

std::uint32_t VfioDevice::read32(std::uint32_t offset) {
  return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(registers_ + offset)).load(std::memory_order_acquire);
}

std::uint64_t VfioDevice::read64(std::uint32_t offset) {
  // Two halves: not every controller or bridge takes eight bytes at once (NVMe over PCIe 1.0, 3.1).
  return read32(offset) | std::uint64_t{read32(offset + 4)} << 32;
}

void VfioDevice::write32(std::uint32_t offset, std::uint32_t value) {
  std::atomic_ref(*reinterpret_cast<std::uint32_t*>(registers_ + offset)).store(value, std::memory_order_release);
}

void VfioDevice::write64(std::uint32_t offset, std::uint64_t value) {
  write32(offset, static_cast<std::uint32_t>(value));
  write32(offset + 4, static_cast<std::uint32_t>(value >> 32));
}

std::uint32_t* VfioDevice::doorbell(std::uint32_t offset) {
  if (offset + sizeof(std::uint32_t) > register_bytes_) {
    fail(EPROTO, "open", "a doorbell at " + std::to_string(offset) + " lies beyond BAR0", "ask for fewer queues");
  }
  return reinterpret_cast<std::uint32_t*>(registers_ + offset);
}

/// What maps memory for the device, while there is one.
std::shared_ptr<Iommu> VfioDevice::translation() {
  std::lock_guard guard(lock_);
  if (!access_.device) fail(ENODEV, "map", "the device was given back to the system", "close it");
  return access_.iommu;
}

Mapping VfioDevice::map(void* address, Bytes length, Access access, std::uint64_t* pages) {
  return translation()->map(address, length, access, pages);
}

Mapping VfioDevice::map_descriptor(const DescriptorRange& range, Access access, std::uint64_t* pages) {
  return translation()->map_descriptor(range, access, pages);
}

void VfioDevice::unmap(const Mapping& mapping) noexcept { access_.iommu->unmap(mapping); }

bool VfioDevice::reset() noexcept {
  std::lock_guard guard(lock_);
  if (!access_.device) return true;
  if (!can_reset_ || abi::call(access_.device.get(), VFIO_DEVICE_RESET, 0) < 0) return false;
  try {
    enable_bus_master();
  } catch (const Failure&) {
    // It has stopped, which is what was asked; that it cannot be used again is noticed by who tries.
  }
  return true;
}

void VfioDevice::notify(const Notices& notices) {
  if (removal_watch_ != 0) {
    unwatch(removal_watch_);
    removal_watch_ = 0;
  }
  if (notices.asked == nullptr || !tells_removal_) return;
  notices_ = notices;
  if (!removal_) removal_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!removal_) fail(errno, "open", "no descriptor for removal requests", "raise the limit of open files");
  removal_watch_ = watch(
      removal_.get(),
      [](void* self) {
        const Notices& told = static_cast<VfioDevice*>(self)->notices_;
        told.asked(told.context);
      },
      this);
  const int eventfds[] = {removal_.get()};
  std::lock_guard guard(lock_);
  if (access_.device) set_trigger(VFIO_PCI_REQ_IRQ_INDEX, eventfds);
}

bool VfioDevice::release() noexcept {
  std::lock_guard guard(lock_);
  if (!access_.device) return true;
  // In place of the registers, whose mapping keeps the device open: whoever reads them sees that it has gone. Moved
  // over them, so that there is no moment at which nothing is there.
  void* ones = mmap(nullptr, register_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (ones == MAP_FAILED) return false;
  std::memset(ones, 0xff, register_bytes_);
  if (mremap(ones, register_bytes_, register_bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, registers_) == MAP_FAILED) {
    munmap(ones, register_bytes_);
    return false;
  }
  // The translation is kept: mappings are undone by whoever made them, and a group may hold other devices.
  access_.device.reset();
  claim_.reset();
  return true;
}

}  // namespace ugds::device
