// SPDX-License-Identifier: Apache-2.0
//
// What the controller of files (file.hpp) says otherwise than an NVMe device. The engine goes by it where a device's
// limits().bytewise is set, and nowhere else: a real device's vendor specific status means nothing of this.
//
//   blocks     have one byte, so that any range is whole blocks, and CDW12 holds their number, less one, in 20 bits:
//              16 to 19 are reserved in NVMe
//   memory     any address. IOVAs are addresses of this process
//   capacity   says nothing: a file grows when it is written to
//   statuses   of the vendor specific type, with a number in dword 0
#pragma once

#include <cstdint>

#include "nvme/status.hpp"

namespace ugds::device {

/// Bytes of the largest command.
inline constexpr std::uint32_t kBytewiseMost = 1u << 20;
/// Of a read that met the end of the file: dword 0 is how many bytes there were.
inline constexpr std::uint16_t kEndOfFile = nvme::make_status(nvme::StatusType::vendor, 0xc2);
/// The operating system's answer: dword 0 is the errno.
inline constexpr std::uint16_t kSystemError = nvme::make_status(nvme::StatusType::vendor, 0xc1);
/// Large requests are cut at multiples of this, so that all but their edges go past the page cache.
inline constexpr std::uint64_t kBytewiseCut = 4096;

}  // namespace ugds::device
