// SPDX-License-Identifier: Apache-2.0
//
// The process's registered buffers: addresses for each open device, generation, in-flight counts, route. Registering
// and closing take a lock; looking up and holding do not.
//
// A registration's slot is never freed, only reused under a new generation, so a stale reference finds memory that says
// so. Generations increase for ever.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/backing.hpp"
#include "base/fence.hpp"
#include "base/immortal.hpp"
#include "base/units.hpp"
#include "device/device.hpp"
#include "memory/address_index.hpp"
#include "memory/gpu_buffer.hpp"
#include "memory/ledger.hpp"
#include "nvme/prp.hpp"

namespace ugds::memory {

/// Devices that a process may have open at once.
inline constexpr std::uint32_t kMaxDevices = 64;

enum class Kind : std::uint8_t {
  host,
  cuda,
  hip,
  peer,  ///< of another device, known by a DMA-BUF: the processor does not reach it by its address here
};
const char* kind_name(Kind kind);

/// Where a request's bytes go (docs/routes.md).
enum class Route : std::uint8_t { direct, staged, buffered };
const char* route_name(Route route);

/// A generation that marks a registration being closed: wait, it will be gone or back.
inline constexpr std::uint64_t kClosing = ~std::uint64_t{0};

class Registration {
 public:
  std::uint64_t generation() const { return generation_.load(std::memory_order_acquire); }
  std::uint32_t index() const { return index_; }
  /// Valid while the registration is held.
  Kind kind() const { return kind_; }

  /// The page addresses for a device, from the page that holds the first byte; nullptr where the registration is not
  /// mapped to it. Valid while the registration is held.
  const std::uint64_t* pages(std::uint32_t device) const { return pages_[device].load(std::memory_order_acquire); }
  /// Whether requests between this memory and a device go through pinned memory of ours. Valid while it is held.
  bool is_staged(std::uint32_t device) const {
    return (staged_.load(std::memory_order_acquire) >> device & std::uint64_t{1}) != 0;
  }
  /// Whether a device reached this memory until its exporter took it back. Valid while it is held.
  bool is_revoked(std::uint32_t device) const {
    return (revoked_.load(std::memory_order_acquire) >> device & std::uint64_t{1}) != 0;
  }
  /// Whether it is memory that other memory is staged through. Valid while it is held.
  bool is_staging() const { return staging_; }
  /// The GPU's side of it; nullptr for other memory. Valid while the registration is held.
  GpuBuffer* gpu() const { return gpu_.get(); }

 private:
  friend class Registry;

  std::atomic<std::uint64_t> generation_{0};  ///< 0: free
  std::byte* address_ = nullptr;
  std::uint64_t size_ = 0;
  std::uint32_t index_ = 0;
  Kind kind_ = Kind::host;
  bool readonly_ = false;
  bool everywhere_ = false;  ///< devices opened later get it too
  bool listed_ = true;       ///< addresses lead to it
  bool staging_ = false;     ///< other memory is staged through it
  bool leaving_ = false;     ///< to be closed as soon as no command is in flight on it
  Demand demand_ = Demand::none;
  Backing peer_{};  ///< of Kind::peer
  std::unique_ptr<GpuBuffer> gpu_;
  bool keeps_gpu_ = false;                 ///< for ever: a device that was leaked may use it
  std::atomic<std::uint64_t> staged_{0};   ///< a bit for each device
  std::unique_ptr<std::string> why_;       ///< why a device is among them
  std::atomic<std::uint64_t> revoked_{0};  ///< the same
  std::array<std::atomic<const std::uint64_t*>, kMaxDevices> pages_{};
  std::array<device::Mapping, kMaxDevices> mappings_{};
};

/// A registration as its owner names it: what never changes of it, and the generation by which a stale one is
/// recognised. Slots are reused, so nothing else of one is looked at before it is held.
struct Reference {
  Registration* registration = nullptr;
  std::uint64_t generation = 0;
  std::uint64_t address = 0;
  std::uint64_t size = 0;
  bool readonly = false;

  explicit operator bool() const { return registration != nullptr; }
  /// The first byte's offset in its page.
  std::uint64_t page_offset() const { return address & (nvme::kPageSize - 1); }
};

enum class Hold : std::uint8_t {
  held,
  stale,    ///< closed, or another registration by now
  closing,  ///< try again shortly
};

/// Counts a command in, before its submission entry is written; the caller owns the ledger's queue. The counterpart is
/// Ledger::remove, when its completion was retired.
inline Hold hold(Ledger& ledger, const Reference& reference) {
  ledger.add(reference.registration->index());
  // Ours: count, then look at the generation. Closing: mark the generation, then sum the counts. One sees the other.
  full_fence();
  const std::uint64_t now = reference.registration->generation();
  if (now == reference.generation) [[likely]]
    return Hold::held;
  ledger.remove(reference.registration->index());
  return now == kClosing ? Hold::closing : Hold::stale;
}

/// The same with a ledger that several threads write; the counterpart is Ledger::remove_shared.
inline Hold hold_shared(Ledger& ledger, const Reference& reference) {
  ledger.add_shared(reference.registration->index());
  full_fence();
  const std::uint64_t now = reference.registration->generation();
  if (now == reference.generation) return Hold::held;
  ledger.remove_shared(reference.registration->index());
  return now == kClosing ? Hold::closing : Hold::stale;
}

class Registry {
 public:
  /// The process's own.
  static Registry& instance();
  constexpr Registry() = default;

