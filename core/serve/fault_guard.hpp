// SPDX-License-Identifier: Apache-2.0
//
// Memory whose file is a client's. If the client cuts the file, touching what is gone raises SIGBUS in the thread that
// does; here a handler then puts zeroed memory of our own in the place of the whole range and the thread goes on. What
// it reads and writes from there on reaches nobody, and the server ends the client.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ugds::serve {

class FaultGuard {
 public:
  /// Guards `bytes` from `start` on, mapped memory of whole pages, until it is destroyed, which must be before the
  /// memory is unmapped. `wake` is an eventfd that is written to when the range is lost. Throws Failure(ENOSPC) where
  /// as many are guarded as can be.
  FaultGuard(void* start, std::size_t bytes, int wake);
  ~FaultGuard();
  FaultGuard(const FaultGuard&) = delete;
  FaultGuard& operator=(const FaultGuard&) = delete;

  bool lost() const;

 private:
  std::size_t slot_;
};

}  // namespace ugds::serve
