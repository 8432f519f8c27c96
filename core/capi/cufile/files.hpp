// SPDX-License-Identifier: Apache-2.0
//
// Registered files. A CUfileHandle_t is a number that is never used again, so a stale one finds nothing and is never
// followed. Who uses a file counts in and out; closing marks it and waits for the count.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>

#include "base/clock.hpp"
#include "capi/cufile/abi.h"
#include "engine/table.hpp"
#include "nvme/commands.hpp"

namespace ugds::cufile {

struct File {
  std::atomic<std::uint64_t> id{0};  ///< 0: free, or being closed
  std::atomic<std::uint32_t> users{0};
  /// What the engine knows it by. It has room for fewer devices than there may be files: the least recently used are
  /// closed there, and opened again when they are asked for.
  std::atomic<engine::HandleId> device{0};
  std::atomic<std::uint64_t> used{0};  ///< in ticks: when it was last asked for
  // What follows is written while it is free.
  bool readable = false, writable = false;
  int ours = -1;  ///< a duplicate of the program's descriptor
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

  /// 0, or the code of why the file may not be read or written.
  int refuse(nvme::Opcode opcode) const;

  /// What `body` gives of the file's device, in use meanwhile. Throws Failure where that cannot be opened again.
  template <class Body>
  auto with_device(Body&& body) const {
    file_->used.store(ticks(), std::memory_order_relaxed);
    for (;;) {
      const engine::HandleId id = file_->device.load(std::memory_order_acquire);
      {
        const engine::Table::Use device(engine::Table::instance(), id);
        if (device) [[likely]]
          return body(*device);
      }
      open_again(id);
    }
  }

 private:
  void open_again(engine::HandleId stale) const;

  File* file_ = nullptr;
};

/// False: a request runs on one, for longer than a request may; it and those not yet closed stay.
bool close_all_files();

}  // namespace ugds::cufile
