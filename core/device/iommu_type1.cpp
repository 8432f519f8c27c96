// SPDX-License-Identifier: Apache-2.0
//
// VFIO groups and type1 containers: what every kernel since 3.6 has.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/steps.hpp"
#include "device/iommu.hpp"
#include "device/iova_space.hpp"
#include "device/vfio_abi.hpp"

namespace ugds::device {

namespace {

/// The ranges that the container's IOMMU translates.
std::vector<IovaSpace::Range> iova_ranges(int container) {
  vfio_iommu_type1_info info{};
  info.argsz = sizeof info;
  if (abi::call(container, VFIO_IOMMU_GET_INFO, &info) < 0) return {};
  std::vector<std::byte> whole(std::max<std::size_t>(info.argsz, sizeof info));
  auto* const all = reinterpret_cast<vfio_iommu_type1_info*>(whole.data());
  all->argsz = static_cast<std::uint32_t>(whole.size());
  if (abi::call(container, VFIO_IOMMU_GET_INFO, all) < 0 || (all->flags & VFIO_IOMMU_INFO_CAPS) == 0) return {};
  std::vector<IovaSpace::Range> ranges;
  for (std::uint32_t at = all->cap_offset; at != 0 && at + sizeof(vfio_info_cap_header) <= whole.size();) {
    const auto* header = reinterpret_cast<const vfio_info_cap_header*>(whole.data() + at);
    if (header->id == VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE) {
      const auto* cap = reinterpret_cast<const vfio_iommu_type1_info_cap_iova_range*>(header);
      for (std::uint32_t i = 0; i < cap->nr_iovas; ++i) {
        ranges.push_back({cap->iova_ranges[i].start, cap->iova_ranges[i].end});
      }
    }
    at = header->next;
  }
  return ranges;
}

class Type1 final : public Iommu {
 public:
  Type1(Descriptor group, Descriptor container, std::vector<IovaSpace::Range> ranges)
      : container_(std::move(container)), group_(std::move(group)), space_(std::move(ranges)) {}

  int group() const { return group_.get(); }

  Mapping map(void* address, Bytes length, Access access, std::uint64_t* pages) override {
    std::lock_guard guard(lock_);
    const std::uint64_t iova = space_.take(reinterpret_cast<std::uintptr_t>(address), length.value);
    vfio_iommu_type1_dma_map map{};
    map.argsz = sizeof map;
    map.flags = VFIO_DMA_MAP_FLAG_READ | (access == Access::read_write ? VFIO_DMA_MAP_FLAG_WRITE : 0u);
    map.vaddr = reinterpret_cast<std::uintptr_t>(address);
    map.iova = iova;
    map.size = length.value;
    if (const int result = abi::call(container_.get(), VFIO_IOMMU_MAP_DMA, &map); result < 0) {
      space_.give(iova);
      fail_to_map(-result, length);
    }
    write_pages(iova, length, pages);
    return {iova, length};
  }

  void unmap(const Mapping& mapping) noexcept override {
    std::lock_guard guard(lock_);
    vfio_iommu_type1_dma_unmap unmap{};
    unmap.argsz = sizeof unmap;
    unmap.iova = mapping.token;
    unmap.size = mapping.length.value;
    // What could not be unmapped keeps its addresses: they are not handed out again.
    if (abi::call(container_.get(), VFIO_IOMMU_UNMAP_DMA, &unmap) >= 0) space_.give(mapping.token);
  }

 private:
  Descriptor container_, group_;
  std::mutex lock_;
  IovaSpace space_;
};

/// The groups that this process has open, by number: a group can be opened once, and holds all devices of it.
struct Groups {
  std::mutex lock;
  std::map<std::string, std::weak_ptr<Type1>> open;
};
Groups& groups() {
  // NOLINTNEXTLINE: devices may be closed after static destruction
  static auto* const all = [] {
    auto* const made = new Groups;
    // What a parent of a fork has open is the parent's.
    on_fork(ForkOrder::iommu_groups, {[] { groups().lock.lock(); }, [] { groups().lock.unlock(); },
                                      [] {
                                        groups().open.clear();
                                        groups().lock.unlock();
                                      }});
    return made;
  }();
  return *all;
}

std::shared_ptr<Type1> open_group(const PciFunction& function) {
  setup_step("vfio: group");
  Descriptor group = open_vfio_node("/dev/vfio/" + function.group, function);
  vfio_group_status status{};
  status.argsz = sizeof status;
  if (const int result = abi::call(group.get(), VFIO_GROUP_GET_STATUS, &status); result < 0) {
    fail(-result, "open", std::string("the VFIO group does not answer: ") + std::strerror(-result));
  }
  if ((status.flags & VFIO_GROUP_FLAGS_VIABLE) == 0) {
    fail(EPERM, "open",
         "IOMMU group " + function.group + " of " + function.address + " has devices that other drivers hold",
         "bind every device of the group to vfio-pci; `ugds devices` lists them");
  }
  setup_step("vfio: container");
  Descriptor container = open_vfio_node("/dev/vfio/vfio", function);
  if (abi::call(container.get(), VFIO_CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU) <= 0) {
    fail(EOPNOTSUPP, "open", "this kernel has no VFIO type1 IOMMU", "load the module vfio_iommu_type1");
  }
  int number = container.get();
  if (const int result = abi::call(group.get(), VFIO_GROUP_SET_CONTAINER, &number); result < 0) {
    fail(-result, "open", std::string("the VFIO group could not be added to a container: ") + std::strerror(-result));
  }
  if (const int result = abi::call(container.get(), VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU); result < 0) {
    fail(-result, "open", std::string("the IOMMU could not be set up: ") + std::strerror(-result),
         "check that it is on (intel_iommu=on, or the firmware's setting)");
  }
  std::vector<IovaSpace::Range> ranges = iova_ranges(container.get());
  // From before the kernel said so: what every IOMMU of a server translates.
  if (ranges.empty()) ranges = {{0, 0xfedfffff}, {0xfef00000, (std::uint64_t{1} << 39) - 1}};
  return std::make_shared<Type1>(std::move(group), std::move(container), std::move(ranges));
}

}  // namespace

VfioAccess open_by_type1(const PciFunction& function) {
  if (function.group.empty() || function.group_without_iommu) {
    fail(
        ENODEV, "open", function.address + " has no IOMMU group",
        "turn the IOMMU on, in the firmware and by intel_iommu=on or amd_iommu=on; ?iommu=none does without, unsafely");
  }
  Groups& all = groups();
  std::lock_guard guard(all.lock);
  std::shared_ptr<Type1> group = all.open[function.group].lock();
  if (!group) all.open[function.group] = group = open_group(function);
  const int device = abi::call(group->group(), VFIO_GROUP_GET_DEVICE_FD, function.address.c_str());
  if (device < 0) {
    fail(-device, "open",
         device == -EBUSY ? function.address + " is open already"
                          : "VFIO did not open " + function.address + ": " + std::strerror(-device),
         device == -EBUSY ? "close it first, or use the device that is open" : "");
  }
  return {std::move(group), Descriptor(device)};
}

}  // namespace ugds::device
