// SPDX-License-Identifier: Apache-2.0
//
// Memory of a client's that the controller reaches: mapped here from the client's descriptor, and known to the
// controller under the client's IOVAs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "base/descriptor.hpp"
#include "emulator/controller.hpp"
#include "serve/fault_guard.hpp"
#include "vfio_user/protocol.hpp"

namespace ugds::serve {

/// One range, mapped into this process.
class ClientRange {
 public:
  /// Throws Failure: EINVAL for what is no memory or does not reach that far, and whatever mmap says.
  ClientRange(const Descriptor& file, const vfio_user::DmaMap& request, int wake);
  ~ClientRange();
  ClientRange(const ClientRange&) = delete;
  ClientRange& operator=(const ClientRange&) = delete;

  std::byte* data() const { return data_; }
  std::uint64_t size() const { return size_; }
  /// The client has cut the file, and this is memory of nobody's now.
  bool lost() const { return guard_->lost(); }

 private:
  std::byte* mapped_ = nullptr;
  std::uint64_t mapped_bytes_ = 0;
  std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
  std::unique_ptr<FaultGuard> guard_;
};

class ClientMemory {
 public:
  /// As many as a client may have; half of what a process can map.
  static constexpr std::uint32_t kMostRanges = 16384;

  /// `wake` is written to when a range is lost.
  ClientMemory(emulator::Controller& controller, int wake) : controller_(controller), wake_(wake) {}
  ~ClientMemory() { clear(); }
  ClientMemory(const ClientMemory&) = delete;
  ClientMemory& operator=(const ClientMemory&) = delete;

  /// Throws Failure: EEXIST for an overlap, ENOSPC for too many, and what ClientRange throws.
  void map(const vfio_user::DmaMap& request, const Descriptor& file);
  /// When it returns, nothing touches the memory any more. Throws Failure(ENOENT) for what is not exactly one range.
  void unmap(std::uint64_t iova, std::uint64_t size);
  void clear() noexcept;
  bool lost() const;

 private:
  emulator::Controller& controller_;
  int wake_;
  std::map<std::uint64_t, ClientRange> ranges_;
};

}  // namespace ugds::serve
