// SPDX-License-Identifier: Apache-2.0
#include "device/vfio_user.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/backing.hpp"
#include "base/error.hpp"
#include "base/steps.hpp"
#include "device/iommu.hpp"
#include "nvme/registers.hpp"

namespace ugds::device {

using vfio_user::Message;

namespace {

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

/// Reads a structure from the start of a reply. Throws Failure(EPROTO) where it is too short.
template <class T>
T take(const std::vector<std::byte>& payload, std::size_t offset, const char* what) {
  T value;
  if (offset > payload.size() || sizeof value > payload.size() - offset) {
    fail(EPROTO, "open", std::string("the server's answer about ") + what + " is too short", "check the server");
  }
  std::memcpy(&value, payload.data() + offset, sizeof value);
  return value;
}

void refuse_parameters(const Uri& uri) {
  for (const auto& [name, value] : uri.query) {
    const std::string near = nearest(name, {"ns", "interrupts"});
    fail(EINVAL, "open", "\"" + name + "\" is no parameter of vfio-user:",
         near.empty() ? "the parameters are ns and interrupts" : "did you mean " + near + "?");
  }
}

/// What a server translates: any address that fits its page tables, as far as is known of any.
constexpr std::uint64_t kLastIova = (std::uint64_t{1} << 46) - 1;

}  // namespace

VfioUserDevice::VfioUserDevice(std::string text, const Uri& uri)
    : uri_(std::move(text)), connection_((refuse_parameters(uri), uri.place)), space_({{0, kLastIova}}) {
  limits_.memory_from_descriptor = limits_.registers_may_block = true;
  try {
    find_device();
    map_doorbells();
    enable_bus_master();
    find_interrupts();
  } catch (...) {
    unmap_areas();
    throw;
  }
}

VfioUserDevice::~VfioUserDevice() { unmap_areas(); }

void VfioUserDevice::unmap_areas() noexcept {
  for (const Area& area : areas_) munmap(area.memory, area.size);
  areas_.clear();
}

void VfioUserDevice::find_device() {
  setup_step("vfio-user: device");
  const vfio_user::DeviceInfo ask{.argsz = sizeof ask, .flags = 0, .regions = 0, .irqs = 0};
  const auto reply = connection_.call(Message::device_get_info, bytes_of(ask));
  if (reply.error != 0)
    fail(EPROTO, "open", std::string("the server describes no device: ") + std::strerror(reply.error));
  const auto info = take<vfio_user::DeviceInfo>(reply.payload, 0, "the device");
  if ((info.flags & vfio_user::kDevicePci) == 0 || info.regions <= vfio_user::kRegionConfig) {
    fail(ENODEV, "open", "the server's device is not a PCI device", "name the socket of an NVMe controller");
  }
  can_reset_ = (info.flags & vfio_user::kDeviceReset) != 0;
  // The class code, in the upper three bytes.
  if (const auto type = read_config<std::uint32_t>(8) >> 8; type != 0x010802) {
    fail(ENODEV, "open", "the server's device is not an NVMe controller", "name the socket of an NVMe controller");
  }
}

void VfioUserDevice::map_doorbells() {
  setup_step("vfio-user: registers");
  // Room for its capabilities: a server says what it needs, and sends them only if they fit.
  vfio_user::RegionInfo ask{};
  ask.argsz = 4096;
  ask.index = vfio_user::kRegionBar0;
  const auto reply = connection_.call(Message::device_get_region_info, bytes_of(ask));
  if (reply.error != 0)
    fail(EPROTO, "open", std::string("the server describes no BAR0: ") + std::strerror(reply.error));
  const auto info = take<vfio_user::RegionInfo>(reply.payload, 0, "BAR0");
  if (info.size < nvme::kDoorbellBase + 8 || (info.flags & vfio_user::kRegionRead) == 0) {
    fail(EPROTO, "open", "the server's BAR0 has " + std::to_string(info.size) + " bytes, too few for a controller");
  }
  limits_.register_bytes = info.size;
  if ((info.flags & vfio_user::kRegionMmap) != 0 && !reply.descriptors.empty()) map_areas(reply);
}

void VfioUserDevice::map_areas(const VfioUserConnection::Reply& reply) {
  const auto info = take<vfio_user::RegionInfo>(reply.payload, 0, "BAR0");
  const int descriptor = reply.descriptors.front().get();
  if ((info.flags & vfio_user::kRegionCapabilities) == 0) return add_area(descriptor, info.offset, 0, info.size);
  std::size_t at = info.capabilities;
  for (unsigned seen = 0; at != 0 && seen < 16; ++seen) {
    const auto header = take<vfio_user::CapabilityHeader>(reply.payload, at, "BAR0's capabilities");
    if (header.id == vfio_user::kCapabilitySparseMmap) {
      const auto sparse = take<vfio_user::SparseMmap>(reply.payload, at, "BAR0's areas");
      for (std::uint32_t i = 0; i < sparse.areas; ++i) {
        const auto area = take<vfio_user::SparseArea>(
            reply.payload, at + sizeof sparse + i * sizeof(vfio_user::SparseArea), "BAR0's areas");
        if (area.offset > info.size || area.size > info.size - area.offset) {
          fail(EPROTO, "open", "the server describes an area beyond BAR0", "check the server");
        }
        add_area(descriptor, info.offset + area.offset, area.offset, area.size);
      }
    }
    at = header.next;
  }
}

void VfioUserDevice::add_area(int descriptor, std::uint64_t place, std::uint64_t offset, std::uint64_t size) {
  // What cannot be mapped is reached by messages.
  if (size == 0 || ((offset | size | place) & 4095) != 0) return;
  // A store beyond the file's end would end this process. Where it can be sealed it stays as long as it is.
  fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK);
  struct stat file {};
  if (fstat(descriptor, &file) != 0) return;
  const auto bytes = static_cast<std::uint64_t>(file.st_size);
  if (S_ISREG(file.st_mode) && (bytes < place || bytes - place < size)) return;
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, static_cast<off_t>(place));
  if (memory == MAP_FAILED) return;
  madvise(memory, size, MADV_DONTFORK);
  areas_.push_back({offset, size, static_cast<std::byte*>(memory)});
}

