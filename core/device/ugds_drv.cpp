// SPDX-License-Identifier: Apache-2.0
#include "device/ugds_drv.hpp"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <utility>

#include "base/error.hpp"
#include "base/steps.hpp"
#include "device/iommu.hpp"
#include "device/ugds_drv_words.hpp"
#include "device/vfio_abi.hpp"
#include "device/watcher.hpp"
#include "nvme/prp.hpp"
#include "nvme/registers.hpp"
#include "uapi/ugds_drv.h"

namespace ugds::device {

namespace {

/// For how long a node may be to come: a second.
constexpr int kNodeTries = 50;
constexpr long kNodeWait = 20'000'000;

/// A request's structure, with its size.
template <class Request>
Request make() {
  Request request{};
  request.argsz = sizeof request;
  return request;
}

std::uint64_t address_of(const void* memory) { return reinterpret_cast<std::uintptr_t>(memory); }

void refuse_parameters(const Uri& uri, bool is_path) {
  for (const auto& [name, value] : uri.query) {
    if (is_path && name == "fd") continue;
    if (!is_path && name == "iommu") {
      if (value == "auto") continue;
      fail(EINVAL, "open", "iommu=" + value + " is a way of vfio's, and ugds_drv holds the controller",
           "leave it out, or bind the controller to vfio-pci: `ugds bind " + uri.place + "`");
    }
    const std::string own = is_path ? "fd" : "iommu";
    const std::string near = nearest(name, {own, "ns", "interrupts"});
    fail(EINVAL, "open", "\"" + name + "\" is no parameter of " + (is_path ? "a node of ugds_drv's" : "pci:"),
         near.empty() ? "the parameters are ns, interrupts and " + own : "did you mean " + near + "?");
  }
}

Descriptor open_node(const std::string& path) {
  setup_step("ugds_drv: node");
  Descriptor node(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (node) return node;
  switch (errno) {
    case EBUSY:
      fail(EBUSY, "open", path + " is in use: somebody else has it open",
           "end that process, or use the device that is open");
    case EACCES: fail(EACCES, "open", "this user may not open " + path, "chown it to the user, or add a udev rule");
    case EPERM:
      fail(EPERM, "open", path + " may only be opened with CAP_SYS_RAWIO: no IOMMU keeps the controller to itself",
           "run as root, or turn the IOMMU on (intel_iommu=on or amd_iommu=on, and not iommu=pt)");
    case ENOENT: fail(ENOENT, "open", "there is no " + path, "`ugds devices` lists what ugds_drv holds");
    case ENODEV:
    case ENXIO:
      fail(ENODEV, "open", "the controller behind " + path + " has been removed", "`ugds devices` lists what is there");
    case EIO:
      fail(EIO, "open", "the controller behind " + path + " does not stop",
           "power-cycle it; the kernel's log may say more");
    default: fail(errno, "open", path + " cannot be opened: " + std::strerror(errno));
  }
}

/// The node, or the descriptor that the caller has of it.
Descriptor open_given(const Uri& uri) {
  refuse_parameters(uri, true);
  for (const auto& [name, value] : uri.query) {
    if (name != "fd") continue;
    const int given = static_cast<int>(parse_number(value, "fd", 0, 1u << 30));
    struct stat status {};
    if (fstat(given, &status) != 0) fail(EBADF, "open", "descriptor " + value + " is not open");
    if (!S_ISCHR(status.st_mode) || !helper_node(status.st_rdev))
      fail(EINVAL, "open", "descriptor " + value + " is none of ugds_drv's", "open " + uri.place + " and give that");
    setup_step("ugds_drv: descriptor");
    Descriptor node(fcntl(given, F_DUPFD_CLOEXEC, 0));
    if (!node) fail(errno, "open", "no descriptor for the device", "raise the limit of open files");
    return node;
  }
  struct stat status {};
  if (::stat(uri.place.c_str(), &status) != 0) {
    fail(errno, "open", uri.place + " cannot be looked at: " + std::strerror(errno),
         "`ugds devices` lists controllers and their nodes");
  }
  if (!S_ISCHR(status.st_mode) || !helper_node(status.st_rdev)) {
    fail(EOPNOTSUPP, "open",
         uri.place + " is no node of ugds_drv's; files and block devices are not supported by this release",
         "use /dev/ugds_drvN, pci:ADDRESS, or emulated:" + uri.place);
  }
  return open_node(uri.place);
}

std::string address_of(const ugds_drv_info& info) {
  char text[32];
  std::snprintf(text, sizeof text, "%04x:%02x:%02x.%x", info.pci_domain, info.pci_address >> 8 & 0xff,
                info.pci_address >> 3 & 0x1f, info.pci_address & 7);
  return text;
}

/// The path of the node. A driver is named as a device's before it has set it up, so that the node may still be to
/// come.
std::string node_of(const PciFunction& function, const Uri& uri) {
  refuse_parameters(uri, false);
  PciFunction now = function;
  for (int tries = 0; now.helper.empty() && tries < kNodeTries; ++tries) {
    const timespec wait{0, kNodeWait};
    nanosleep(&wait, nullptr);
    now = find_nvme_function(function.address);
  }
  if (now.helper.empty()) {
    fail(ENODEV, "open", "ugds_drv made no node for " + function.address, "look at the kernel's log");
  }
  return "/dev/" + now.helper;
}

}  // namespace

UgdsDrvDevice::UgdsDrvDevice(std::string text, const PciFunction& function, const Uri& uri)
    : UgdsDrvDevice(std::move(text), node_of(function, uri)) {}

UgdsDrvDevice::UgdsDrvDevice(std::string text, const std::string& path)
    : UgdsDrvDevice(std::move(text), open_node(path), path) {}

UgdsDrvDevice::UgdsDrvDevice(std::string text, const Uri& uri)
    : UgdsDrvDevice(std::move(text), open_given(uri), uri.place) {}

UgdsDrvDevice::UgdsDrvDevice(std::string text, Descriptor node, const std::string& path)
    : uri_(std::move(text)), node_(std::move(node)) {
  greet(path);
}

/// The handshake, and then the registers.
void UgdsDrvDevice::greet(const std::string& path) {
  setup_step("ugds_drv: version");
  auto info = make<ugds_drv_info>();
  const int result = abi::call(node_.get(), UGDS_DRV_GET_INFO, &info);
  if (result < 0 || info.api_version != UGDS_DRV_API_VERSION) fail_version(path, result, info.api_version);
  if (info.state == UGDS_DRV_STATE_GONE) {
    fail(ENODEV, "open", "the controller behind " + path + " has been removed", "close the descriptor");
  }
  claim_.emplace(address_of(info));
  if ((info.capabilities & UGDS_DRV_CAP_TRANSLATED) == 0) {
    limits_.physical_addresses = true;
    warn_without_iommu(address_of(info));
  }
  limits_.may_be_halted = true;
  limits_.pins_nvidia = (info.capabilities & UGDS_DRV_CAP_NVIDIA_P2P) != 0;
  limits_.interrupt_vectors = info.vectors;
  limits_.register_bytes = info.bar_size;
  // A file that somebody gives to us may have been used before.
  if (info.state == UGDS_DRV_STATE_WEDGED && !reset()) {
    fail(EIO, "open", "the controller behind " + path + " was stopped by the system, and could not be reset",
         "power-cycle it; the kernel's log may say more");
  }
  map_registers(info.bar_offset);
  least_page_ = nvme::Capabilities{read64(static_cast<std::uint32_t>(nvme::Register::cap))}.min_page_size();
}

UgdsDrvDevice::~UgdsDrvDevice() {
  notify({});
  if (registers_ != nullptr) munmap(registers_, limits_.register_bytes);
}

void UgdsDrvDevice::map_registers(std::uint64_t offset) {
  setup_step("ugds_drv: registers");
  constexpr std::uint64_t kLeast = nvme::kDoorbellBase + 8;  // the registers, and the admin queue's doorbells
  const std::uint64_t size = limits_.register_bytes;
  void* memory = size < kLeast
                     ? MAP_FAILED
                     : mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, node_.get(), static_cast<off_t>(offset));
  if (memory == MAP_FAILED) {
    fail(size < kLeast ? EOPNOTSUPP : errno, "open",
         "the controller's registers (BAR0, " + std::to_string(size) + " bytes) cannot be mapped",
         "the kernel may have disabled the BAR: look at its log");
  }
  registers_ = static_cast<std::byte*>(memory);
  madvise(registers_, size, MADV_DONTFORK);
}

std::uint32_t UgdsDrvDevice::read32(std::uint32_t offset) {
  return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(registers_ + offset)).load(std::memory_order_acquire);
}

