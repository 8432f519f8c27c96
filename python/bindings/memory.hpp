// SPDX-License-Identifier: Apache-2.0
//
// The memory of a Python object: by the buffer protocol, DLPack or the CUDA array interface.
#pragma once

#include <cstdint>
#include <memory>

#include "common.hpp"

namespace ugds::python {

/// Where it is, and what keeps it there.
struct Memory {
  void* address = nullptr;
  std::uint64_t size = 0;
  bool readonly = false;
  memory::Kind kind = memory::Kind::host;
  Backing peer{};
  std::unique_ptr<Keeper> keeper{};
  bool is_gpu = false;  ///< its address is one of a GPU's
  gpu::Runtime* runtime = nullptr;
  gpu::Place place{};
};

/// Raises TypeError for an object without memory, `ugds.Error` for memory that is not contiguous or of no device that
/// is known, and what the object itself raises.
Memory memory_of(nb::handle object);

/// The object whose view keeps the memory, for the garbage collector; nullptr where it is none.
PyObject* exporter_of(const Keeper* keeper);

}  // namespace ugds::python
