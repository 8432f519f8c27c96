// SPDX-License-Identifier: Apache-2.0
//
// iommufd and device cdevs: Linux 6.6 and later. Each device has an address space of its own.
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/steps.hpp"
#include "device/claim.hpp"
#include "device/iommu.hpp"
#include "device/iova_space.hpp"
#include "device/vfio_abi.hpp"

namespace ugds::device {

namespace {

class Iommufd final : public Iommu {
 public:
  Iommufd(Descriptor iommufd, std::uint32_t ioas, std::vector<IovaSpace::Range> ranges)
      : iommufd_(std::move(iommufd)), ioas_(ioas), space_(std::move(ranges)) {}

  Mapping map(void* address, Bytes length, Access access, std::uint64_t* pages) override {
    abi::IoasMap map;
    map.address = reinterpret_cast<std::uintptr_t>(address);
    return map_any(abi::kIoasMap, map, map.address, length, access, pages);
  }

  Mapping map_descriptor(const DescriptorRange& range, Access access, std::uint64_t* pages) override {
    abi::IoasMapFile map;
    map.descriptor = range.descriptor;
    map.start = range.offset;
    try {
      return map_any(abi::kIoasMapFile, map, range.offset, range.length, access, pages);
    } catch (const Failure& failure) {
      const int code = failure.error().code;
      if (code == ENOMEM || code == ENOSPC) throw;
      fail(code, "map", std::string("the kernel would not import the descriptor's memory: ") + std::strerror(code),
           "iommufd takes DMA-BUFs that vfio exports since Linux 6.18, and memfds since 6.13; check offset and size");
    }
  }

  void unmap(const Mapping& mapping) noexcept override {
    std::lock_guard guard(lock_);
    abi::IoasUnmap unmap;
    unmap.ioas = ioas_;
    unmap.iova = mapping.token;
    unmap.length = mapping.length.value;
    if (abi::call(iommufd_.get(), abi::kIoasUnmap, &unmap) >= 0) space_.give(mapping.token);
  }

 private:
  template <class Request>
  Mapping map_any(unsigned long number, Request& request, std::uint64_t congruent, Bytes length, Access access,
                  std::uint64_t* pages) {
    std::lock_guard guard(lock_);
    request.ioas = ioas_;
    request.iova = space_.take(congruent, length.value);
    request.length = length.value;
    request.flags = abi::kMapFixed | abi::kMapReadable | (access == Access::read_write ? abi::kMapWritable : 0u);
    if (const int result = abi::call(iommufd_.get(), number, &request); result < 0) {
      space_.give(request.iova);
      fail_to_map(-result, length);
    }
    write_pages(request.iova, length, pages);
    return {request.iova, length};
  }

  Descriptor iommufd_;
  std::uint32_t ioas_;
  std::mutex lock_;
  IovaSpace space_;
};

}  // namespace

VfioAccess open_by_iommufd(const PciFunction& function) {
  if (function.cdev.empty()) {
    fail(EOPNOTSUPP, "open", "the kernel made no VFIO device node for " + function.address,
         "it needs Linux 6.6 with CONFIG_VFIO_DEVICE_CDEV; ?iommu=type1 does without");
  }
  setup_step("vfio: device node");
  Descriptor device = open_vfio_node("/dev/vfio/devices/" + function.cdev, function);
  setup_step("vfio: iommufd");
  Descriptor iommufd = open_vfio_node("/dev/iommu", function);
  abi::BindIommufd bind;
  bind.iommufd = iommufd.get();
  if (const int result = abi::call(device.get(), abi::kBindIommufd, &bind); result < 0) {
    // The kernel's word for a device that is bound already.
    if (result == -EINVAL) fail_in_use(function.address);
    fail(-result, "open",
         result == -EBUSY ? "IOMMU group " + function.group + " of " + function.address + " is in use by others"
                          : "VFIO did not bind " + function.address + " to an iommufd: " + std::strerror(-result),
         "other devices of the group may be held by kernel drivers, or open by type1; `ugds devices` lists them");
  }
  abi::IoasAlloc alloc;
  if (const int result = abi::call(iommufd.get(), abi::kIoasAlloc, &alloc); result < 0) {
    fail(-result, "open", std::string("iommufd gave no address space: ") + std::strerror(-result));
  }
  abi::AttachIommufd attach;
  attach.ioas = alloc.ioas;
  if (const int result = abi::call(device.get(), abi::kAttachIommufd, &attach); result < 0) {
    fail(-result, "open", std::string("the device could not be given its address space: ") + std::strerror(-result));
  }
  abi::IoasRanges query;
  query.ioas = alloc.ioas;
  std::vector<abi::IovaRange> found(64);
  query.count = static_cast<std::uint32_t>(found.size());
  query.ranges = reinterpret_cast<std::uintptr_t>(found.data());
  if (const int result = abi::call(iommufd.get(), abi::kIoasRanges, &query); result < 0 && result != -EMSGSIZE) {
    fail(-result, "open", std::string("iommufd does not say which addresses it translates: ") + std::strerror(-result));
  }
  std::vector<IovaSpace::Range> ranges;
  for (std::uint32_t i = 0; i < query.count && i < found.size(); ++i) ranges.push_back({found[i].first, found[i].last});
  return {std::make_shared<Iommufd>(std::move(iommufd), alloc.ioas, std::move(ranges)), std::move(device)};
}

}  // namespace ugds::device