void VfioUserDevice::enable_bus_master() {
  constexpr std::uint64_t kCommand = 4;
  constexpr std::uint16_t kMemory = 2, kBusMaster = 4;
  write_config(kCommand, static_cast<std::uint16_t>(read_config<std::uint16_t>(kCommand) | kMemory | kBusMaster));
}

void VfioUserDevice::find_interrupts() {
  const vfio_user::IrqInfo ask{.argsz = sizeof ask, .flags = 0, .index = vfio_user::kIrqMsix, .count = 0};
  const auto reply = connection_.call(Message::device_get_irq_info, bytes_of(ask));
  if (reply.error != 0) return;
  const auto info = take<vfio_user::IrqInfo>(reply.payload, 0, "interrupts");
  if ((info.flags & vfio_user::kIrqEventfd) != 0) limits_.interrupt_vectors = info.count;
}

/// Servers send interrupts only while MSI-X is on in configuration space.
void VfioUserDevice::enable_msix() {
  constexpr std::uint64_t kStatus = 6, kFirst = 0x34;
  constexpr std::uint8_t kMsix = 0x11;
  if ((read_config<std::uint16_t>(kStatus) & 0x10) == 0) return;
  std::uint8_t at = read_config<std::uint8_t>(kFirst);
  for (unsigned seen = 0; at >= 0x40 && seen < 48; ++seen) {
    if (read_config<std::uint8_t>(at) == kMsix) {
      const auto control = read_config<std::uint16_t>(at + 2u);
      // Enable, and not the mask of the whole function.
      return write_config(at + 2u, static_cast<std::uint16_t>((control | 0x8000) & ~0x4000));
    }
    at = read_config<std::uint8_t>(at + 1u);
  }
}

void VfioUserDevice::set_interrupts(std::span<const int> eventfds) {
  require_vectors(eventfds.size());
  const auto demand = [&](const vfio_user::IrqSet& set, std::span<const int> descriptors) {
    const auto reply = connection_.call(Message::device_set_irqs, bytes_of(set), descriptors);
    if (reply.error == 0 || connection_.closed()) return;
    fail(reply.error, "open", std::string("the server did not set the interrupts: ") + std::strerror(reply.error));
  };
  vfio_user::IrqSet set{.argsz = sizeof set,
                        .flags = vfio_user::kIrqDataNone | vfio_user::kIrqActionTrigger,
                        .index = vfio_user::kIrqMsix,
                        .start = 0,
                        .count = 0};
  if (limits_.interrupt_vectors != 0) demand(set, {});
  if (eventfds.empty()) return;
  enable_msix();
  set.flags = vfio_user::kIrqDataEventfd | vfio_user::kIrqActionTrigger;
  for (std::size_t i = 0; i < eventfds.size();) {
    if (eventfds[i] < 0) {
      ++i;
      continue;
    }
    std::size_t run = 1;
    while (run < connection_.max_descriptors() && i + run < eventfds.size() && eventfds[i + run] >= 0) ++run;
    set.start = static_cast<std::uint32_t>(i);
    set.count = static_cast<std::uint32_t>(run);
    demand(set, eventfds.subspan(i, run));
    i += run;
  }
}

