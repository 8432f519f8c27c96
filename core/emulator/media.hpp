// SPDX-License-Identifier: Apache-2.0
//
// Where a subsystem's bytes are kept: memory in extents allocated on demand, or a file. Addresses are flat; what was
// never written reads as zeros. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace ugds::emulator {

class Media {
 public:
  virtual ~Media() = default;
  /// 0 or an errno, here and below.
  virtual int read(std::uint64_t at, void* out, std::uint64_t bytes) = 0;
  virtual int write(std::uint64_t at, const void* data, std::uint64_t bytes) = 0;
  /// The bytes read as zeros afterwards, and whole extents are given back.
  virtual int discard(std::uint64_t at, std::uint64_t bytes) = 0;
  /// What was written is kept by the file's device.
  virtual int sync() = 0;
  /// The first address from `at` on that may hold something else than zeros, or `end`.
  virtual std::uint64_t next_data(std::uint64_t at, std::uint64_t end) = 0;
  virtual std::uint64_t stored_bytes() const = 0;
  /// Set-up has succeeded: a file that it made stays. Until then it goes with its last user.
  virtual void keep() noexcept {}
};

std::unique_ptr<Media> make_memory_media(std::uint64_t bytes);

/// A file, locked against a second opening. `bytes` is its size, known after opening.
struct FileMedia {
  std::unique_ptr<Media> media;
  std::uint64_t bytes;
};
/// `wanted` is the size for a file that does not exist yet; 0 where it must exist. Throws Failure: EBUSY (open
/// elsewhere), EINVAL (not a plain file, no size), and what open(2) says.
FileMedia open_file_media(const std::string& path, std::uint64_t wanted);

}  // namespace ugds::emulator
