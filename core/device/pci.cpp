// SPDX-License-Identifier: Apache-2.0
#include "device/pci.hpp"

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "base/error.hpp"

namespace ugds::device {

namespace fs = std::filesystem;

namespace {

/// The last part of what a link names; empty where there is no link.
std::string link_name(const fs::path& link) {
  std::error_code error;
  const fs::path target = fs::read_symlink(link, error);
  return error ? std::string() : target.filename().string();
}

std::string first_line(const fs::path& file) {
  std::ifstream stream(file);
  std::string line;
  std::getline(stream, line);
  return line;
}

}  // namespace

std::optional<std::string> pci_address(const std::string& text) {
  unsigned domain = 0, bus = 0, slot = 0, function = 0;
  int end = 0;
  const auto whole = [&](int fields, int wanted) {
    return fields == wanted && static_cast<std::size_t>(end) == text.size() && bus < 256 && slot < 32 && function < 8;
  };
  if (!whole(std::sscanf(text.c_str(), "%8x:%2x:%2x.%1x%n", &domain, &bus, &slot, &function, &end), 4)) {
    domain = 0;
    end = 0;
    if (!whole(std::sscanf(text.c_str(), "%2x:%2x.%1x%n", &bus, &slot, &function, &end), 3)) return {};
  }
  char name[32];
  std::snprintf(name, sizeof name, "%04x:%02x:%02x.%x", domain, bus, slot, function);
  return name;
}

PciFunction find_nvme_function(const std::string& text) {
  const auto address = pci_address(text);
  if (!address) {
    fail(EINVAL, "open", "\"" + text + "\" is no PCI address",
         "write it as 0000:65:00.0; `ugds devices` lists the controllers");
  }
  const fs::path folder = fs::path("/sys/bus/pci/devices") / *address;
  std::error_code error;
  if (!fs::exists(folder, error)) {
    fail(ENODEV, "open", "there is no PCI device " + *address, "`ugds devices` lists the controllers that there are");
  }
  if (const std::string type = first_line(folder / "class"); !type.starts_with("0x010802")) {
    fail(EINVAL, "open", *address + " is not an NVMe controller: its class is " + type,
         "`ugds devices` lists the controllers that there are");
  }
  PciFunction function;
  function.address = *address;
  function.driver = link_name(folder / "driver");
  function.group = link_name(folder / "iommu_group");
  // A group that vfio made for a device without IOMMU has this name.
  function.group_without_iommu = first_line(folder / "iommu_group" / "name") == "vfio-noiommu";
  for (const auto& entry : fs::directory_iterator(folder / "vfio-dev", error)) {
    // Without a device number there is no node: older kernels have the folder alone.
    if (fs::exists(entry.path() / "dev", error)) function.cdev = entry.path().filename();
  }
  return function;
}

}  // namespace ugds::device
