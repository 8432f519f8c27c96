// SPDX-License-Identifier: Apache-2.0
//
// The address translation between the controller and this process's memory: an IOMMU that forgives nothing.
//
// IOVAs are handed out upwards from 2^48, which no pointer of a process reaches (x86-64: 2^47, AArch64: 2^48), and
// never again, so that a stale address can neither hit later memory nor work by being a pointer. There are 8 TiB of
// them. Translation is one load a page from a flat table that is committed as the addresses are handed out.
//
// Below 2^48 the host chooses, where its memory is another process's (`add_at`). Those ranges may be few and huge, or
// anywhere, so they are searched for, and the last one that was hit is tried first.
//
// A range may be foreign: this process does not reach its bytes by their address, a Copier does. Only a command's data
// may lie there (`data_runs`, `check_data`); what the controller looks at by itself may not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "base/copier.hpp"
#include "emulator/reservation.hpp"

namespace ugds::emulator {

/// What an access met. `at` is the IOVA of the first byte that could not be reached.
struct Access {
  enum class Kind : std::uint8_t { ok, unmapped, read_only, foreign };
  Kind kind = Kind::ok;
  std::uint64_t at = 0;
  explicit operator bool() const { return kind == Kind::ok; }
};

class AddressSpace {
 public:
  static constexpr std::uint64_t kFirst = std::uint64_t{1} << 48;
  static constexpr std::uint64_t kSpan = std::uint64_t{1} << 43;
  static constexpr std::uint64_t kPage = 4096;

  struct Range {
    std::uint64_t length;
    bool writable;
    std::byte* memory;         ///< an address of its own where there is a copier: never to be touched
    Copier* copier = nullptr;  ///< of foreign memory
  };

  AddressSpace();

  /// Checks that the memory is there, and writable where asked. Touches every page. Throws Failure(EFAULT).
  static void require_memory(void* address, std::uint64_t length, bool writable);

  /// Throws Failure(ENOSPC) when all IOVAs were handed out.
  std::uint64_t add(void* address, std::uint64_t length, bool writable, Copier* copier = nullptr);
  /// Maps at `iova`. False where a range is there already. The caller keeps within [0, kFirst) and to whole pages.
  bool add_at(std::uint64_t iova, void* address, std::uint64_t length, bool writable);
  /// nullptr where `iova` is not the first of a range.
  const Range* find(std::uint64_t iova) const;
  void remove(std::uint64_t iova) noexcept;

  std::uint64_t mapped_bytes() const { return mapped_bytes_; }
  std::uint64_t mapped_ranges() const { return ranges_.size(); }

  /// Calls `use(pointer, bytes)` for each run that is contiguous in this process's memory, in order. Ends early where
  /// `use` returns false or the translation fails, as it does for foreign memory.
  template <class Use>
  Access runs(std::uint64_t iova, std::uint64_t length, bool write, Use&& use) const {
    return walk(iova, length, kPresent | kForeign | (write ? kWritable : 0), kPresent | (write ? kWritable : 0),
                [&](std::uint64_t entry, std::uint64_t at, std::uint64_t bytes) {
                  return use(pointer(entry) + (at & (kPage - 1)), bytes);
                });
  }
  /// The same for a command's data, which may be foreign: calls `use(pointer, bytes, copier)`, whose pointer must not
  /// be touched where there is a copier.
  template <class Use>
  Access data_runs(std::uint64_t iova, std::uint64_t length, bool write, Use&& use) const {
    const std::uint64_t needed = kPresent | (write ? kWritable : 0);
    return walk(iova, length, needed, needed, [&](std::uint64_t entry, std::uint64_t at, std::uint64_t bytes) {
      Copier* const copier = (entry & kForeign) == 0 ? nullptr : copier_of(at);
      return use(pointer(entry) + (at & (kPage - 1)), bytes, copier);
    });
  }

