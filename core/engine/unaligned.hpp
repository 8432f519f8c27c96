// SPDX-License-Identifier: Apache-2.0
//
// Requests that do not keep to whole blocks, or whose memory does not begin at a dword: their edges, or all of them, go
// through a buffer of ours. Such a write reads the blocks at its edges first and writes them back (read-modify-write),
// so a caller must allow it by name. One at a time for each handle; the aligned middle of a large one goes direct.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "engine/operation.hpp"
#include "memory/host.hpp"

namespace ugds::engine {

class Handle;

/// The buffer, registered for one device when that is opened.
class Bounce {
 public:
  static constexpr std::uint64_t kSize = 256 * 1024;

  explicit Bounce(Handle& handle);
  ~Bounce();
  Bounce(const Bounce&) = delete;
  Bounce& operator=(const Bounce&) = delete;

  std::byte* data() const { return memory_->data(); }
  const memory::Reference& reference() const { return reference_; }
  /// Waits until nobody has the buffer, and has it. False: interrupted. The counterpart is `give`.
  bool take(const Interrupt& interrupt);
  void give();
  /// What requests that go through the buffer hold of their callers'; for who has it.
  memory::Ledger& ledger() { return ledger_; }

 private:
  std::unique_ptr<memory::HostMemory> memory_;
  memory::Reference reference_{};
  memory::Ledger ledger_;
  std::mutex lock_;
  std::condition_variable given_;
  bool taken_ = false;
};

/// A read or write of any offset, size and memory address. What is aligned is run as it is. A write that is not is
/// refused with EINVAL unless `read_modify_write`; it is not atomic against other writers of the same blocks, except
/// unaligned ones of this handle. Bytes, or -errno with last_error() filled. Thread-safe.
std::int64_t run_any(Handle& handle, const Transfer& transfer, bool read_modify_write, const Interrupt& interrupt = {});

/// Whether `run` would take the transfer as it is.
bool is_aligned_transfer(const Handle& handle, const Transfer& transfer);

}  // namespace ugds::engine
