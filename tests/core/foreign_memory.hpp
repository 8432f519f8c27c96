// SPDX-License-Identifier: Apache-2.0
//
// Memory as a GPU's is: its address is there, and whoever touches it by that crashes. Its bytes are reached by a
// copier, and by the test through a mapping of its own.
#pragma once

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/copier.hpp"

namespace emulator_test {

class ForeignMemory final : public ugds::Copier {
 public:
  explicit ForeignMemory(std::uint64_t bytes) : bytes_(bytes) {
    const int file = memfd_create("foreign", MFD_CLOEXEC);
    REQUIRE(file >= 0);
    REQUIRE(ftruncate(file, static_cast<off_t>(bytes)) == 0);
    outside_ = mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, file, 0);
    void* own = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    REQUIRE(outside_ != MAP_FAILED);
    REQUIRE(own != MAP_FAILED);
    own_ = static_cast<std::byte*>(own);
  }
  ~ForeignMemory() override {
    munmap(outside_, bytes_);
    munmap(own_, bytes_);
  }
  ForeignMemory(const ForeignMemory&) = delete;
  ForeignMemory& operator=(const ForeignMemory&) = delete;

  /// Where the test finds the bytes.
  std::byte* own() const { return own_; }
  std::uint64_t size() const { return bytes_; }
  std::uint64_t address() const { return reinterpret_cast<std::uintptr_t>(outside_); }
  ugds::ForeignRange range() { return {address(), ugds::Bytes(bytes_), this}; }

  /// Calls fail with `error` once `calls` more have succeeded; never where that is negative.
  void fail_after(int calls, int error) {
    error_ = error;
    left_ = calls;
  }
  std::uint64_t calls() const { return calls_; }
  /// Most bytes of a call.
  std::uint64_t largest() const { return largest_; }

  int copy_in(std::uint64_t to, const void* from, std::uint64_t bytes) noexcept override {
    if (const int error = enter(to, bytes); error != 0) return error;
    std::memcpy(own_ + (to - address()), from, bytes);
    return 0;
  }
  int copy_out(void* to, std::uint64_t from, std::uint64_t bytes) noexcept override {
    if (const int error = enter(from, bytes); error != 0) return error;
    std::memcpy(to, own_ + (from - address()), bytes);
    return 0;
  }

 private:
  int enter(std::uint64_t at, std::uint64_t bytes) noexcept {
    ++calls_;
    for (std::uint64_t most = largest_; bytes > most && !largest_.compare_exchange_weak(most, bytes);) {
    }
    if (at < address() || bytes > bytes_ || at - address() > bytes_ - bytes) return EFAULT;
    int left = left_;
    while (left > 0 && !left_.compare_exchange_weak(left, left - 1)) {
    }
    return left == 0 ? error_.load() : 0;
  }

  std::uint64_t bytes_;
  void* outside_ = nullptr;
  std::byte* own_ = nullptr;
  std::atomic<int> left_{-1}, error_{0};
  std::atomic<std::uint64_t> calls_{0}, largest_{0};
};

}  // namespace emulator_test
