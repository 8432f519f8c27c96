// SPDX-License-Identifier: Apache-2.0
//
// Text that people write: sizes, times, URIs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ugds {

/// "4096", "64MiB", "1.5GiB", "2GB", "5.5GiB/s" (a trailing "/s" is ignored). Throws Failure(EINVAL) naming `what`:
/// not a number, negative, a fraction of a byte, above 2^63.
std::uint64_t parse_size(const std::string& text, const std::string& what);
/// "20us", "1.5ms", "2s", "100ns", "0". A bare number other than 0 is refused. Nanoseconds.
std::uint64_t parse_duration_ns(const std::string& text, const std::string& what);
/// A decimal number within [low, high].
std::uint64_t parse_number(const std::string& text, const std::string& what, std::uint64_t low, std::uint64_t high);
/// "1", "0", "true", "false", "yes", "no", "on", "off".
bool parse_switch(const std::string& text, const std::string& what);
/// "4 KiB", "1.5 GiB", "513 B".
std::string format_size(std::uint64_t bytes);

/// The member of `known` that is most like `text`, or "" if none is near.
std::string nearest(const std::string& text, const std::vector<std::string>& known);

/// scheme:place?name=value&…, percent-decoded. The scheme is empty where the text is a path: it begins with /, ./ or
/// ../, and is taken as it is.
struct Uri {
  std::string scheme, place;
  std::vector<std::pair<std::string, std::string>> query;
};
/// Throws Failure(EINVAL) for what is not a URI of this form, a parameter without "=", one given twice, and bad
/// percent-encoding, NUL included.
Uri parse_uri(const std::string& text);

/// The text as a string of JSON, in its quotes: all of it UTF-8, and nothing that a terminal obeys or that ends a line.
/// Each byte that is no UTF-8 becomes U+FFFD.
std::string json_text(std::string_view text);

}  // namespace ugds
