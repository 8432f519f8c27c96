// SPDX-License-Identifier: Apache-2.0
//
// Registered memory, and memory that was not: requests may be on any.
#pragma once

#include <cstddef>
#include <cstdint>

#include "capi/cufile/abi.h"
#include "memory/registry.hpp"

namespace ugds::cufile {

/// Where the memory of one request lies, for as long as this lives.
class RequestMemory {
 public:
  enum class Kind : std::uint8_t {
    registered,  ///< by the program, or for this request alone
    plain,       ///< the processor's: what is not registered, and managed memory
    beyond,      ///< more than the GPU's allocation has
  };

  /// Of the `size` bytes at `base` + `offset`, for a device by the engine's number. Throws Failure.
  RequestMemory(std::uintptr_t base, std::uint64_t offset, std::size_t size, bool write, std::uint32_t device);
  ~RequestMemory();
  RequestMemory(const RequestMemory&) = delete;
  RequestMemory& operator=(const RequestMemory&) = delete;

  Kind kind() const { return kind_; }
  /// Of Kind::registered: the registration, and where the request begins in it.
  const memory::Reference& reference() const { return reference_; }
  std::uint64_t offset() const { return at_ - reference_.address; }

 private:
  std::uintptr_t at_;
  memory::Reference reference_{};
  Kind kind_ = Kind::registered;
  bool is_ours_ = false;
};

/// The GPU whose memory a registration is of; -1 where it is none's.
int gpu_of(const memory::Reference& reference);

/// What the program registered. False: a request runs on some of it for longer than a request may; it stays registered.
bool close_all_buffers();

}  // namespace ugds::cufile
