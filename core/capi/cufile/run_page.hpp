// SPDX-License-Identifier: Apache-2.0
//
// What `ugds run` learns of the processes that it started. Each keeps a page in a file of the folder that UGDS_RUN_DIR
// names, `PID`: which library this is, whether another libcufile is mapped, and what went through. It is shared memory,
// so that it can be read while the process lives, and after however it ended. Without UGDS_RUN_DIR the page is private.
#pragma once

#include <atomic>
#include <cstdint>

namespace ugds::cufile {

/// The layout is read by python/ugds/_run.py.
struct RunPage {
  static constexpr std::uint64_t kMagic = 0x31656c6966756375;  // "cufile1"
  std::uint64_t magic;
  std::uint64_t pid;
  std::atomic<std::uint64_t> driver_opens;
  std::atomic<std::uint64_t> handles, buffers;  ///< ever registered
  std::atomic<std::uint64_t> reads, read_bytes, writes, written_bytes;
  std::atomic<std::uint64_t> batches, batch_requests, stream_requests;
  std::atomic<std::uint64_t> errors;  ///< calls and requests that failed
  char library[512];                  ///< this one's file
  char foreign[512];                  ///< another libcufile that is mapped; "" where none is
};

RunPage& run_page();

inline void count(std::atomic<std::uint64_t>& counter, std::uint64_t by = 1) {
  counter.fetch_add(by, std::memory_order_relaxed);
}

/// Looks for another libcufile in the process. Under `ugds run` the process ends there, with words on standard error:
/// what is read by another library would be taken for ours. Called where the library is loaded, and where the driver is
/// opened.
void look_for_another();

/// Says once on standard error where `ugds run` will not see what this process does. Called where the driver is opened.
void tell_if_uncounted();

}  // namespace ugds::cufile
