// SPDX-License-Identifier: Apache-2.0
//
// How a controller is reached: registers, doorbells, addresses for its DMA, interrupts. One small interface, with one
// implementation a transport. It knows nothing of queues, requests or GPUs, and nothing here is called on the I/O path:
// after set-up a queue holds plain pointers. The exceptions are cold: a doorbell that is not mapped, and `turn`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/copier.hpp"
#include "base/descriptor.hpp"
#include "base/text.hpp"
#include "base/units.hpp"

namespace ugds::device {

enum class Transport : std::uint8_t { emulated, vfio_user, vfio, ugds_drv, file };
const char* transport_name(Transport transport);

/// What the controller may do to mapped memory. A device's write is a read request's data.
enum class Access : std::uint8_t { read_only, read_write };

/// Memory that the controller can reach. `token` is the transport's own.
struct Mapping {
  std::uint64_t token = 0;
  Bytes length{};
};

struct Limits {
  bool memory_from_descriptor = false;  ///< only memory with a file descriptor behind it can be mapped
  bool registers_may_block = false;     ///< another process answers: not to be waited for with a lock that others need
  bool physical_addresses = false;      ///< IOVAs are physical addresses: consecutive only inside one page
  bool may_be_halted = false;           ///< see Device::halted: then only `reset` knows whether it goes on
  bool pins_nvidia = false;             ///< map_nvidia works
  bool interrupts_with_turn = false;    ///< although its callers run it, it interrupts
  bool bytewise = false;                ///< no NVMe device, but the controller of files: see bytewise.hpp
  std::uint32_t interrupt_vectors = 0;  ///< 0: completions can only be polled
  std::uint64_t register_bytes = ~std::uint64_t{0};  ///< of BAR0: doorbells beyond it cannot be rung
  /// What of a position is told in words: of a device that has many files, the place in the file.
  std::uint64_t position_mask = ~std::uint64_t{0};
};

/// Memory of a DMA-BUF, or of another object with a descriptor, as peer devices export it.
struct DescriptorRange {
  int descriptor = -1;
  std::uint64_t offset = 0;  ///< a multiple of nvme::kPageSize
  Bytes length{};            ///< the same
};

using ugds::ForeignRange;

/// What a bytewise device keeps its data in.
struct Medium {
  std::uint64_t size = 0;    ///< bytes now
  std::string kind{};        ///< such as "ext4"
  bool is_buffered = false;  ///< requests go through the page cache, and why_buffered says why
  std::string why_buffered{};
  std::string io{};                                    ///< how the kernel is asked: "io_uring", or "threads" and why
  std::uint64_t direct_bytes = 0, buffered_bytes = 0;  ///< past the page cache, and through it
  std::uint64_t bounced_bytes = 0;  ///< of those that went past it: through memory of ours, for alignment
  std::uint32_t write_unit = 1;     ///< of what a write's offset and size are multiples, where `why_whole` says why
  std::string why_whole{};
  std::string why_one_way{};  ///< why it is not written to, or not read; "" where it is both
};

/// The file that a position of a bytewise device lies in.
struct Place {
  std::string name{};         ///< as URIs name it
  std::uint64_t end = 0;      ///< where it ends now, on the device
  bool is_fixed = false;      ///< it does not grow
  std::string why_one_way{};  ///< as Medium has it
};

class Device {
 public:
  virtual ~Device() = default;
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  virtual const std::string& uri() const = 0;
  virtual Transport transport() const = 0;
  virtual Limits limits() const = 0;

  /// What it means, in words, that the registers read as all ones, and what to do then.
  struct Gone {
    const char* cause;
    const char* hint;
  };
  virtual Gone gone() const {
    return {"the device has gone: its registers read as all ones",
            "close the device; plug it in, or see that it has power, and open it again"};
  }
  /// Why whatever is asked of the device is in vain, in words; "" where that is not known. Thread-safe.
  virtual const char* unreachable() const { return ""; }

