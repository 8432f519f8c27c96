// SPDX-License-Identifier: Apache-2.0
//
// How the kernel is asked: by io_uring (uring.cpp), or, where that may not be had (a container's seccomp rules, a
// sysctl, an old kernel), by threads with pread and pwrite (workers.cpp). Both are driven by one owner at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "file/request.hpp"

namespace ugds::file {

class Io {
 public:
  virtual ~Io() = default;
  /// "io_uring" or "threads".
  virtual const char* name() const = 0;
  /// Hands a part over, which stays its owner's and unchanged until `take` gives it back. Nothing waits.
  virtual void give(Part& part) noexcept = 0;
  /// Tells the kernel of what was given. It may do some of it there and then.
  virtual void push() noexcept = 0;
  /// One that has been answered (Part::result), or nullptr.
  virtual Part* take() noexcept = 0;
  /// Whether `take` would give one. May be asked by anybody.
  virtual bool has_any() const noexcept = 0;
  /// Asks for a part to be answered soon; it is `take`n all the same, with -ECANCELED if that went well.
  virtual void cancel(Part& part) noexcept = 0;
  /// From now on every answer adds to an eventfd; -1: none does. Throws Failure.
  virtual void tell(int eventfd) = 0;
};

/// Throws Failure: what io_uring_setup says, most often EPERM or ENOSYS. `depth`: parts at once, about.
std::unique_ptr<Io> make_uring(std::uint32_t depth);
/// Throws Failure(EAGAIN) where not one thread may be had.
std::unique_ptr<Io> make_workers();

}  // namespace ugds::file
