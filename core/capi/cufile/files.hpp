// SPDX-License-Identifier: Apache-2.0
//
// Registered files. A CUfileHandle_t is a number that is never used again, so a stale one finds nothing and is never
// followed. Who uses a file counts in and out; closing marks it and waits for the count.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>

#include "capi/cufile/abi.h"
#include "engine/table.hpp"
#include "nvme/commands.hpp"

namespace ugds::cufile {

struct File {
  std::atomic<std::uint64_t> id{0};  ///< 0: free, or being closed
  std::atomic<std::uint32_t> users{0};
  // What follows is written while it is free.
  engine::HandleId device = 0;  ///< what the engine knows it by
  bool readable = false, writable = false;
  // Under the table's lock.
  int descriptor = -1;  ///< the program's number
  dev_t on = 0;         ///< with `inode`, what was behind it
  ino_t inode = 0;
};

/// A file in use, for its lifetime; empty where the handle is stale.
class FileUse {
 public:
  explicit FileUse(CUfileHandle_t handle);
  ~FileUse() {
    if (file_ != nullptr) file_->users.fetch_sub(1, std::memory_order_release);
  }
  FileUse(const FileUse&) = delete;
  FileUse& operator=(const FileUse&) = delete;
  explicit operator bool() const { return file_ != nullptr; }
  const File& operator*() const { return *file_; }
  const File* operator->() const { return file_; }

  /// 0, or the code of why the file may not be read or written.
  int refuse(nvme::Opcode opcode) const;

 private:
  File* file_ = nullptr;
};

/// False: a request runs on one, for longer than a request may; it and those not yet closed stay.
bool close_all_files();

}  // namespace ugds::cufile
