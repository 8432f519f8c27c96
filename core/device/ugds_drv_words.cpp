// SPDX-License-Identifier: Apache-2.0
#include "device/ugds_drv_words.hpp"

#include <cerrno>
#include <cstring>

#include "base/error.hpp"
#include "base/text.hpp"
#include "device/iommu.hpp"
#include "uapi/ugds_drv.h"

namespace ugds::device {

namespace {

const char* known_words(std::uint32_t reason) {
  switch (reason) {
    case UGDS_DRV_REASON_ARGUMENT: return "a value that this helper does not know";
    case UGDS_DRV_REASON_RANGE: return "the range is no whole number of pages";
    case UGDS_DRV_REASON_OVERLAP: return "the range overlaps memory that is mapped already";
    case UGDS_DRV_REASON_LIMIT: return "a limit would be exceeded";
    case UGDS_DRV_REASON_MEMORY: return "the kernel has no memory for it";
    case UGDS_DRV_REASON_UNPINNABLE: return "the range is not memory that can be pinned for long";
    case UGDS_DRV_REASON_DMA: return "the kernel's DMA layer would not map it";
    case UGDS_DRV_REASON_BOUNCED: return "the device does not reach that memory without a bounce buffer";
    case UGDS_DRV_REASON_DESCRIPTOR: return "the descriptor is none of the kind that is needed";
    case UGDS_DRV_REASON_BEYOND_END: return "the range ends beyond the DMA-BUF";
    case UGDS_DRV_REASON_ATTACH: return "the memory's exporter knows no peer-to-peer way between the two devices";
    case UGDS_DRV_REASON_CANNOT_PIN:
      return "no IOMMU translates, so that the memory has to stay where it is, and its exporter does not pin it";
    case UGDS_DRV_REASON_FENCE: return "earlier work on the memory did not finish in time";
    case UGDS_DRV_REASON_EXPORTER:
      return "the kernel does not map it for this device: the two may be below bridges that do not forward between "
             "them";
    case UGDS_DRV_REASON_PIECES: return "its pieces are not whole pages";
    case UGDS_DRV_REASON_NOT_PEER: return "it is not a peer device's memory";
    case UGDS_DRV_REASON_STALE: return "its exporter took it back meanwhile";
    case UGDS_DRV_REASON_VECTORS: return "there are not so many interrupt vectors";
    case UGDS_DRV_REASON_NOT_BUILT: return "the kernel, or ugds_drv, was built without it";
    default: return nullptr;
  }
}

}  // namespace

std::string reason_words(std::uint32_t reason, int code) {
  const char* const known = known_words(reason);
  return known != nullptr ? std::string(known) + " (" + std::strerror(code) + ")" : std::strerror(code);
}

const char* halt_words(std::uint32_t cause) {
  switch (cause) {
    case UGDS_DRV_REASON_REVOKED: return "memory that the controller reached was taken back by its exporter";
    case UGDS_DRV_REASON_SYSTEM_RESET: return "somebody reset the controller's function, or its bus";
    case UGDS_DRV_REASON_SUSPENDED: return "the system was suspended";
    case UGDS_DRV_REASON_PCI_ERROR: return "the PCI bus reported an error of the controller or of its link";
    default: return "the system stopped the controller's DMA";
  }
}

void fail_version(const std::string& path, int result, std::uint32_t version) {
  const std::string ours = "version " + std::to_string(UGDS_DRV_API_VERSION) + " of its interface";
  if (result < 0) {
    fail(EPROTO, "open",
         path + " does not answer as a ugds_drv does that this library knows: " + std::strerror(-result),
         "load a ugds_drv with " + ours + ": build the one that comes with this library (drv/README.md)");
  }
  const bool older = version < UGDS_DRV_API_VERSION;
  fail(EPROTO, "open",
       "ugds_drv has version " + std::to_string(version) + " of its interface, and this library needs " + ours,
       older ? "load the newer ugds_drv that comes with this library (drv/README.md)"
             : "use a newer release of this library, or the ugds_drv that came with this one");
}

void fail_to_map_host(int code, std::uint32_t reason, Bytes length) {
  if (code == EFAULT || reason == UGDS_DRV_REASON_LIMIT) fail_to_map(code, length);
  if (code == ENODEV) fail(ENODEV, "map", "the device has been removed", "close it");
  fail(reason == UGDS_DRV_REASON_BOUNCED ? EOPNOTSUPP : code, "map",
       "ugds_drv would not map " + format_size(length.value) + ": " + reason_words(reason, code));
}

void fail_to_import(int code, std::uint32_t reason, std::uint64_t peer, Bytes length) {
  if (code == ENODEV) fail(ENODEV, "map", "the device has been removed", "close it");
  std::string cause = "ugds_drv would not import the DMA-BUF: " + reason_words(reason, code);
  const char* hint = "";
  switch (reason) {
    case UGDS_DRV_REASON_NOT_PEER:
      cause = "only " + format_size(peer) + " of " + format_size(length.value) +
              " of the DMA-BUF are memory of a peer device: its exporter keeps the rest in the host's";
      hint = "what is in the host's memory is no direct route to a GPU: stage it, or map it into this process";
      break;
    case UGDS_DRV_REASON_ATTACH:
    case UGDS_DRV_REASON_EXPORTER:
      hint = "`ugds devices` shows how far the two are from each other: one switch or one host bridge is best";
      break;
    case UGDS_DRV_REASON_CANNOT_PIN: hint = "turn the IOMMU on, and leave iommu=pt out"; break;
    case UGDS_DRV_REASON_BEYOND_END:
    case UGDS_DRV_REASON_RANGE: hint = "check offset and size"; break;
    case UGDS_DRV_REASON_DESCRIPTOR: hint = "ugds_drv imports DMA-BUFs; map a memfd into this process instead"; break;
    case UGDS_DRV_REASON_NOT_BUILT: hint = "use a kernel with CONFIG_PCI_P2PDMA and DMA-BUFs"; break;
    default: break;
  }
  const bool impossible = reason == UGDS_DRV_REASON_NOT_PEER || reason == UGDS_DRV_REASON_ATTACH ||
                          reason == UGDS_DRV_REASON_EXPORTER || reason == UGDS_DRV_REASON_CANNOT_PIN ||
                          reason == UGDS_DRV_REASON_NOT_BUILT || reason == UGDS_DRV_REASON_PIECES;
  fail(impossible ? EOPNOTSUPP : code, "map", cause, hint);
}

void fail_to_pin_gpu(int code, std::uint32_t reason) {
  if (code == ENODEV) fail(ENODEV, "map", "the device has been removed", "close it");
  const bool not_built = reason == UGDS_DRV_REASON_NOT_BUILT;
  fail(not_built || reason == UGDS_DRV_REASON_EXPORTER ? EOPNOTSUPP : code, "map",
       not_built ? "ugds_drv was built without the NVIDIA driver's interface for peers"
                 : "the NVIDIA driver would not pin the memory for a peer: " + reason_words(reason, code),
       not_built ? "build it with UGDS_DRV_NVIDIA, or use a driver that exports DMA-BUFs (drv/README.md)" : "");
}

void fail_to_allocate(int code, std::uint32_t reason, Bytes length) {
  if (code == ENODEV) fail(ENODEV, "open", "the device has been removed", "close it");
  fail(code, "open", "ugds_drv gave no " + format_size(length.value) + " for queues: " + reason_words(reason, code),
       "free memory, or ask for fewer or shallower queues");
}

}  // namespace ugds::device
