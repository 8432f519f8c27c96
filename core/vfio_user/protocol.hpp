// SPDX-License-Identifier: Apache-2.0
//
// The vfio-user protocol, version 0.1, as data: what client and server put on their UNIX stream socket. Everything is
// in the host's byte order; descriptors travel as SCM_RIGHTS beside the first byte of a message. The payloads of
// regions and interrupts are VFIO's own (linux/vfio.h), written out here so that no kernel header decides about them.
#pragma once

#include <cstdint>

namespace ugds::vfio_user {

inline constexpr std::uint16_t kMajor = 0, kMinor = 1;

enum class Message : std::uint16_t {
  version = 1,
  dma_map = 2,
  dma_unmap = 3,
  device_get_info = 4,
  device_get_region_info = 5,
  device_get_region_io_fds = 6,
  device_get_irq_info = 7,
  device_set_irqs = 8,
  region_read = 9,
  region_write = 10,
  dma_read = 11,   ///< from the server; no server of ours sends it
  dma_write = 12,  ///< the same
  device_reset = 13,
  region_write_multi = 15,
  device_feature = 16,
  migration_data_read = 17,
  migration_data_write = 18,
};

/// Header::flags.
inline constexpr std::uint32_t kTypeMask = 0xf, kTypeCommand = 0, kTypeReply = 1;
inline constexpr std::uint32_t kNoReply = 0x10, kFlagError = 0x20;

/// Stands before every message. A reply echoes `id` and `command`; one with kFlagError has no payload.
struct Header {
  std::uint16_t id;
  std::uint16_t command;  ///< a Message
  std::uint32_t size;     ///< of the whole message, header included
  std::uint32_t flags;
  std::uint32_t error;  ///< a positive errno in a reply with kFlagError
};
static_assert(sizeof(Header) == 16);

/// Followed by NUL-terminated JSON, {"capabilities":{"max_msg_fds":8,…}}, which may be left out. In the reply as well.
struct Version {
  std::uint16_t major, minor;
};
static_assert(sizeof(Version) == 4);

/// What holds where a side's JSON does not say.
inline constexpr std::uint32_t kDefaultMaxMessageFds = 1;
inline constexpr std::uint32_t kDefaultMaxTransfer = 1 << 20;
inline constexpr std::uint32_t kDefaultMaxDmaMaps = 65535;

/// Both of them needed by whatever a controller writes to: DmaMap::flags.
inline constexpr std::uint32_t kDmaReadable = 1, kDmaWritable = 2;

/// With the descriptor of the memory. No payload in the reply.
struct DmaMap {
  std::uint32_t argsz;  ///< sizeof(DmaMap)
  std::uint32_t flags;
  std::uint64_t offset;  ///< in the descriptor's file
  std::uint64_t iova, size;
};
static_assert(sizeof(DmaMap) == 32);

/// DmaUnmap::flags.
inline constexpr std::uint32_t kUnmapGetDirtyBitmap = 1, kUnmapAll = 2;

/// Exactly what one DmaMap mapped; the reply repeats it, and comes when nothing touches the memory any more.
struct DmaUnmap {
  std::uint32_t argsz;  ///< at least sizeof(DmaUnmap)
  std::uint32_t flags;
  std::uint64_t iova, size;
};
static_assert(sizeof(DmaUnmap) == 24);

/// DeviceInfo::flags.
inline constexpr std::uint32_t kDeviceReset = 1, kDevicePci = 2;

/// Request and reply.
struct DeviceInfo {
  std::uint32_t argsz;
  std::uint32_t flags;
  std::uint32_t regions, irqs;
};
static_assert(sizeof(DeviceInfo) == 16);

/// PCI's regions, by RegionInfo::index.
inline constexpr std::uint32_t kRegionBar0 = 0, kRegionBar4 = 4, kRegionBar5 = 5, kRegionRom = 6, kRegionConfig = 7,
                               kRegionVga = 8, kPciRegions = 9;

/// RegionInfo::flags.
inline constexpr std::uint32_t kRegionRead = 1, kRegionWrite = 2, kRegionMmap = 4, kRegionCapabilities = 8;

/// Request and reply. With kRegionMmap a descriptor comes with the reply. `argsz` is what the whole reply takes; where
/// the request's is smaller, only this structure comes, and the client asks again.
struct RegionInfo {
  std::uint32_t argsz;
  std::uint32_t flags;
  std::uint32_t index;
  std::uint32_t capabilities;  ///< with kRegionCapabilities: offset of the first from the start of this structure
  std::uint64_t size;
  std::uint64_t offset;  ///< of the region in the descriptor's file
};
static_assert(sizeof(RegionInfo) == 32);

struct CapabilityHeader {
  std::uint16_t id, version;
  std::uint32_t next;  ///< from the start of RegionInfo; 0: the last
};
static_assert(sizeof(CapabilityHeader) == 8);

inline constexpr std::uint16_t kCapabilitySparseMmap = 1;

/// The parts that can be mapped, where that is not the whole region. `areas` times SparseArea follow.
struct SparseMmap {
  CapabilityHeader header;
  std::uint32_t areas;
  std::uint32_t reserved;
};
static_assert(sizeof(SparseMmap) == 16);

struct SparseArea {
  std::uint64_t offset, size;  ///< in the region; RegionInfo::offset is added for mmap
};
static_assert(sizeof(SparseArea) == 16);

/// PCI's kinds of interrupt, by IrqInfo::index and IrqSet::index.
inline constexpr std::uint32_t kIrqIntx = 0, kIrqMsi = 1, kIrqMsix = 2, kIrqError = 3, kIrqRequest = 4, kPciIrqs = 5;

/// IrqInfo::flags.
inline constexpr std::uint32_t kIrqEventfd = 1, kIrqMaskable = 2, kIrqAutomasked = 4, kIrqNoResize = 8;

/// Request and reply.
struct IrqInfo {
  std::uint32_t argsz;
  std::uint32_t flags;
  std::uint32_t index;
  std::uint32_t count;
};
static_assert(sizeof(IrqInfo) == 16);

/// IrqSet::flags: one of each.
inline constexpr std::uint32_t kIrqDataNone = 1, kIrqDataBool = 2, kIrqDataEventfd = 4, kIrqDataMask = 7;
inline constexpr std::uint32_t kIrqActionMask = 8, kIrqActionUnmask = 16, kIrqActionTrigger = 32,
                               kIrqActionsMask = 0x38;

/// With kIrqDataBool, `count` bytes follow. With kIrqDataEventfd, `count` descriptors come with the message, and
/// without any the vectors are turned off; so they all are with kIrqDataNone, kIrqActionTrigger and a `count` of 0. No
/// payload in the reply.
struct IrqSet {
  std::uint32_t argsz;  ///< with the bytes that follow
  std::uint32_t flags;
  std::uint32_t index;
  std::uint32_t start, count;
};
static_assert(sizeof(IrqSet) == 20);

/// Of region_read and region_write, and of their replies. `count` bytes follow in a write and in a read's reply.
struct RegionAccess {
  std::uint64_t offset;
  std::uint32_t region;
  std::uint32_t count;
};
static_assert(sizeof(RegionAccess) == 16);

}  // namespace ugds::vfio_user
