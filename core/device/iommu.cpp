// SPDX-License-Identifier: Apache-2.0
#include "device/iommu.hpp"

#include <fcntl.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/error.hpp"
#include "base/text.hpp"
#include "nvme/prp.hpp"

namespace ugds::device {

Mapping Iommu::map_descriptor(const DescriptorRange&, Access, std::uint64_t*) {
  fail(EOPNOTSUPP, "map",
       "memory that is known by a descriptor alone needs iommufd, which this device was not opened by",
       "use a kernel with iommufd and device cdevs (Linux 6.18 or later), or map the memory into this process");
}

void warn_without_iommu(const std::string& address) {
  std::fprintf(stderr,
               "ugds: warning: %s is opened without an IOMMU: a fault of the device or of its driver can overwrite any "
               "memory of this machine\n",
               address.c_str());
}

void write_pages(std::uint64_t iova, Bytes length, std::uint64_t* pages) {
  for (std::uint64_t i = 0; i < length.value / nvme::kPageSize; ++i) pages[i] = iova + i * nvme::kPageSize;
}

void fail_to_map(int code, Bytes length) {
  const std::string size = format_size(length.value);
  if (code == ENOMEM) {
    rlimit limit{};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    const std::string most = limit.rlim_cur == RLIM_INFINITY ? "unlimited" : format_size(limit.rlim_cur);
    fail(ENOMEM, "map", "the kernel would not pin " + size + " more: the limit for locked memory is " + most,
         "raise it: `ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd unit, or memlock in limits.conf");
  }
  if (code == ENOSPC) {
    fail(ENOSPC, "map", "the kernel has no more DMA mappings for this device",
         "register fewer, larger buffers; vfio_iommu_type1.dma_entry_limit is the limit");
  }
  if (code == EFAULT) {
    fail(EFAULT, "map", "the range is not memory that can be pinned for DMA",
         "check the pointer and the size; a device's memory may need a DMA-BUF, or a type1 container");
  }
  fail(code, "map", "the kernel would not map " + size + " for DMA: " + std::strerror(code));
}

Descriptor open_vfio_node(const std::string& path, const PciFunction& function) {
  Descriptor node(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (node) return node;
  switch (errno) {
    case EBUSY:
      fail(EBUSY, "open", function.address + " is in use: somebody else has " + path + " open",
           "end that process, or share the device through it");
    case EACCES:
    case EPERM:
      fail(EACCES, "open", "this user may not open " + path,
           "chown it to the user, or add a udev rule; /dev/vfio/vfio and /dev/iommu too");
    case ENOENT:
      fail(ENOENT, "open", "there is no " + path,
           "load the module vfio-pci and bind the device: `ugds bind " + function.address + "`");
    default: fail(errno, "open", path + " cannot be opened: " + std::strerror(errno));
  }
}

}  // namespace ugds::device
