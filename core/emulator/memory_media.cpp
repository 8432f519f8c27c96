// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <shared_mutex>

#include "base/units.hpp"
#include "emulator/media.hpp"
#include "emulator/reservation.hpp"

namespace ugds::emulator {

namespace {

constexpr std::uint64_t kExtent = 2_MiB;
/// What is locked on its own: threads that share a write are in different ones, most of the time.
constexpr std::uint64_t kGranule = 64_KiB;

/// An extent's memory, or nullptr. Aligned to its size, so that the kernel can back it with one large page.
std::byte* allocate_extent() {
  void* at = mmap(nullptr, 2 * kExtent, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  auto* start = static_cast<std::byte*>(at);
  auto* aligned =
      start + (align_up(reinterpret_cast<std::uintptr_t>(start), kExtent) - reinterpret_cast<std::uintptr_t>(start));
  if (aligned != start) munmap(start, static_cast<std::size_t>(aligned - start));
  munmap(aligned + kExtent, static_cast<std::size_t>(start + kExtent - aligned));
  madvise(aligned, kExtent, MADV_DONTFORK);
  madvise(aligned, kExtent, MADV_HUGEPAGE);
  return aligned;
}

class MemoryMedia final : public Media {
 public:
  explicit MemoryMedia(std::uint64_t bytes)
      : extents_((bytes + kExtent - 1) / kExtent), table_(extents_ * sizeof(Slot), true) {}

  ~MemoryMedia() override {
    if (stored_ == 0) return;
    for (std::uint64_t i = first_used_; i <= last_used_; ++i)
      if (std::byte* data = slot(i).load(std::memory_order_relaxed)) munmap(data, kExtent);
  }

  int read(std::uint64_t at, void* out, std::uint64_t bytes) override {
    auto* to = static_cast<std::byte*>(out);
    return each(at, bytes, [&](std::uint64_t extent, std::uint64_t offset, std::uint64_t part) {
      const Hold<true> hold(*this, extent, offset, part);
      const std::byte* data = slot(extent).load(std::memory_order_acquire);
      if (data != nullptr) {
        std::memcpy(to, data + offset, part);
      } else {
        std::memset(to, 0, part);
      }
      to += part;
      return 0;
    });
  }

  int write(std::uint64_t at, const void* source, std::uint64_t bytes) override {
    auto* from = static_cast<const std::byte*>(source);
    return each(at, bytes, [&](std::uint64_t extent, std::uint64_t offset, std::uint64_t part) {
      const Hold<false> hold(*this, extent, offset, part);
      std::byte* data = slot(extent).load(std::memory_order_acquire);
      if (data == nullptr) {
        data = add_extent(extent);
        if (data == nullptr) return ENOSPC;
      }
      std::memcpy(data + offset, from, part);
      from += part;
      return 0;
    });
  }

  int discard(std::uint64_t at, std::uint64_t bytes) override {
    const std::uint64_t end = at + bytes;
    for (at = next_data(at, end); at < end; at = next_data(at, end)) {
      const std::uint64_t extent = at / kExtent, offset = at % kExtent;
      const std::uint64_t part = std::min(kExtent - offset, end - at);
      const Hold<false> hold(*this, extent, offset, part);
      std::byte* data = slot(extent).load(std::memory_order_acquire);
      if (data != nullptr && part == kExtent) {
        slot(extent).store(nullptr, std::memory_order_relaxed);
        munmap(data, kExtent);
        stored_.fetch_sub(kExtent, std::memory_order_relaxed);
      } else if (data != nullptr) {
        std::memset(data + offset, 0, part);
      }
      at += part;
    }
    return 0;
  }

  int sync() override { return 0; }

  std::uint64_t next_data(std::uint64_t at, std::uint64_t end) override {
    while (at < end && slot(at / kExtent).load(std::memory_order_acquire) == nullptr) {
      const std::uint64_t extent = at / kExtent;
      // Beyond what was ever used, and before it, there is nothing to look at.
      if (stored_.load(std::memory_order_relaxed) == 0 || extent > last_used_.load(std::memory_order_relaxed))
        return end;
      at = std::max(extent + 1, first_used_.load(std::memory_order_relaxed)) * kExtent;
    }
    return std::min(at, end);
  }

  std::uint64_t stored_bytes() const override { return stored_.load(std::memory_order_relaxed); }

 private:
  using Slot = std::atomic<std::byte*>;
  static_assert(sizeof(Slot) == sizeof(void*));

  template <class Use>
  int each(std::uint64_t at, std::uint64_t bytes, Use&& use) {
    while (bytes != 0) {
      const std::uint64_t extent = at / kExtent, offset = at % kExtent;
      const std::uint64_t part = std::min(kExtent - offset, bytes);
      if (const int error = use(extent, offset, part); error != 0) return error;
      at += part;
      bytes -= part;
    }
    return 0;
  }

  /// The granules of a part of an extent, all at once, so that nobody sees it half changed. In the order of their
  /// addresses, which an extent's locks have too, so that two never wait for each other.
  template <bool shared>
  class Hold {
   public:
    Hold(MemoryMedia& media, std::uint64_t extent, std::uint64_t offset, std::uint64_t bytes)
        : at_(&media.locks_[extent * (kExtent / kGranule) % media.locks_.size() + offset / kGranule]),
          end_(at_ + (offset % kGranule + bytes + kGranule - 1) / kGranule) {
      for (std::shared_mutex* lock = at_; lock != end_; ++lock) {
        if constexpr (shared) {
          lock->lock_shared();
        } else {
          lock->lock();
        }
      }
    }
    ~Hold() {
      for (std::shared_mutex* lock = at_; lock != end_; ++lock) {
        if constexpr (shared) {
          lock->unlock_shared();
        } else {
          lock->unlock();
        }
      }
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    std::shared_mutex *at_, *end_;
  };

  /// The memory of an extent that has none; nullptr where none is left. Others may add it at the same time.
  std::byte* add_extent(std::uint64_t extent) {
    std::lock_guard guard(adding_lock_);
    std::byte* data = slot(extent).load(std::memory_order_relaxed);
    if (data != nullptr) return data;
    data = allocate_extent();
    if (data == nullptr) return nullptr;
    slot(extent).store(data, std::memory_order_release);
    note_used(extent);
    return data;
  }

  void note_used(std::uint64_t extent) {
    if (extent < first_used_.load(std::memory_order_relaxed)) first_used_.store(extent, std::memory_order_relaxed);
    if (extent > last_used_.load(std::memory_order_relaxed)) last_used_.store(extent, std::memory_order_relaxed);
    stored_.fetch_add(kExtent, std::memory_order_relaxed);
  }

  /// The table's memory is zero at first, which is a valid atomic null pointer on every platform that we build for.
  Slot& slot(std::uint64_t extent) const { return reinterpret_cast<Slot*>(table_.data())[extent]; }

  std::uint64_t extents_;
  Reservation table_;
  std::array<std::shared_mutex, 32 * kExtent / kGranule> locks_;
  std::mutex adding_lock_;
  std::atomic<std::uint64_t> first_used_{~std::uint64_t{0} / kExtent}, last_used_{0};
  std::atomic<std::uint64_t> stored_{0};
};

}  // namespace

std::unique_ptr<Media> make_memory_media(std::uint64_t bytes) { return std::make_unique<MemoryMedia>(bytes); }

}  // namespace ugds::emulator