  /// Registers [address, address + size) and maps it to every open device, or to those in `devices` (by number) if any
  /// is given. All or nothing; but of all open devices, those that can never reach memory of this kind are left out as
  /// long as one can. Memory of Kind::peer lies at `peer`, whose descriptor stays open until it is closed, and
  /// `address` only stands for it. Throws Failure: EINVAL (empty, wraps), EEXIST (overlaps a registered range), ENOSPC
  /// (too many), EFAULT and others of Device::map. Thread-safe.
  Reference add(void* address, std::uint64_t size, Kind kind, bool readonly,
                std::span<const std::uint32_t> devices = {}, Backing peer = {});
  /// The same for memory of ours that other memory is staged through, on every device.
  Reference add_staging(void* address, std::uint64_t size);
  /// The same for GPU memory. It is mapped where that is possible, and staged otherwise; `demand` allows only one of
  /// them, and EOPNOTSUPP says why it cannot be had.
  Reference add_gpu(std::uint64_t address, std::uint64_t size, bool readonly, std::unique_ptr<GpuBuffer> gpu,
                    Demand demand, std::span<const std::uint32_t> devices = {});

  /// The same for the one call of one device: no address leads to it, so it may overlap any other.
  Reference add_gpu_unlisted(std::uint64_t address, std::uint64_t size, bool readonly, std::unique_ptr<GpuBuffer> gpu,
                             std::uint32_t device);

  /// How requests between a registration and devices go, in a word and why, over those that are open.
  struct Way {
    Route route = Route::direct;
    std::string why;
  };
  Way way(const Reference& reference);

  /// Closes a registration. 0, EBUSY (commands are in flight; nothing has changed) or ESTALE (another generation, or
  /// closed). Thread-safe, lock-free against I/O.
  int close(const Reference& reference);
  /// The same, or as soon as no command is in flight: that is looked at whenever something is registered or closed, and
  /// when a device has stopped. Thread-safe.
  void close_when_idle(const Reference& reference);

  /// Whose memory a registration is; no runtime where it is no GPU's, or closed.
  struct GpuPlace {
    gpu::Runtime* runtime = nullptr;
    gpu::Place place{};
  };
  GpuPlace gpu_of(const Reference& reference);
  /// Whether a registration's GPU memory was freed under it. Asks the driver.
  bool was_freed(const Reference& reference);

  /// What still uses a registration, in words: "2 commands on queue 1 of emulated:1GiB"; "" where nothing does.
  std::string holders(const Reference& reference);
  /// Commands in flight on a registration, over all queues.
  std::uint64_t in_flight(const Reference& reference);

  /// The registration that contains `address`, or an empty reference. Lock-free.
  Reference find(const void* address) const {
    const AddressIndex::Found found = index_.find(reinterpret_cast<std::uintptr_t>(address));
    return {reinterpret_cast<Registration*>(found.tag & ~kReadonly), found.generation, found.begin,
            found.end - found.begin, (found.tag & kReadonly) != 0};
  }

  /// Whether a byte of [address, address + size) is registered. Thread-safe.
  bool overlaps(const void* address, std::uint64_t size);

  /// Makes an open device known: it gets a number below kMaxDevices, and every registration made for all devices is
  /// mapped to it. A registration that cannot be mapped there is left out, and I/O on it says so. Throws
  /// Failure(EMFILE).
  std::uint32_t attach(device::Device& device);
  /// Unmaps everything from a device and frees its number. With `leak`, mappings are forgotten instead: the controller
  /// may still use them.
  void detach(std::uint32_t number, bool leak);
  /// Unmaps from a device what exporters took back: I/O on it says so from now on. The device's queue pairs are the
  /// caller's, and nothing is in flight.
  void drop_revoked(std::uint32_t number);
  /// Queues make their ledgers known while they exist. A removed ledger counts no more.
  void add_ledger(Ledger& ledger);
  void remove_ledger(Ledger& ledger);

  /// Registrations open now; for tests and statistics.
  std::uint64_t open_registrations();

 private:
  /// Beside the slot's address in the index.
  static constexpr std::uint64_t kReadonly = 1;

  static void prepare_for_fork();
  struct Source;
  Reference add(Source source, std::span<const std::uint32_t> devices);
  static void check_inside(const GpuBuffer& gpu, std::uint64_t address, std::uint64_t size);
  void reserve_slots();
  std::uint32_t take_slot();
  void map_to(Registration& registration, std::uint32_t device);
  void map_to_all(Registration& registration);
  bool map_gpu(Registration& registration, std::uint32_t device, std::uint64_t begin, std::uint64_t bytes,
               std::uint64_t* pages);
  void stage(Registration& registration, std::uint32_t device, const std::string& why);
  void unmap_from(Registration& registration, std::uint32_t device);
  void unmap_all(Registration& registration);
  std::uint64_t count(std::uint32_t index) const;
  int close_locked(const Reference& reference);
  void close_leaving();

  std::mutex lock_;
  Registration* slots_ = nullptr;
  std::uint32_t used_ = 0;
  std::vector<std::uint32_t> free_;
  std::uint64_t next_generation_ = 1;
  std::uint64_t open_ = 0;
  std::uint32_t leaving_ = 0;
  std::array<device::Device*, kMaxDevices> devices_{};
  std::vector<Ledger*> ledgers_;
  AddressIndex index_;
};

extern constinit Immortal<Registry> registry;
inline Registry& Registry::instance() { return registry.value; }

}  // namespace ugds::memory
