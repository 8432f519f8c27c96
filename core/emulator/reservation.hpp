// SPDX-License-Identifier: Apache-2.0
//
// A range of anonymous memory of this process that costs nothing until it is touched, and that `fork` leaves behind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace ugds::emulator {

class Reservation {
 public:
  Reservation() = default;
  /// Zeroed. With `accessible` false nothing may be touched before `commit`. Throws Failure(ENOMEM).
  Reservation(std::uint64_t bytes, bool accessible);
  /// Zeroed and accessible, and for other processes to map as well: by `descriptor`, from `offset` of its file on. They
  /// cannot take it away. Throws Failure(ENOMEM).
  static Reservation shared(std::uint64_t bytes, std::uint64_t offset);
  ~Reservation();
  Reservation(Reservation&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        descriptor_(std::exchange(other.descriptor_, -1)) {}
  Reservation& operator=(Reservation&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }

  std::byte* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }
  /// -1 where it is not shared.
  int descriptor() const { return descriptor_; }
  /// Makes [from, to) accessible. Throws Failure(ENOMEM).
  void commit(std::uint64_t from, std::uint64_t to);
  /// Gives the memory of [from, to) back; it reads as zeros afterwards.
  void release(std::uint64_t from, std::uint64_t to) noexcept;

 private:
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  int descriptor_ = -1;
};

}  // namespace ugds::emulator
