// SPDX-License-Identifier: Apache-2.0
//
// VFIO's no-IOMMU mode: the device is given physical addresses. A page that is merely locked can still be moved by the
// kernel, under a transfer; so pages are pinned as io_uring pins its fixed buffers, which keeps them where they are
// until the ring is closed. Nothing keeps the device from any other memory: for machines whose owner asks for that by
// name.
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/steps.hpp"
#include "base/units.hpp"
#include "device/iommu.hpp"
#include "device/vfio_abi.hpp"
#include "nvme/prp.hpp"

namespace ugds::device {

namespace {

/// The most that one fixed buffer holds.
constexpr std::uint64_t kBuffer = 1_GiB;

/// A ring that does nothing but hold pages. Its number is above `device`: a process that is killed closes its
/// descriptors in order, and the device must stop before its pages are free. Throws Failure.
Descriptor pin(void* address, Bytes length, int device) {
  io_uring_params parameters{};
  Descriptor ring(static_cast<int>(syscall(SYS_io_uring_setup, 1, &parameters)));
  if (!ring) {
    fail(EOPNOTSUPP, "map", std::string("pages cannot be pinned without io_uring: ") + std::strerror(errno),
         "allow io_uring (kernel.io_uring_disabled=0), or use a machine with an IOMMU");
  }
  if (ring.get() < device) ring = Descriptor(fcntl(ring.get(), F_DUPFD_CLOEXEC, device + 1));
  if (!ring) fail(errno, "map", "no descriptor to pin pages with", "raise the limit of open files");
  std::vector<iovec> buffers;
  for (std::uint64_t done = 0; done < length.value; done += kBuffer) {
    buffers.push_back({static_cast<std::byte*>(address) + done, std::min(kBuffer, length.value - done)});
  }
  if (syscall(SYS_io_uring_register, ring.get(), IORING_REGISTER_BUFFERS, buffers.data(), buffers.size()) != 0) {
    fail_to_map(errno, length);
  }
  return ring;
}

class NoIommu final : public Iommu {
 public:
  NoIommu(Descriptor group, Descriptor container, int device)
      : device_(device),
        container_(std::move(container)),
        group_(std::move(group)),
        pagemap_(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) {
    if (!pagemap_)
      fail(errno, "open", "/proc/self/pagemap cannot be read, which tells physical addresses", "run as root");
  }

  Mapping map(void* address, Bytes length, Access, std::uint64_t* pages) override {
    Descriptor ring = pin(address, length, device_);
    const std::uint64_t count = length.value / nvme::kPageSize;
    const auto offset = static_cast<off_t>(reinterpret_cast<std::uintptr_t>(address) / nvme::kPageSize * 8);
    if (pread(pagemap_.get(), pages, count * 8, offset) != static_cast<ssize_t>(count * 8)) {
      fail(EFAULT, "map", "the kernel does not tell the physical addresses of the range");
    }
    constexpr std::uint64_t kPresent = std::uint64_t{1} << 63, kFrame = (std::uint64_t{1} << 55) - 1;
    for (std::uint64_t i = 0; i < count; ++i) {
      if ((pages[i] & kPresent) == 0 || (pages[i] & kFrame) == 0) {
        fail(EPERM, "map", "the kernel hides the physical addresses of the range", "run as root (CAP_SYS_ADMIN)");
      }
      pages[i] = (pages[i] & kFrame) * nvme::kPageSize;
    }
    std::lock_guard guard(lock_);
    pins_.emplace(++last_, std::move(ring));
    return {last_, length};
  }

  void unmap(const Mapping& mapping) noexcept override {
    std::lock_guard guard(lock_);
    pins_.erase(mapping.token);
  }

 private:
  const int device_;
  Descriptor container_, group_, pagemap_;
  std::mutex lock_;
  std::uint64_t last_ = 0;
  std::map<std::uint64_t, Descriptor> pins_;
};

}  // namespace

VfioAccess open_without_iommu(const PciFunction& function) {
  if (function.group.empty() || !function.group_without_iommu) {
    fail(EINVAL, "open",
         function.group.empty() ? function.address + " has no VFIO group without an IOMMU"
                                : function.address + " has an IOMMU, which is not to be done without",
         function.group.empty() ? "set vfio's parameter enable_unsafe_noiommu_mode to 1, then bind the device"
                                : "leave ?iommu=none out");
  }
  setup_step("vfio: group without IOMMU");
  Descriptor group = open_vfio_node("/dev/vfio/noiommu-" + function.group, function);
  Descriptor container = open_vfio_node("/dev/vfio/vfio", function);
  int number = container.get();
  if (const int result = abi::call(group.get(), VFIO_GROUP_SET_CONTAINER, &number); result < 0) {
    fail(-result, "open", std::string("the VFIO group could not be added to a container: ") + std::strerror(-result));
  }
  if (const int result = abi::call(container.get(), VFIO_SET_IOMMU, VFIO_NOIOMMU_IOMMU); result < 0) {
    fail(-result, "open", std::string("no-IOMMU mode could not be set up: ") + std::strerror(-result),
         "it needs CAP_SYS_RAWIO, and vfio's parameter enable_unsafe_noiommu_mode");
  }
  const int device = abi::call(group.get(), VFIO_GROUP_GET_DEVICE_FD, function.address.c_str());
  if (device < 0) fail(-device, "open", "VFIO did not open " + function.address + ": " + std::strerror(-device));
  Descriptor opened(device);
  return {std::make_shared<NoIommu>(std::move(group), std::move(container), device), std::move(opened)};
}

}  // namespace ugds::device