  /// Register access at a byte offset into BAR0. A device that has gone reads as all ones; nothing faults.
  /// Thread-safe.
  virtual std::uint32_t read32(std::uint32_t offset) = 0;
  virtual std::uint64_t read64(std::uint32_t offset) = 0;
  virtual void write32(std::uint32_t offset, std::uint32_t value) = 0;
  virtual void write64(std::uint32_t offset, std::uint64_t value) = 0;

  /// The doorbell word at a byte offset, for plain stores; nullptr where it must be written by `write32`.
  virtual std::uint32_t* doorbell(std::uint32_t offset) = 0;

  /// Maps page-aligned memory, to IOVAs congruent to the addresses modulo 64 KiB, and writes the IOVA of each of its
  /// pages of nvme::kPageSize to `pages`. The memory stays mapped until `unmap`. Throws Failure: EFAULT (not memory of
  /// this process), ENOSPC (out of mappings), EOPNOTSUPP (memory of a kind that this transport cannot reach).
  virtual Mapping map(void* address, Bytes length, Access access, std::uint64_t* pages) = 0;
  /// The same for memory that is known by a descriptor alone (a DMA-BUF). Throws Failure(EOPNOTSUPP) where the
  /// transport cannot.
  virtual Mapping map_descriptor(const DescriptorRange& range, Access access, std::uint64_t* pages);
  /// The same for memory of an NVIDIA GPU, by its address: that driver's own interface for peers pins it, where the
  /// memory is exported as no DMA-BUF. Address and length are multiples of 64 KiB. Throws Failure(EOPNOTSUPP) where the
  /// transport, or the kernel, has no such way.
  virtual Mapping map_nvidia(std::uint64_t address, Bytes length, Access access, std::uint64_t* pages);
  /// The same for memory that this process does not reach by its address, as a GPU's without a way for the device to
  /// reach it: `range.copier` is called for each command's data, from threads of the transport's, until `unmap` has
  /// returned. Address and length are multiples of nvme::kPageSize. Throws Failure(EOPNOTSUPP) where the device moves
  /// its data itself, as all that are real do.
  virtual Mapping map_foreign(const ForeignRange& range, Access access, std::uint64_t* pages);
  virtual void unmap(const Mapping& mapping) noexcept = 0;

  /// Memory of the transport's own for rings and lists: zeroed, of consecutive IOVAs from a multiple of its size or of
  /// DmaMemory::kAlignment on, not inherited by `fork`. The IOVAs of its pages are written to `pages`. An empty one
  /// where the transport has none, and other memory is mapped instead. Throws Failure(ENOMEM).
  struct OwnMemory {
    std::byte* data = nullptr;
    Mapping mapping{};
  };
  virtual OwnMemory allocate(Bytes, std::uint64_t*) { return {}; }
  virtual void free(const OwnMemory&) noexcept {}

  /// Has the interrupts of vector i delivered to eventfds[i]; those of a vector with -1, or beyond the span, nowhere.
  /// To be called before completion queues name a vector; the descriptors are the caller's, who calls again without
  /// them before they are closed. Throws Failure: EINVAL (more than limits().interrupt_vectors), and what the transport
  /// says.
  virtual void set_interrupts(std::span<const int> eventfds);

  /// Resets the function from outside. True if the controller is known to have stopped: no DMA follows.
  virtual bool reset() noexcept = 0;

  /// Has them called, in a thread of the library's: `asked` when the system wants the device back (it is being removed,
  /// or unbound from its driver), `halted` when it has stopped the device's DMA. Empty ones end that, and wait for a
  /// call that runs. Nothing happens where the transport does not know of such things.
  struct Notices {
    void (*asked)(void* context) = nullptr;
    void (*halted)(void* context) = nullptr;
    void* context = nullptr;
  };
  virtual void notify(const Notices&) {}
  /// Why the system has stopped the device's DMA since the last `reset`, in words: an exporter has taken memory back,
  /// or somebody has reset the function. No data moves until `reset`, whatever a completion says. nullptr: it has not.
  virtual const char* halted() noexcept { return nullptr; }
  /// Whether a mapping's memory was taken back by its exporter. Its addresses lead nowhere; it is still to be unmapped.
  virtual bool is_revoked(const Mapping&) noexcept { return false; }
  /// Gives the device up for good: registers read as all ones, writes go nowhere, and nothing can be mapped any more.
  /// True where the system has then taken from it what DMA needs, whatever state its controller was in. Idempotent.
  virtual bool release() noexcept { return false; }

