// SPDX-License-Identifier: Apache-2.0
//
// One convention for errors: `code` is a positive errno, the NVMe status stands beside it, and every error names the
// operation, the device, the byte range, the cause and what to do.
//
// Set-up code throws `Failure` and is undone by RAII. The I/O path never throws: it returns a byte count or -errno and
// leaves the details in `last_error()` of the calling thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>

namespace ugds {

/// No NVMe status belongs to an error.
inline constexpr std::uint16_t kNoStatus = 0xffff;

/// Bytes that errors and events have for a device's URI, with the closing NUL.
inline constexpr std::size_t kDeviceText = 256;

struct Error {
  int code = 0;                      ///< a positive errno; 0 is success
  std::uint16_t status = kNoStatus;  ///< NVMe status: type in bits 10:8, code in bits 7:0
  char status_words[72] = "";        ///< the same in words
  const char* operation = "";        ///< a static string: "read", "open", "register", ...
  char device[kDeviceText] = "";     ///< the URI; a longer one is cut, and ends in "..."
  std::uint64_t offset = 0;          ///< first byte on the device, or in the buffer for registrations
  std::uint64_t length = 0;          ///< bytes asked for
  std::uint64_t completed = 0;       ///< the contiguous prefix, in bytes, that is right
  char cause[240] = "";              ///< what went wrong
  char hint[240] = "";               ///< what to do about it

  /// One sentence for people, with everything that is known.
  std::string message() const;
};

/// Fills `error.cause` and `error.hint` by printf rules, cutting what does not fit. Never throws or allocates.
void set_cause(Error& error, const char* format, ...) __attribute__((format(printf, 2, 3)));
void set_hint(Error& error, const char* format, ...) __attribute__((format(printf, 2, 3)));
void set_device(Error& error, const char* device);
/// Takes away what a cut has left of a UTF-8 character at the end, where text fills its place of `size` bytes.
void mend_end(char* text, std::size_t size);
/// The same for whatever has such a text.
void set_device_text(char (&text)[kDeviceText], const char* device);

/// What set-up code throws. Caught at the C API and by the Python binding, never let through them.
class Failure : public std::exception {
 public:
  explicit Failure(Error error);
  const Error& error() const { return error_; }
  Error& error() { return error_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  Error error_;
  std::string message_;
};

/// Throws a Failure. `hint` may be empty.
[[noreturn]] void fail(int code, const char* operation, const std::string& cause, const std::string& hint = "");

/// The calling thread's last error, as written by the I/O path and by the C API.
Error& last_error();

}  // namespace ugds
