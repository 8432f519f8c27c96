// SPDX-License-Identifier: Apache-2.0
#include "device/device.hpp"

#include <cerrno>

#include "base/error.hpp"
#include "base/text.hpp"
#include "device/emulated.hpp"
#include "device/file.hpp"
#include "device/pci.hpp"
#include "device/ugds_drv.hpp"
#include "device/vfio.hpp"
#include "device/vfio_user.hpp"

namespace ugds::device {

const char* transport_name(Transport transport) {
  switch (transport) {
    case Transport::emulated: return "emulated";
    case Transport::vfio_user: return "vfio-user";
    case Transport::vfio: return "vfio";
    case Transport::ugds_drv: return "ugds_drv";
    case Transport::file: return "file";
  }
  return "unknown";
}

Mapping Device::map_descriptor(const DescriptorRange&, Access, std::uint64_t*) {
  fail(EOPNOTSUPP, "map", "this transport cannot reach memory that is known by a descriptor alone",
       "register memory that this process reaches; GPU memory can be staged (leave out require=\"direct\")");
}

Mapping Device::map_nvidia(std::uint64_t, Bytes, Access, std::uint64_t*) {
  fail(EOPNOTSUPP, "map", "the NVIDIA driver's interface for peers is reached through ugds_drv alone",
       "bind the controller to ugds_drv");
}

Mapping Device::map_foreign(const ForeignRange&, Access, std::uint64_t*) {
  fail(EOPNOTSUPP, "map",
       std::string("transport ") + transport_name(transport()) + " cannot reach memory that a copier has to copy",
       "have the memory exported as a DMA-BUF, or stage it through host memory");
}

void Device::require_vectors(std::size_t count) const {
  const std::uint32_t vectors = limits().interrupt_vectors;
  if (count > vectors) fail(EINVAL, "open", "the device has " + std::to_string(vectors) + " interrupt vectors");
}

void Device::set_interrupts(std::span<const int> eventfds) {
  if (!eventfds.empty()) fail(EOPNOTSUPP, "open", "this transport has no interrupts", "completions are polled");
}

bool is_file(const Uri& uri) { return uri.scheme == "file" || (uri.scheme.empty() && !is_helper_path(uri.place)); }

std::unique_ptr<Device> open(const std::string& text, const Uri& uri) {
  if (uri.scheme == "emulated") return std::make_unique<EmulatedDevice>(text, uri);
  if (uri.scheme == "vfio-user") return std::make_unique<VfioUserDevice>(text, uri);
  if (is_file(uri)) return std::make_unique<FileDevice>(text, uri);
  if (uri.scheme.empty()) return std::make_unique<UgdsDrvDevice>(text, uri);
  if (uri.scheme == "pci") {
    const PciFunction function = find_nvme_function(uri.place);
    if (function.driver == "ugds_drv") return std::make_unique<UgdsDrvDevice>(text, function, uri);
    return std::make_unique<VfioDevice>(text, function, uri);
  }
  const std::string near = nearest(uri.scheme, {"emulated", "file", "pci", "vfio-user"});
  fail(EINVAL, "open", "\"" + uri.scheme + ":\" names no transport of this release",
       near.empty()
           ? "use pci:ADDRESS, /dev/ugds_drvN, file:PATH, vfio-user:SOCKET, or emulated:SIZE, such as emulated:1GiB"
           : "did you mean " + near + ":?");
}

}  // namespace ugds::device
