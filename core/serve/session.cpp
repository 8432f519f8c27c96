// SPDX-License-Identifier: Apache-2.0
#include "serve/session.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.hpp"
#include "base/units.hpp"
#include "nvme/registers.hpp"

namespace ugds::serve {

using namespace vfio_user;

namespace {

/// Descriptors that one message to the server may carry. Some clients take no server's word for more than 16.
constexpr std::uint32_t kMaxMessageFds = 8;
/// Bits 2 and 3 said how the memory is reached before the descriptor did; some clients still set them.
constexpr std::uint32_t kDmaKnown = kDmaReadable | kDmaWritable | 0xc;
constexpr std::uint64_t kPage = 4096;

std::uint64_t bar0_size(std::uint64_t doorbell_area) { return std::bit_ceil(nvme::kDoorbellBase + doorbell_area); }

/// The structure that a payload begins with.
template <class Structure>
Structure take(const Request& request) {
  Structure structure;
  if (request.payload.size() < sizeof structure) fail(EINVAL, "serve", "the message is too short");
  std::memcpy(&structure, request.payload.data(), sizeof structure);
  return structure;
}

std::span<const std::byte> after(const Request& request, std::size_t bytes) {
  return std::span(request.payload).subspan(bytes);
}

}  // namespace

Session::Session(emulator::Controller& controller, int wake)
    : controller_(controller),
      doorbell_area_(align_up(controller.doorbell_bytes(), kPage)),
      bar0_size_(serve::bar0_size(doorbell_area_)),
      config_(bar0_size_, controller.options().vector_count()),
      table_(controller.options().vector_count()),
      memory_(controller, wake),
      irqs_(controller) {
  // New memory for each client: one that is gone may have left the old to somebody who still writes there.
  if (controller_.options().trapped) {
    controller_.plug();
  } else {
    doorbells_ = controller_.share_doorbells();
  }
}

Session::~Session() {
  irqs_.clear();
  // Off the bus, so that nothing reaches the memory whatever state it is in, a fault that keeps it from being reset
  // included; and taking the memory away is no mistake of the client's, which may have been killed.
  controller_.remove();
  memory_.clear();
}

Reply Session::handle(Request& request) {
  const auto message = static_cast<Message>(request.header.command);
  if (request.files_lost) fail(EMFILE, "serve", "descriptors of the message are lost");
  if (!negotiated_ && message != Message::version) fail(EINVAL, "serve", "the first message is not VERSION");
  switch (message) {
    case Message::version: return negotiate(request);
    case Message::dma_map: {
      const auto map = take<DmaMap>(request);
      if (map.argsz < sizeof map || (map.flags & ~kDmaKnown) != 0 || (map.flags & (kDmaReadable | kDmaWritable)) == 0)
        fail(EINVAL, "map", "argsz or flags");
      if (request.files.empty()) fail(EOPNOTSUPP, "map", "memory without a descriptor cannot be reached");
      if (request.files.size() != 1) fail(EINVAL, "map", "more than one descriptor");
      memory_.map(map, request.files.front());
      return {};
    }
    case Message::dma_unmap: return unmap(request);
    case Message::device_get_info: return device_info(request);
    case Message::device_get_region_info: return region_info(request);
    case Message::device_get_irq_info: return irq_info(request);
    case Message::device_set_irqs: {
      const auto set = take<IrqSet>(request);
      if (request.files.size() > kMaxMessageFds) fail(E2BIG, "interrupts", "more descriptors than were agreed on");
      irqs_.set(set, after(request, sizeof set), request.files);
      return {};
    }
    case Message::region_read: return read(request);
    case Message::region_write: return write(request);
    case Message::device_reset: reset(); return {};
    default: fail(ENOTSUP, "serve", "an unknown message");
  }
}

Reply Session::negotiate(const Request& request) {
  auto version = take<Version>(request);
  const std::span<const std::byte> text = after(request, sizeof version);
  if (negotiated_) fail(EINVAL, "version", "it is agreed on already");
  if (version.major != kMajor) fail(EINVAL, "version", "no such major version");
  // What it says of the client matters to no message that this server sends.
  if (!text.empty() && text.back() != std::byte{0}) fail(EINVAL, "version", "the text does not end");
  version.minor = std::min(version.minor, kMinor);
  negotiated_ = true;
  Reply reply;
  reply.add(version);
  const std::string ours = "{\"capabilities\":{\"max_msg_fds\":" + std::to_string(kMaxMessageFds) +
                           ",\"max_data_xfer_size\":" + std::to_string(kDefaultMaxTransfer) +
                           ",\"max_dma_maps\":" + std::to_string(ClientMemory::kMostRanges) + "}}";
  reply.append(ours.c_str(), ours.size() + 1);
  return reply;
}

Reply Session::unmap(const Request& request) {
  const auto wanted = take<DmaUnmap>(request);
  if (wanted.argsz < sizeof wanted || (wanted.flags & ~kUnmapAll) != 0) fail(EINVAL, "unmap", "argsz or flags");
  if ((wanted.flags & kUnmapAll) != 0) {
    if (wanted.iova != 0 || wanted.size != 0) fail(EINVAL, "unmap", "a range, and everything");
    memory_.clear();
  } else {
    memory_.unmap(wanted.iova, wanted.size);
  }
  Reply reply;
  reply.add(wanted);
  return reply;
}

Reply Session::device_info(const Request& request) const {
  if (take<DeviceInfo>(request).argsz < sizeof(DeviceInfo)) fail(EINVAL, "device info", "argsz");
  Reply reply;
  reply.add(DeviceInfo{sizeof(DeviceInfo), kDeviceReset | kDevicePci, kPciRegions, kPciIrqs});
  return reply;
}

Session::Region Session::region(std::uint32_t index) const {
  switch (index) {
    case kRegionBar0: return {bar0_size_, kRegionRead | kRegionWrite};
    case kRegionBar4:
      if (irqs_.count(kIrqMsix) == 0) return {};
      return {ConfigSpace::kBar4Size, kRegionRead | kRegionWrite};
    case kRegionConfig: return {ConfigSpace::kSize, kRegionRead | kRegionWrite};
    default: return {};
  }
}

Reply Session::region_info(const Request& request) const {
  const auto asked = take<RegionInfo>(request);
  if (asked.argsz < sizeof asked || asked.index >= kPciRegions) fail(EINVAL, "region info", "argsz or index");
  const Region found = region(asked.index);
  RegionInfo info{sizeof(RegionInfo), found.flags, asked.index, 0, found.size, 0};
  Reply reply;
  if (asked.index != kRegionBar0 || doorbells_ < 0) {
    reply.add(info);
    return reply;
  }
  info.flags |= kRegionMmap | kRegionCapabilities;
  info.argsz = sizeof(RegionInfo) + sizeof(SparseMmap) + sizeof(SparseArea);
  if (asked.argsz < info.argsz) {
    reply.add(info);
    return reply;
  }
  info.capabilities = sizeof(RegionInfo);
  reply.add(info);
  reply.add(SparseMmap{{kCapabilitySparseMmap, 1, 0}, 1, 0});
  reply.add(SparseArea{nvme::kDoorbellBase, doorbell_area_});
  reply.file = doorbells_;
  return reply;
}

Reply Session::irq_info(const Request& request) const {
  const auto asked = take<IrqInfo>(request);
  if (asked.argsz < sizeof asked || asked.index >= kPciIrqs) fail(EINVAL, "interrupt info", "argsz or index");
  Reply reply;
  reply.add(
      IrqInfo{sizeof(IrqInfo), irqs_.count(asked.index) != 0 ? kIrqEventfd : 0, asked.index, irqs_.count(asked.index)});
  return reply;
}

Reply Session::read(const Request& request) {
  const auto access = take<RegionAccess>(request);
  const std::uint64_t size = region(access.region).size;
  if (access.count == 0 || access.offset > size || access.count > size - access.offset)
    fail(EINVAL, "region read", "beyond the region");
  Reply reply;
  reply.add(access);
  reply.payload.resize(sizeof access + access.count);
  read_region(access.region, access.offset, std::span(reply.payload).subspan(sizeof access));
  return reply;
}

Reply Session::write(const Request& request) {
  const auto access = take<RegionAccess>(request);
  const std::span<const std::byte> data = after(request, sizeof access);
  const std::uint64_t size = region(access.region).size;
  if (access.count == 0 || access.count != data.size() || access.offset > size || access.count > size - access.offset)
    fail(EINVAL, "region write", "beyond the region, or not as much data as it says");
  write_region(access.region, access.offset, data);
  Reply reply;
  reply.add(access);
  return reply;
}

void Session::read_region(std::uint32_t index, std::uint64_t offset, std::span<std::byte> out) {
  const auto at = static_cast<std::uint32_t>(offset);
  if (index == kRegionConfig) return config_.read(at, out);
  if (index == kRegionBar4) return table_.read(at, out);
  if (out.size() != 4 && out.size() != 8) fail(EINVAL, "region read", "registers are read by 4 or 8 bytes");
  // Doorbells have no value to read; whoever maps them sees what was stored.
  const std::uint64_t value =
      offset >= nvme::kDoorbellBase ? 0 : controller_.read(at, static_cast<std::uint32_t>(out.size()));
  std::memcpy(out.data(), &value, out.size());
}

void Session::write_region(std::uint32_t index, std::uint64_t offset, std::span<const std::byte> data) {
  const auto at = static_cast<std::uint32_t>(offset);
  if (index == kRegionBar4) return table_.write(at, data);
  if (index == kRegionConfig) {
    config_.write(at, data);
    irqs_.enable(config_.msix_enabled());
    if (config_.take_reset()) reset();
    return;
  }
  if (data.size() != 4 && data.size() != 8) fail(EINVAL, "region write", "registers are written by 4 or 8 bytes");
  std::uint64_t value = 0;
  std::memcpy(&value, data.data(), data.size());
  controller_.write(at, value, static_cast<std::uint32_t>(data.size()));
}

void Session::reset() {
  if (!controller_.function_reset()) fail(EIO, "reset", "the controller does not stop");
}

}  // namespace ugds::serve
