// SPDX-License-Identifier: Apache-2.0
//
// What ugds_drv says when it refuses, for people: operation, cause and remedy.
#pragma once

#include <cstdint>
#include <string>

#include "base/units.hpp"

namespace ugds::device {

/// A reason of the helper's (drv/uapi/ugds_drv.h), or the words for `code` where it gave none that is known.
std::string reason_words(std::uint32_t reason, int code);
/// Why it has stopped the device's DMA. A static text.
const char* halt_words(std::uint32_t cause);

/// For the handshake, which gave `result` and the helper's version. Throws.
[[noreturn]] void fail_version(const std::string& path, int result, std::uint32_t version);
[[noreturn]] void fail_to_map_host(int code, std::uint32_t reason, Bytes length);
/// Of a DMA-BUF, of which `peer` bytes are a peer device's memory. Throws.
[[noreturn]] void fail_to_import(int code, std::uint32_t reason, std::uint64_t peer, Bytes length);
/// Of a GPU, by the NVIDIA driver's interface for peers. Throws.
[[noreturn]] void fail_to_pin_gpu(int code, std::uint32_t reason);
[[noreturn]] void fail_to_allocate(int code, std::uint32_t reason, Bytes length);

}  // namespace ugds::device
