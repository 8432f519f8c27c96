// SPDX-License-Identifier: Apache-2.0
#include "base/error.hpp"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace ugds {

void mend_end(char* text, std::size_t size) {
  std::size_t end = std::strlen(text);
  if (end + 1 < size) return;  // not cut
  std::size_t begin = end;
  while (begin != 0 && end - begin < 3 && (static_cast<unsigned char>(text[begin - 1]) & 0xc0) == 0x80) --begin;
  if (begin == 0) return;
  const auto first = static_cast<unsigned char>(text[begin - 1]);
  const std::size_t whole = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc0 ? 2 : 1;
  if (end - (begin - 1) < whole) text[begin - 1] = '\0';
}

namespace {

void print(char* out, std::size_t size, const char* format, va_list arguments) {
  std::vsnprintf(out, size, format, arguments);
  mend_end(out, size);
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

void set_device(Error& error, const char* device) { set_device_text(error.device, device); }

void set_device_text(char (&text)[kDeviceText], const char* device) {
  constexpr char kMore[] = "...";
  const std::size_t length = std::strlen(device);
  if (length < sizeof text) {
    std::memcpy(text, device, length + 1);
    return;
  }
  constexpr std::size_t kKept = sizeof text - sizeof kMore;
  std::memcpy(text, device, kKept);
  text[kKept] = '\0';
  mend_end(text, kKept + 1);
  std::memcpy(text + std::strlen(text), kMore, sizeof kMore);
}

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
