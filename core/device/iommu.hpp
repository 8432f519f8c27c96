// SPDX-License-Identifier: Apache-2.0
//
// The three ways in which VFIO lets a device reach memory: a type1 container (groups), iommufd (device cdevs), and
// none, where the device uses physical addresses and nothing keeps it from any of them.
#pragma once

#include <memory>
#include <string>

#include "base/descriptor.hpp"
#include "device/device.hpp"
#include "device/pci.hpp"

namespace ugds::device {

class Iommu {
 public:
  virtual ~Iommu() = default;
  Iommu() = default;
  Iommu(const Iommu&) = delete;
  Iommu& operator=(const Iommu&) = delete;

  /// As Device::map and its like. Thread-safe.
  virtual Mapping map(void* address, Bytes length, Access access, std::uint64_t* pages) = 0;
  virtual Mapping map_descriptor(const DescriptorRange& range, Access access, std::uint64_t* pages);
  virtual void unmap(const Mapping& mapping) noexcept = 0;
};

/// A device that VFIO has opened, and what translates its addresses. The device is closed first: that stops its DMA.
struct VfioAccess {
  std::shared_ptr<Iommu> iommu;
  Descriptor device;
};

/// By the function's group and a type1 container; devices of one group share both. Throws Failure.
VfioAccess open_by_type1(const PciFunction& function);
/// By the function's cdev, with an address space of its own. Throws Failure.
VfioAccess open_by_iommufd(const PciFunction& function);
/// By a no-IOMMU group. Throws Failure.
VfioAccess open_without_iommu(const PciFunction& function);

/// Says on the standard error that nothing keeps an open device from any memory.
void warn_without_iommu(const std::string& address);
/// Fills `pages` for consecutive IOVAs.
void write_pages(std::uint64_t iova, Bytes length, std::uint64_t* pages);
/// Why the kernel would not map memory for DMA, with what to do. Throws.
[[noreturn]] void fail_to_map(int code, Bytes length);

/// Opens a node of /dev/vfio. Throws Failure: EBUSY (another process has it), EACCES, ENOENT.
Descriptor open_vfio_node(const std::string& path, const PciFunction& function);

}  // namespace ugds::device