  /// Whether every byte may be accessed as a command's data.
  Access check_data(std::uint64_t iova, std::uint64_t length, bool write) const {
    const std::uint64_t needed = kPresent | (write ? kWritable : 0);
    return walk(iova, length, needed, needed, [](std::uint64_t, std::uint64_t, std::uint64_t) { return true; });
  }
  /// Whether every byte may be accessed by this process itself.
  Access check(std::uint64_t iova, std::uint64_t length, bool write) const {
    return runs(iova, length, write, [](std::byte*, std::uint64_t) { return true; });
  }
  Access read(std::uint64_t iova, void* out, std::uint64_t length) const;
  Access write(std::uint64_t iova, const void* data, std::uint64_t length) const;
  /// The memory behind one range that does not cross a page of 4 KiB, or that is contiguous here; nullptr otherwise.
  std::byte* contiguous(std::uint64_t iova, std::uint64_t length, bool write) const;

 private:
  static constexpr std::uint64_t kWritable = 1, kPresent = 2, kForeign = 4;

  /// Each run of pages that follow each other here too. Their entries must have the bits of `wanted` among those of
  /// `mask`.
  template <class Use>
  Access walk(std::uint64_t iova, std::uint64_t length, std::uint64_t mask, std::uint64_t wanted, Use&& use) const {
    while (length != 0) {
      const std::uint64_t entry = entry_of(iova);
      if ((entry & mask) != wanted) [[unlikely]]
        return refusal(entry, iova, wanted);
      // Whether a page is writable matters to those who write.
      const std::uint64_t run = run_from(iova, length, entry, kWritable & ~mask);
      if (!use(entry, iova, run)) return {};
      iova += run;
      length -= run;
    }
    return {};
  }
  /// Bytes from `iova`, at most `length`, whose entries are those of pages that follow each other, with the same bits
  /// but for `ignored`.
  std::uint64_t run_from(std::uint64_t iova, std::uint64_t length, std::uint64_t entry, std::uint64_t ignored) const {
    std::uint64_t run = kPage - (iova & (kPage - 1)), next = (entry | ignored) + kPage;
    const std::uint64_t page = (iova - kFirst) / kPage;
    if (page < committed_) {
      const std::uint64_t* at = table() + page + 1;
      const std::uint64_t* const end = table() + committed_;
      for (; run < length && at != end && (*at | ignored) == next; ++at, next += kPage) run += kPage;
    } else {
      for (; run < length && (entry_of(iova + run) | ignored) == next; next += kPage) run += kPage;
    }
    return run < length ? run : length;
  }
  std::uint64_t entry_of(std::uint64_t iova) const {
    const std::uint64_t page = (iova - kFirst) / kPage;  // wraps to a huge number below kFirst
    return page < committed_ ? table()[page] : chosen_entry(iova);
  }
  /// The entry of an address that the host chose.
  std::uint64_t chosen_entry(std::uint64_t iova) const {
    if (iova - last_iova_ >= last_.length && !find_chosen(iova)) return 0;
    const std::uint64_t page = reinterpret_cast<std::uintptr_t>(last_.memory) + ((iova - last_iova_) & ~(kPage - 1));
    return page | kPresent | (last_.writable ? kWritable : 0);
  }
  bool find_chosen(std::uint64_t iova) const;
  static Access refusal(std::uint64_t entry, std::uint64_t iova, std::uint64_t wanted) {
    if (entry == 0) return {Access::Kind::unmapped, iova};
    const bool read_only = (wanted & kWritable) != 0 && (entry & kWritable) == 0;
    return {read_only ? Access::Kind::read_only : Access::Kind::foreign, iova};
  }
  Copier* copier_of(std::uint64_t iova) const;
  static std::byte* pointer(std::uint64_t entry) {
    return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(entry & ~(kPage - 1)));
  }
  std::uint64_t* table() const { return reinterpret_cast<std::uint64_t*>(table_.data()); }

  Reservation table_;
  std::uint64_t committed_ = 0;  // entries
  std::uint64_t next_ = kFirst;
  std::uint64_t mapped_bytes_ = 0;
  std::map<std::uint64_t, Range> ranges_;
  mutable std::uint64_t last_iova_ = 0;
  mutable Range last_{0, false, nullptr};  // by value: nothing of it is there once it was removed
};

}  // namespace ugds::emulator