std::uint64_t UgdsDrvDevice::read64(std::uint32_t offset) {
  // Two halves: not every controller or bridge takes eight bytes at once (NVMe over PCIe 1.0, 3.1).
  return read32(offset) | std::uint64_t{read32(offset + 4)} << 32;
}

void UgdsDrvDevice::write32(std::uint32_t offset, std::uint32_t value) {
  std::atomic_ref(*reinterpret_cast<std::uint32_t*>(registers_ + offset)).store(value, std::memory_order_release);
}

void UgdsDrvDevice::write64(std::uint32_t offset, std::uint64_t value) {
  write32(offset, static_cast<std::uint32_t>(value));
  write32(offset + 4, static_cast<std::uint32_t>(value >> 32));
}

std::uint32_t* UgdsDrvDevice::doorbell(std::uint32_t offset) {
  if (offset + sizeof(std::uint32_t) > limits_.register_bytes) {
    fail(EPROTO, "open", "a doorbell at " + std::to_string(offset) + " lies beyond BAR0", "ask for fewer queues");
  }
  return reinterpret_cast<std::uint32_t*>(registers_ + offset);
}

/// The kernel promises no more of addresses than that each page has one. A controller whose smallest page is larger
/// than that needs the addresses inside of one of its own pages to follow one another.
void UgdsDrvDevice::require_usable(const Mapping& mapping, const std::uint64_t* pages) {
  for (std::uint64_t i = 1; i < mapping.length.value / nvme::kPageSize; ++i) {
    const std::uint64_t next = pages[i - 1] + nvme::kPageSize;
    if (pages[i] == next || ((pages[i] | next) & (least_page_ - 1)) == 0) continue;
    unmap(mapping);
    fail(EOPNOTSUPP, "map",
         "the controller's pages have " + std::to_string(least_page_) +
             " bytes, and the kernel gave the memory addresses that are scattered in smaller ones",
         "turn the IOMMU on, or use memory in huge pages");
  }
}