/// 0, or a positive errno.
int VfioUserDevice::access_region(bool write, std::uint32_t region, std::uint64_t offset, void* data,
                                  std::uint32_t size) {
  struct Answer {
    vfio_user::RegionAccess access;
    std::byte data[8];
  } answer;
  const vfio_user::RegionAccess access{.offset = offset, .region = region, .count = size};
  auto* const out = reinterpret_cast<std::byte*>(&answer);
  if (write) {
    return connection_.call_into(Message::region_write, bytes_of(access), {static_cast<std::byte*>(data), size},
                                 {out, sizeof access});
  }
  const int code = connection_.call_into(Message::region_read, bytes_of(access), {}, {out, sizeof access + size});
  if (code == 0) std::memcpy(data, answer.data, size);
  return code;
}

template <class T>
T VfioUserDevice::read_config(std::uint64_t offset) {
  T value{};
  if (const int code = access_region(false, vfio_user::kRegionConfig, offset, &value, sizeof value); code != 0) {
    fail(code == ECONNRESET ? ENODEV : EIO, "open",
         std::string("the device's configuration space cannot be read: ") + std::strerror(code));
  }
  return value;
}

template <class T>
void VfioUserDevice::write_config(std::uint64_t offset, T value) {
  if (const int code = access_region(true, vfio_user::kRegionConfig, offset, &value, sizeof value); code != 0) {
    fail(code == ECONNRESET ? ENODEV : EIO, "open",
         std::string("the device's configuration space cannot be written: ") + std::strerror(code));
  }
}

template <class T>
T VfioUserDevice::read(std::uint32_t offset) {
  T value{};
  if (access_region(false, vfio_user::kRegionBar0, offset, &value, sizeof value) == 0) return value;
  if (!connection_.stuck() || connection_.has_ended()) return static_cast<T>(~T{0});
  // CSTS: ready, and failed.
  return offset == static_cast<std::uint32_t>(nvme::Register::csts) ? T{3} : T{0};
}

std::uint32_t VfioUserDevice::read32(std::uint32_t offset) { return read<std::uint32_t>(offset); }
std::uint64_t VfioUserDevice::read64(std::uint32_t offset) { return read<std::uint64_t>(offset); }

void VfioUserDevice::write32(std::uint32_t offset, std::uint32_t value) {
  // That it did not arrive is seen at the next look at the controller.
  static_cast<void>(access_region(true, vfio_user::kRegionBar0, offset, &value, sizeof value));
}

void VfioUserDevice::write64(std::uint32_t offset, std::uint64_t value) {
  static_cast<void>(access_region(true, vfio_user::kRegionBar0, offset, &value, sizeof value));
}

std::uint32_t* VfioUserDevice::doorbell(std::uint32_t offset) {
  for (const Area& area : areas_) {
    if (offset >= area.offset && offset - area.offset <= area.size - sizeof(std::uint32_t)) {
      return reinterpret_cast<std::uint32_t*>(area.memory + (offset - area.offset));
    }
  }
  return nullptr;
}

Mapping VfioUserDevice::map(void* address, Bytes length, Access access, std::uint64_t* pages) {
  const Backing backing = find_backing(address, length.value);
  if (!backing) {
    fail(EOPNOTSUPP, "map", "the server reaches only memory that the library made for it to map",
         "use ugds.empty(size), in C uGDSHostAlloc(): every transport can reach that");
  }
  std::uint64_t iova;
  {
    std::lock_guard guard(lock_);
    iova = space_.take(reinterpret_cast<std::uintptr_t>(address), length.value);
  }
  const vfio_user::DmaMap map{
      .argsz = sizeof map,
      .flags = vfio_user::kDmaReadable | (access == Access::read_write ? vfio_user::kDmaWritable : 0u),
      .offset = backing.offset,
      .iova = iova,
      .size = length.value};
  const auto reply = connection_.call(Message::dma_map, bytes_of(map), std::span(&backing.descriptor, 1));
  if (reply.error != 0) {
    std::lock_guard guard(lock_);
    space_.give(iova);
    fail(connection_.closed() || connection_.stuck() ? ENODEV : reply.error, "map",
         std::string("the server did not map the memory: ") + std::strerror(reply.error));
  }
  write_pages(iova, length, pages);
  return {iova, length};
}

void VfioUserDevice::unmap(const Mapping& mapping) noexcept {
  const vfio_user::DmaUnmap unmap{
      .argsz = sizeof unmap, .flags = 0, .iova = mapping.token, .size = mapping.length.value};
  vfio_user::DmaUnmap reply;
  const int code =
      connection_.call_into(Message::dma_unmap, bytes_of(unmap), {}, std::as_writable_bytes(std::span(&reply, 1)));
  std::lock_guard guard(lock_);
  if (code == 0) space_.give(mapping.token);  // else the server may still use it: the addresses are not given again
}

bool VfioUserDevice::reset() noexcept {
  if (connection_.has_ended()) return true;
  if (!can_reset_ || connection_.call_into(Message::device_reset, {}, {}, {}) != 0) return connection_.closed();
  try {
    enable_bus_master();
  } catch (const Failure&) {
    // It has stopped, which is what was asked.
  }
  return true;
}

}  // namespace ugds::device
