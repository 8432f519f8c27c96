// SPDX-License-Identifier: Apache-2.0
//
// Registered files. A CUfileHandle_t is a number that is never used again, so a stale one finds nothing and is never
// followed. Who uses a file counts in and out; closing marks it and waits for the count.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "capi/cufile/abi.h"
#include "engine/table.hpp"
#include "file/file.hpp"
#include "nvme/commands.hpp"

namespace ugds::cufile {

struct File {
  std::atomic<std::uint64_t> id{0};  ///< 0: free, or being closed
  std::atomic<std::uint32_t> users{0};
  // What follows is written while it is free.
  bool readable = false, writable = false;
  engine::HandleId device = 0;         ///< what the engine knows it by: of all files, the pool
  std::uint64_t place = 0;             ///< where on the device its byte 0 is
  std::string name;                    ///< for people
  std::shared_ptr<file::File> opened;  ///< none of a controller's node, which is a device of its own
  // Under the table's lock.
  int descriptor = -1;  ///< the program's number
  dev_t on = 0;         ///< with `inode`, what was behind it
  ino_t inode = 0;
};

/// A file in use, for its lifetime; empty where the handle is stale.
class FileUse {
 public:
  explicit FileUse(CUfileHandle_t handle);
  FileUse(FileUse&& other) noexcept : file_(std::exchange(other.file_, nullptr)) {}
  FileUse& operator=(FileUse&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  ~FileUse() {
    if (file_ != nullptr) file_->users.fetch_sub(1, std::memory_order_release);
  }
  explicit operator bool() const { return file_ != nullptr; }
  const File& operator*() const { return *file_; }
  const File* operator->() const { return file_; }

  /// 0, or the code of why the file may not be read or written.
  int refuse(nvme::Opcode opcode) const;
  /// 0 where a request may reach from `offset` so far, of which a read's size is cut to what there can be; else EFBIG.
  int fit(nvme::Opcode opcode, std::uint64_t offset, std::uint64_t& size) const;

 private:
  File* file_ = nullptr;
};

/// False: a request runs on one, for longer than a request may; it and those not yet closed stay.
bool close_all_files();

}  // namespace ugds::cufile