Mapping UgdsDrvDevice::map(void* address, Bytes length, Access access, std::uint64_t* pages) {
  auto map = make<ugds_drv_map_host>();
  map.flags = UGDS_DRV_MAP_SHARED_ENDS;
  map.address = address_of(address);
  map.length = length.value;
  map.pages = address_of(pages);
  map.access = access == Access::read_write ? UGDS_DRV_ACCESS_READ_WRITE : UGDS_DRV_ACCESS_READ;
  if (const int result = abi::call(node_.get(), UGDS_DRV_MAP_HOST, &map); result < 0) {
    fail_to_map_host(-result, map.reason, length);
  }
  const Mapping mapping{map.token, length};
  require_usable(mapping, pages);
  return mapping;
}

Mapping UgdsDrvDevice::map_descriptor(const DescriptorRange& range, Access access, std::uint64_t* pages) {
  auto map = make<ugds_drv_map_dmabuf>();
  map.flags = UGDS_DRV_DMABUF_REQUIRE_PEER | UGDS_DRV_DMABUF_SHARED_ENDS;
  map.offset = range.offset;
  map.length = range.length.value;
  map.pages = address_of(pages);
  map.fd = range.descriptor;
  map.access = access == Access::read_write ? UGDS_DRV_ACCESS_READ_WRITE : UGDS_DRV_ACCESS_READ;
  if (const int result = abi::call(node_.get(), UGDS_DRV_MAP_DMABUF, &map); result < 0) {
    fail_to_import(-result, map.reason, map.peer_bytes, range.length);
  }
  const Mapping mapping{map.token, range.length};
  require_usable(mapping, pages);
  return mapping;
}

Mapping UgdsDrvDevice::map_nvidia(std::uint64_t address, Bytes length, Access access, std::uint64_t* pages) {
  auto map = make<ugds_drv_map_nvidia>();
  map.address = address;
  map.length = length.value;
  map.pages = address_of(pages);
  map.access = access == Access::read_write ? UGDS_DRV_ACCESS_READ_WRITE : UGDS_DRV_ACCESS_READ;
  if (const int result = abi::call(node_.get(), UGDS_DRV_MAP_NVIDIA, &map); result < 0) {
    fail_to_pin_gpu(-result, map.reason);
  }
  const Mapping mapping{map.token, length};
  require_usable(mapping, pages);
  return mapping;
}

void UgdsDrvDevice::unmap(const Mapping& mapping) noexcept {
  auto unmap = make<ugds_drv_unmap>();
  unmap.token = mapping.token;
  // A device that has gone has unmapped everything itself.
  static_cast<void>(abi::call(node_.get(), UGDS_DRV_UNMAP, &unmap));
}

Device::OwnMemory UgdsDrvDevice::allocate(Bytes size, std::uint64_t* pages) {
  auto alloc = make<ugds_drv_alloc>();
  alloc.length = size.value;
  if (const int result = abi::call(node_.get(), UGDS_DRV_ALLOC_COHERENT, &alloc); result < 0) {
    fail_to_allocate(-result, alloc.reason, size);
  }
  const Mapping mapping{alloc.token, size};
  void* const memory =
      mmap(nullptr, size.value, PROT_READ | PROT_WRITE, MAP_SHARED, node_.get(), static_cast<off_t>(alloc.mmap_offset));
  if (memory == MAP_FAILED) {
    const int code = errno;
    unmap(mapping);
    fail(code, "open", std::string("the kernel's memory for queues cannot be mapped: ") + std::strerror(code));
  }
  madvise(memory, size.value, MADV_DONTFORK);
  write_pages(alloc.dma_address, size, pages);
  return {static_cast<std::byte*>(memory), mapping};
}

