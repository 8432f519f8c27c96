// SPDX-License-Identifier: Apache-2.0
#include "base/error.hpp"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace ugds {

namespace {

void print(char* out, std::size_t size, const char* format, va_list arguments) {
  std::vsnprintf(out, size, format, arguments);
}

}  // namespace

void set_cause(Error& error, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  print(error.cause, sizeof error.cause, format, arguments);
  va_end(arguments);
}

void set_hint(Error& error, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  print(error.hint, sizeof error.hint, format, arguments);
  va_end(arguments);
}

void set_device(Error& error, const char* device) { std::snprintf(error.device, sizeof error.device, "%s", device); }

std::string Error::message() const {
  std::string text = operation;
  if (device[0] != '\0') text += std::string(" on ") + device;
  if (length != 0 || offset != 0) {
    text += " [" + std::to_string(offset) + ", +" + std::to_string(length) + ")";
  }
  text += ": ";
  text += cause[0] != '\0' ? cause : std::strerror(code);
  if (status != kNoStatus) text += std::string(" (NVMe status: ") + status_words + ")";
  if (completed != 0) text += "; " + std::to_string(completed) + " bytes were completed";
  if (hint[0] != '\0') text += std::string("; ") + hint;
  return text;
}

Failure::Failure(Error error) : error_(error), message_(error.message()) {}

void fail(int code, const char* operation, const std::string& cause, const std::string& hint) {
  Error error;
  error.code = code;
  error.operation = operation;
  set_cause(error, "%s", cause.c_str());
  set_hint(error, "%s", hint.c_str());
  throw Failure(error);
}

Error& last_error() {
  thread_local Error error;
  return error;
}

}  // namespace ugds
