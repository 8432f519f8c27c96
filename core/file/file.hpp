// SPDX-License-Identifier: Apache-2.0
//
// A file or block device as it is opened: with and without O_DIRECT, what the file system asks of direct requests, and
// how large it is. Both descriptors are open file descriptions of ours, so that no flag of a caller's changes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "base/descriptor.hpp"

namespace ugds::file {

/// Whether requests go past the page cache.
enum class Direct : std::uint8_t {
  wanted,    ///< where the file system has it
  demanded,  ///< or the file is not opened
  off,
};

struct Options {
  Direct direct = Direct::wanted;
  bool create = false;    ///< it is made where it is missing, with mode 0666 less the umask
  bool readonly = false;  ///< also where it could be written
};

class File {
 public:
  /// Throws Failure: ENOENT, EACCES, EISDIR, EBUSY (a block device that the kernel or somebody else uses), EINVAL
  /// (neither a regular file nor a block device), EOPNOTSUPP (direct was demanded, and the file system has it not). A
  /// file that it made is removed then.
  static std::shared_ptr<File> open(const std::string& path, const Options& options);
  /// Of a descriptor, which stays the caller's. Throws Failure, and EBADF.
  static std::shared_ptr<File> adopt(int descriptor, const Options& options);

  /// Descriptors. `direct()` is -1 where there is no direct I/O; `buffered()` is -1 where only a descriptor with
  /// O_DIRECT was given and it could not be opened once more.
  int direct() const { return refused_.load(std::memory_order_relaxed) ? -1 : direct_.get(); }
  int buffered() const { return buffered_.get(); }
  /// What direct requests keep to: multiples of these, in bytes. Powers of two.
  std::uint32_t memory_alignment() const { return memory_alignment_; }
  std::uint32_t offset_alignment() const { return offset_alignment_; }
  bool readonly() const;
  bool writeonly() const;
  bool is_block_device() const { return is_block_device_; }
  /// What a write's offset and size are multiples of. 1 but where `buffered()` is -1: then nothing changes a part of a
  /// block, and `why_whole()` says why.
  std::uint32_t write_unit() const { return buffered_ ? 1 : offset_alignment_; }
  const std::string& why_whole() const { return why_whole_; }
  /// Why it is not written to, or not read from, in words; "" where it is both.
  const std::string& why_one_way() const { return why_one_way_; }
  /// Its path, or "descriptor N" where that is not known.
  const std::string& name() const { return name_; }
  /// Bytes now; 0 where that cannot be asked. Thread-safe.
  std::uint64_t size() const noexcept;
  /// Why requests are buffered, in words; "" where they are direct.
  std::string why_buffered() const;
  /// The file system, such as "ext4", or "block device".
  const std::string& kind() const { return kind_; }
  /// The file system has refused a direct request that kept to what it asks for: there will be no more of them.
  void refuse_direct() { refused_.store(true, std::memory_order_relaxed); }

  /// Bytes that went past the page cache, through it, and (of the first) through memory of ours because the caller's
  /// range or memory was not aligned.
  std::atomic<std::uint64_t> direct_bytes{0}, buffered_bytes{0}, bounced_bytes{0};

 private:
  void look(const std::string& name, int descriptor, const Options& options);
  void ask_alignment(int descriptor);

  Descriptor direct_, buffered_;
  std::uint32_t memory_alignment_ = 512, offset_alignment_ = 4096;
  int access_ = 0;  ///< O_RDONLY, O_RDWR or O_WRONLY
  bool is_block_device_ = false;
  std::atomic<bool> refused_{false};
  std::string name_, why_buffered_, kind_, why_one_way_, why_whole_;
};

}  // namespace ugds::file
