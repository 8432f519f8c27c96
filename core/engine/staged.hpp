// SPDX-License-Identifier: Apache-2.0
//
// Synchronous requests on GPU memory that the device does not reach: in pieces through pinned memory of ours, so that
// the device and the GPU's copy engine work at the same time.
#pragma once

#include <cstdint>

#include "engine/operation.hpp"

namespace ugds::engine {

/// Whether a transfer goes this way: its registration, which need not be held, is staged for the device.
inline bool is_staged_transfer(const Handle& handle, const Transfer& transfer) {
  return transfer.buffer && transfer.buffer.registration->is_staged(handle.geometry().number);
}

/// Runs a read or write of whole blocks to its end, in the calling thread. Bytes, or -errno with last_error() filled.
/// Thread-safe; waits for one of the process's lanes where all are in use, within the deadline of the handle (EAGAIN).
std::int64_t run_staged(Handle& handle, const Transfer& transfer, const Interrupt& interrupt);

}  // namespace ugds::engine