  virtual Medium medium() const { return {}; }
  /// Where the file that a position lies in ends now, on the device; of Limits::bytewise. Thread-safe.
  virtual std::uint64_t end_at(std::uint64_t) const { return 0; }
  /// For those who tell of a failure. Thread-safe.
  virtual Place place_of(std::uint64_t) const { return {.name = uri()}; }

  /// Lets the controller do some work in the caller's thread (`pump=caller`); nullptr for what runs by itself.
  using Turn = void (*)(void* context);
  virtual Turn turn() const { return nullptr; }
  virtual void* turn_context() const { return nullptr; }

  /// The time that a simulated controller goes by (`clock=virtual`), in nanoseconds from 0, which only grows; nullptr
  /// for what goes by real time. Lives as long as the device. To be read by any thread, in any memory order.
  virtual const std::atomic<std::uint64_t>* virtual_clock() const { return nullptr; }

 protected:
  /// For set_interrupts. Throws Failure(EINVAL) where there are fewer vectors than asked for.
  void require_vectors(std::size_t count) const;
};

/// Host memory mapped to one device: rings, lists, Identify pages. Zeroed. Not inherited by `fork`.
class DmaMemory {
 public:
  /// Of the IOVA, and of the address where it is memory of this process: the largest controller page, for queues and
  /// lists begin at a multiple of it.
  static constexpr std::uint64_t kAlignment = 64_KiB;
  /// `huge`: of 2 MiB where some are free, else ordinary ones. Inside one even physical addresses are consecutive.
  enum class Pages : std::uint8_t { ordinary, huge };

  DmaMemory() = default;
  /// Throws Failure(ENOMEM) and whatever Device::map throws. `contiguous` asks for consecutive IOVAs and fails with
  /// ENOMEM where the transport did not give them: a smaller one may be had.
  DmaMemory(Device& device, Bytes size, bool contiguous, Pages pages = Pages::ordinary);
  ~DmaMemory();
  DmaMemory(DmaMemory&& other) noexcept;
  DmaMemory& operator=(DmaMemory&& other) noexcept;

  std::byte* data() const { return data_; }
  Bytes size() const { return size_; }
  Iova iova(std::uint64_t offset) const;
  explicit operator bool() const { return data_ != nullptr; }
  /// Whether it is in huge pages. Their rest beyond `size` is not mapped to the device.
  bool huge() const { return huge_; }
  /// Why it is not, though that was asked for: a static text such as "no huge page is free"; "" otherwise.
  const char* why_not_huge() const { return why_not_huge_; }
  /// Forgets the memory without unmapping or freeing it: the controller may still write to it.
  void leak() noexcept;

 private:
  bool take_from_device(bool contiguous, Pages pages);
  void allocate(bool shared);
  bool allocate_huge(bool shared);
  void keep(std::byte* data, std::uint64_t bytes, Descriptor descriptor, bool shared);
  void map(bool contiguous);
  bool map_huge(bool contiguous);
  void free() noexcept;

  Device* device_ = nullptr;
  std::byte* data_ = nullptr;
  Bytes size_{};
  std::uint64_t allocated_ = 0;
  bool huge_ = false;
  bool of_device_ = false;  ///< Device::OwnMemory
  const char* why_not_huge_ = "";
  Descriptor descriptor_;  ///< behind it, where the transport needs one
  Mapping mapping_{};
  std::unique_ptr<std::uint64_t[]> pages_;
};

/// Whether a URI names a file or block device.
bool is_file(const Uri& uri);

/// Opens what a URI names (`emulated:…`, `pci:…`, `vfio-user:…`). `text` is the URI as it was given, for messages.
/// Throws Failure: EINVAL (unknown scheme or parameter, with the nearest known), and what the transport's opening
/// throws.
std::unique_ptr<Device> open(const std::string& text, const Uri& uri);

}  // namespace ugds::device
