// SPDX-License-Identifier: Apache-2.0
//
// What the kernel's VFIO and iommufd interfaces have beyond the headers of the oldest system that builds us: device
// cdevs and iommufd (Linux 6.6), import of DMA-BUFs (Linux 6.18). Layouts are the kernel's user ABI, which never
// changes.
#pragma once

#include <linux/vfio.h>
#include <sys/ioctl.h>

#include <cerrno>
#include <cstdint>

namespace ugds::device::abi {

struct BindIommufd {
  std::uint32_t argsz = sizeof(BindIommufd), flags = 0;
  std::int32_t iommufd = -1;
  std::uint32_t device_id = 0;
};
static_assert(sizeof(BindIommufd) == 16);
inline constexpr unsigned long kBindIommufd = _IO(VFIO_TYPE, VFIO_BASE + 18);

struct AttachIommufd {
  std::uint32_t argsz = sizeof(AttachIommufd), flags = 0, ioas = 0;
};
static_assert(sizeof(AttachIommufd) == 12);
inline constexpr unsigned long kAttachIommufd = _IO(VFIO_TYPE, VFIO_BASE + 19);

inline constexpr unsigned kIommufdType = ';';

struct IoasAlloc {
  std::uint32_t size = sizeof(IoasAlloc), flags = 0, ioas = 0;
};
static_assert(sizeof(IoasAlloc) == 12);
inline constexpr unsigned long kIoasAlloc = _IO(kIommufdType, 0x81);

struct IovaRange {
  std::uint64_t first, last;
};
struct IoasRanges {
  std::uint32_t size = sizeof(IoasRanges), ioas = 0, count = 0, reserved = 0;
  std::uint64_t ranges = 0, alignment = 0;
};
static_assert(sizeof(IoasRanges) == 32);
inline constexpr unsigned long kIoasRanges = _IO(kIommufdType, 0x84);

inline constexpr std::uint32_t kMapFixed = 1, kMapWritable = 2, kMapReadable = 4;
struct IoasMap {
  std::uint32_t size = sizeof(IoasMap), flags = 0, ioas = 0, reserved = 0;
  std::uint64_t address = 0, length = 0, iova = 0;
};
static_assert(sizeof(IoasMap) == 40);
inline constexpr unsigned long kIoasMap = _IO(kIommufdType, 0x85);

struct IoasUnmap {
  std::uint32_t size = sizeof(IoasUnmap), ioas = 0;
  std::uint64_t iova = 0, length = 0;
};
static_assert(sizeof(IoasUnmap) == 24);
inline constexpr unsigned long kIoasUnmap = _IO(kIommufdType, 0x86);

struct IoasMapFile {
  std::uint32_t size = sizeof(IoasMapFile), flags = 0, ioas = 0;
  std::int32_t descriptor = -1;
  std::uint64_t start = 0, length = 0, iova = 0;
};
static_assert(sizeof(IoasMapFile) == 40);
inline constexpr unsigned long kIoasMapFile = _IO(kIommufdType, 0x8f);

/// ioctl, again where a signal interrupted it. The result, or -errno.
template <class Argument>
int call(int descriptor, unsigned long request, Argument argument) {
  for (;;) {
    const int result = ioctl(descriptor, request, argument);
    if (result >= 0) return result;
    if (errno != EINTR) return -errno;
  }
}

}  // namespace ugds::device::abi
