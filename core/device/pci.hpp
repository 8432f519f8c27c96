// SPDX-License-Identifier: Apache-2.0
//
// A PCI function as sysfs describes it: which driver holds it, in which IOMMU group, by which character device. Set-up
// only. What is shown to people is read in Python (python/ugds/host); this is what opening needs.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

namespace ugds::device {

struct PciFunction {
  std::string address;               ///< "0000:65:00.0"
  std::string driver;                ///< empty: none
  std::string group;                 ///< of its IOMMU; empty: none
  bool group_without_iommu = false;  ///< a group that vfio made up (no-IOMMU mode)
  std::string cdev;                  ///< "vfio3" of /dev/vfio/devices; empty: the kernel made none
  std::string helper;                ///< "ugds_drv0" of /dev; empty: the kernel helper does not hold it
};

/// "65:00.0" and "0000:65:00.0" in the long form; nothing for what is no address.
std::optional<std::string> pci_address(const std::string& text);

/// What the kernel calls the character device `number` if it is one of the kernel helper's ("ugds_drv0"); else nothing.
std::optional<std::string> helper_node(dev_t number);
/// Whether a path is one of ugds_drv's nodes, by its name.
inline bool is_helper_path(const std::string& path) { return path.starts_with("/dev/ugds_drv"); }

/// Throws Failure: EINVAL (no address), ENODEV (no such function), EINVAL (not an NVMe controller).
PciFunction find_nvme_function(const std::string& text);

}  // namespace ugds::device
