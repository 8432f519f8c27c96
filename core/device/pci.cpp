// SPDX-License-Identifier: Apache-2.0
#include "device/pci.hpp"

#include <sys/sysmacros.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string_view>

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
  const auto part = [](std::string_view digits, std::size_t least, std::size_t most, unsigned last, unsigned& value) {
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    return digits.size() >= least && digits.size() <= most && error == std::errc() &&
           end == digits.data() + digits.size() && value <= last;
  };
  const std::string_view whole(text);
  const std::size_t dot = whole.rfind('.');
  if (dot == std::string_view::npos) return {};
  const std::size_t colon = whole.rfind(':', dot);
  if (colon == std::string_view::npos || colon == 0) return {};
  const std::size_t first = whole.rfind(':', colon - 1);
  const bool has_domain = first != std::string_view::npos;
  const std::string_view bus_text = has_domain ? whole.substr(first + 1, colon - first - 1) : whole.substr(0, colon);
  unsigned domain = 0, bus = 0, slot = 0, function = 0;
  if ((has_domain && !part(whole.substr(0, first), 4, 8, ~0u, domain)) || !part(bus_text, 2, 2, 255, bus) ||
      !part(whole.substr(colon + 1, dot - colon - 1), 2, 2, 31, slot) ||
      !part(whole.substr(dot + 1), 1, 1, 7, function)) {
    return {};
  }
  char name[32];
  std::snprintf(name, sizeof name, "%04x:%02x:%02x.%x", domain, bus, slot, function);
  return name;
}

std::optional<std::string> helper_node(dev_t number) {
  const fs::path folder =
      fs::path("/sys/dev/char") / (std::to_string(major(number)) + ":" + std::to_string(minor(number)));
  if (link_name(folder / "subsystem") != "ugds_drv") return {};
  return link_name(folder);
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
  for (const auto& entry : fs::directory_iterator(folder / "ugds_drv", error)) {
    if (fs::exists(entry.path() / "dev", error)) function.helper = entry.path().filename();
  }
  return function;
}

}  // namespace ugds::device
