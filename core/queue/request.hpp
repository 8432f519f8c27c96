// SPDX-License-Identifier: Apache-2.0
//
// The part of a request that queue pairs know: how many of its commands are in flight, what failed first, and the word
// that its waiter looks at. All but `done` is touched only by the owner of the queue that the request is on.
#pragma once

#include <atomic>
#include <cstdint>

namespace ugds::queue {

/// No command of a request has failed.
inline constexpr std::uint64_t kNoFailure = ~std::uint64_t{0};

struct Request {
  std::atomic<std::uint32_t> done{0};  ///< set last, with release; nothing touches the request after
  std::uint32_t in_flight = 0;
  std::uint64_t failed_at = kNoFailure;  ///< lowest offset in the request at which a command failed
  bool complete_when_idle = false;       ///< every piece has been staged, or no more will be
  bool stopped = false;      ///< that failure was not the device's answer: the controller was reset under it
  std::uint16_t status = 0;  ///< of the failure at the lowest offset
  std::uint32_t result = 0;  ///< dword 0 of the last completion

  bool failed() const { return failed_at != kNoFailure; }
};

}  // namespace ugds::queue
