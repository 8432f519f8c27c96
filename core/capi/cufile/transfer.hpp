// SPDX-License-Identifier: Apache-2.0
//
// One read or write of a registered file, of any offset and size, to or from any memory, in the calling thread.
#pragma once

#include <sys/types.h>

#include <cstddef>

#include "capi/cufile/abi.h"
#include "capi/cufile/errors.hpp"
#include "nvme/commands.hpp"

namespace ugds::cufile {

struct Wanted {
  nvme::Opcode opcode = nvme::Opcode::read;
  CUfileHandle_t file = nullptr;
  const void* base = nullptr;
  std::size_t size = 0;
  off_t file_offset = 0, buffer_offset = 0;
  bool in_batch = false;
};

/// Never throws. A read that meets the end of the file gives fewer bytes. Thread-safe.
Moved transfer(const Wanted& wanted);

}  // namespace ugds::cufile