void UgdsDrvDevice::free(const OwnMemory& memory) noexcept {
  munmap(memory.data, memory.mapping.length.value);
  unmap(memory.mapping);
}

void UgdsDrvDevice::set_interrupts(std::span<const int> eventfds) {
  require_vectors(eventfds.size());
  auto set = make<ugds_drv_interrupts>();
  set.eventfds = address_of(eventfds.data());
  set.count = static_cast<std::uint32_t>(eventfds.size());
  const int result = abi::call(node_.get(), UGDS_DRV_SET_INTERRUPTS, &set);
  if (result == -ENODEV || result >= 0) return;  // whoever uses a device that has gone is told of that
  fail(-result, "open", std::string("ugds_drv did not set the interrupts: ") + reason_words(set.reason, -result),
       "completions can be polled instead: leave interrupts out");
}

bool UgdsDrvDevice::reset() noexcept {
  for (;;) {
    auto reset = make<ugds_drv_reset>();
    const int result = abi::call(node_.get(), UGDS_DRV_RESET, &reset);
    if (result == -EAGAIN) continue;  // the system has stopped it anew
    // One that has gone was stopped before this was answered.
    return result == -ENODEV || (result >= 0 && reset.stopped != 0);
  }
}

bool UgdsDrvDevice::is_gone() noexcept {
  auto status = make<ugds_drv_status>();
  return abi::call(node_.get(), UGDS_DRV_GET_STATE, &status) >= 0 && status.state == UGDS_DRV_STATE_GONE;
}

const char* UgdsDrvDevice::halted() noexcept {
  auto status = make<ugds_drv_status>();
  if (abi::call(node_.get(), UGDS_DRV_GET_STATE, &status) < 0 || status.state != UGDS_DRV_STATE_WEDGED) return nullptr;
  return halt_words(status.cause);
}

bool UgdsDrvDevice::is_revoked(const Mapping& mapping) noexcept {
  auto status = make<ugds_drv_status>();
  status.token = mapping.token;
  return abi::call(node_.get(), UGDS_DRV_GET_STATE, &status) >= 0 && status.mapping == UGDS_DRV_MAPPING_REVOKED;
}

/// The helper has told of a change, in the watcher's thread.
void UgdsDrvDevice::changed() {
  if (is_gone()) {
    claim_.reset();  // another device may come to the same address
    if (notices_.asked != nullptr) notices_.asked(notices_.context);
  } else if (notices_.halted != nullptr) {
    notices_.halted(notices_.context);
  }
}

void UgdsDrvDevice::notify(const Notices& notices) {
  auto set = make<ugds_drv_event>();
  if (watch_ != 0) {
    set.fd = -1;
    static_cast<void>(abi::call(node_.get(), UGDS_DRV_SET_EVENT_FD, &set));
    unwatch(watch_);
    watch_ = 0;
  }
  if (notices.asked == nullptr && notices.halted == nullptr) return;
  notices_ = notices;
  setup_step("ugds_drv: events");
  if (!event_) event_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event_) fail(errno, "open", "no descriptor for the device's events", "raise the limit of open files");
  watch_ = watch(
      event_.get(), [](void* self) { static_cast<UgdsDrvDevice*>(self)->changed(); }, this);
  set.fd = event_.get();
  if (const int result = abi::call(node_.get(), UGDS_DRV_SET_EVENT_FD, &set); result < 0 && result != -ENODEV) {
    fail(-result, "open", std::string("ugds_drv does not tell of events: ") + reason_words(set.reason, -result));
  }
  // What changed before that.
  if (is_gone() || halted() != nullptr) static_cast<void>(eventfd_write(event_.get(), 1));
}

bool UgdsDrvDevice::release() noexcept {
  std::lock_guard guard(lock_);
  if (!released_) {
    // In place of the registers: whoever reads them sees that the device has gone. Moved over them, so that there is no
    // moment at which nothing is there.
    void* ones = mmap(nullptr, limits_.register_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (ones == MAP_FAILED) return false;
    std::memset(ones, 0xff, limits_.register_bytes);
    if (mremap(ones, limits_.register_bytes, limits_.register_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, registers_) ==
        MAP_FAILED) {
      munmap(ones, limits_.register_bytes);
      return false;
    }
    released_ = true;
  }
  return reset();
}

}  // namespace ugds::device
