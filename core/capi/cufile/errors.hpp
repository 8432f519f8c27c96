// SPDX-License-Identifier: Apache-2.0
//
// From the library's errors to cuFile's: a code of its own where it has one, else an errno.
#pragma once

#include <cerrno>
#include <cstdint>
#include <new>

#include "base/error.hpp"
#include "capi/cufile/abi.h"

namespace ugds::cufile {

/// What a transfer gives: bytes, or -errno, or minus a code of cuFile's. The words are in last_error().
using Moved = std::int64_t;

inline constexpr Moved kLeastCode = -5000;  ///< below it a Moved is minus a code

inline CUfileError_t answer(int code) { return {code, 0}; }

/// The code for a call that has no room for an errno.
inline int code_of(int error) {
  switch (error) {
    case 0: return CU_FILE_SUCCESS;
    case EINVAL:
    case ERANGE: return CU_FILE_INVALID_VALUE;
    case EEXIST: return CU_FILE_MEMORY_ALREADY_REGISTERED;
    case ESTALE: return CU_FILE_MEMORY_NOT_REGISTERED;
    case EBADF: return CU_FILE_HANDLE_NOT_REGISTERED;
    case EACCES:
    case EPERM: return CU_FILE_PERMISSION_DENIED;
    case ENOMEM:
    case ENOBUFS: return CU_FILE_NOMEM_ERROR;
    case EFAULT: return CU_FILE_GPU_MEMORY_PINNING_FAILED;
    case EOPNOTSUPP: return CU_FILE_IO_NOT_SUPPORTED;
    case EMFILE:
    case ENFILE: return CU_FILE_GETNEWFD_FAILED;
    case EIO: return CU_FILE_IO_ERROR;
    default: return CU_FILE_INTERNAL_ERROR;
  }
}

inline void explain(const char* operation, int error, const char* cause, const char* hint = "") {
  Error& e = last_error() = Error{};
  e.operation = operation;
  e.code = error;
  set_cause(e, "%s", cause);
  set_hint(e, "%s", hint);
}

inline CUfileError_t refuse(const char* operation, int code, const char* cause, const char* hint = "") {
  explain(operation, EINVAL, cause, hint);
  return answer(code);
}

inline Moved refuse_moved(const char* operation, int code, const char* cause, const char* hint = "") {
  explain(operation, EINVAL, cause, hint);
  return -code;
}

/// Runs what may throw; nothing leaves it but a code.
template <class Body>
CUfileError_t guarded(const char* operation, Body&& body) {
  try {
    return body();
  } catch (const Failure& failure) {
    last_error() = failure.error();
    return answer(code_of(failure.error().code));
  } catch (const std::bad_alloc&) {
    return refuse(operation, CU_FILE_NOMEM_ERROR, "out of memory");
  } catch (...) {
    return refuse(operation, CU_FILE_INTERNAL_ERROR, "an unexpected exception");
  }
}

/// The same for what gives bytes.
template <class Body>
Moved guarded_moved(const char* operation, Body&& body) {
  try {
    return body();
  } catch (const Failure& failure) {
    last_error() = failure.error();
    return -failure.error().code;
  } catch (const std::bad_alloc&) {
    explain(operation, ENOMEM, "out of memory");
    return -ENOMEM;
  } catch (...) {
    explain(operation, EIO, "an unexpected exception");
    return -EIO;
  }
}

/// As cuFileRead returns it: -1 with errno set for what the file system or the device said.
inline ssize_t returned(Moved moved) {
  if (moved >= 0 || moved < kLeastCode) return moved;
  errno = static_cast<int>(-moved);
  return -1;
}

}  // namespace ugds::cufile
