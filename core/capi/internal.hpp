// SPDX-License-Identifier: Apache-2.0
//
// What the parts of the C API share: errors to codes, arguments to the engine.
#pragma once

#include <cerrno>
#include <cstdint>
#include <new>
#include <string>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "engine/table.hpp"
#include "memory/registry.hpp"
#include "ugds.h"

namespace ugds::capi {

inline int code_of(int error) {
  switch (error) {
    case 0: return UGDS_SUCCESS;
    case ENOMEM:
    case ENOBUFS: return UGDS_OUT_OF_MEMORY;  // to stage through
    case EBUSY:
    case EAGAIN: return UGDS_BUSY;  // for now
    case EEXIST: return UGDS_MEMORY_ALREADY_REGISTERED;
    case ESTALE: return UGDS_MEMORY_NOT_REGISTERED;
    case EBADF: return UGDS_HANDLE_NOT_REGISTERED;
    case ENODEV: return UGDS_DEVICE_LOST;
    case ENOENT:
    case ENXIO: return UGDS_DEVICE_NOT_FOUND;
    case ETIMEDOUT: return UGDS_TIMED_OUT;
    case EACCES:
    case EPERM: return UGDS_PERMISSION_DENIED;
    case EFAULT: return UGDS_MEMORY_PINNING_FAILED;
    case EOPNOTSUPP: return UGDS_IO_NOT_SUPPORTED;
    case EINVAL:
    case ERANGE: return UGDS_INVALID_VALUE;
    default: return UGDS_INTERNAL_ERROR;
  }
}

inline uGDSError_t answer(int code) { return {code, 0}; }

inline uGDSError_t refuse(const char* operation, int code, int error, const char* cause, const char* hint = "") {
  Error& e = last_error() = Error{};
  e.operation = operation;
  e.code = error;
  set_cause(e, "%s", cause);
  set_hint(e, "%s", hint);
  return answer(code);
}

/// UGDS_BUSY, with what holds the thing.
inline uGDSError_t refuse_busy(const char* operation, const std::string& held, const char* hint) {
  return refuse(operation, UGDS_BUSY, EBUSY, held.c_str(), hint);
}

/// In a child of a fork the sentence says what may be behind it: nothing from before is the child's.
inline const char* unless_forked(const char* cause, const char* in_child) {
  return fork_generation() != 0 ? in_child : cause;
}

/// No buffer is registered at an address.
inline uGDSError_t refuse_unregistered(const char* operation, const char* hint = "") {
  return refuse(operation, UGDS_MEMORY_NOT_REGISTERED, EINVAL,
                unless_forked("no buffer is registered at this address",
                              "no buffer is registered at this address in this process, a child of a fork: what was "
                              "registered before is the parent's"),
                hint);
}

inline uGDSError_t unsupported(const char* operation) {
  return refuse(operation, UGDS_IO_NOT_SUPPORTED, EOPNOTSUPP, "not supported by this release");
}

/// Runs set-up code; what it throws becomes last_error() and a code.
template <class Body>
uGDSError_t guarded(const char* operation, Body&& body) {
  try {
    return body();
  } catch (const Failure& failure) {
    last_error() = failure.error();
    return answer(code_of(failure.error().code));
  } catch (const std::bad_alloc&) {
    return refuse(operation, UGDS_OUT_OF_MEMORY, ENOMEM, "out of memory");
  } catch (...) {
    return refuse(operation, UGDS_INTERNAL_ERROR, EIO, "an unexpected exception");
  }
}

inline engine::HandleId id_of(uGDSHandle_t fh) { return reinterpret_cast<std::uintptr_t>(fh); }

/// In the words of the engine: an interior pointer becomes a place in its registration. What is not registered stays
/// empty, and the engine says so.
inline std::uint64_t place_in(const memory::Reference& buffer, const void* buf, off_t buf_offset) {
  return reinterpret_cast<std::uintptr_t>(buf) - buffer.address + static_cast<std::uint64_t>(buf_offset);
}

}  // namespace ugds::capi
