// SPDX-License-Identifier: Apache-2.0
#include "base/text.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "base/error.hpp"

namespace ugds {

namespace {

__extension__ using Wide = unsigned __int128;

[[noreturn]] void refuse(const std::string& what, const std::string& text, const std::string& why,
                         const std::string& hint) {
  fail(EINVAL, "parse", what + " \"" + text + "\": " + why, hint);
}

bool digit(char c) { return c >= '0' && c <= '9'; }

/// A decimal number with an optional fraction, times `unit(suffix)`, exactly. `unit` gives 0 for a suffix it does not
/// know.
template <class Unit>
std::uint64_t parse_scaled(const std::string& text, const std::string& what, const std::string& fraction_of,
                           const std::string& hint, Unit&& unit) {
  constexpr Wide kLimit = Wide{1} << 63;
  std::size_t i = 0;
  if (!text.empty() && text[0] == '-') refuse(what, text, "negative", hint);
  Wide number = 0, scale = 1;
  std::size_t digits = 0;
  bool fraction = false;
  for (; i < text.size(); ++i) {
    if (text[i] == '.' && !fraction) {
      fraction = true;
    } else if (digit(text[i])) {
      number = number * 10 + static_cast<unsigned>(text[i] - '0');
      if (fraction) scale *= 10;
      if (++digits > 25) refuse(what, text, "too many digits", hint);
    } else {
      break;
    }
  }
  if (digits == 0 || text[i - 1] == '.') refuse(what, text, "not a number", hint);
  while (i < text.size() && text[i] == ' ') ++i;
  const std::uint64_t factor = unit(text.substr(i));
  if (factor == 0) refuse(what, text, "unknown unit \"" + text.substr(i) + "\"", hint);
  // 25 digits and a factor below 2^61 could pass 2^128; what is too large for its scale is refused before the product.
  if (number / scale > kLimit) refuse(what, text, "above 2^63", hint);
  while (scale > 1 && number % 10 == 0) {
    number /= 10;
    scale /= 10;
  }
  if (number > (~Wide{0}) / factor) refuse(what, text, "too many digits", hint);
  const Wide product = number * factor;
  if (product % scale != 0) refuse(what, text, "a fraction of " + fraction_of, hint);
  if (product / scale > kLimit) refuse(what, text, "above 2^63", hint);
  return static_cast<std::uint64_t>(product / scale);
}

std::uint64_t size_unit(std::string suffix) {
  if (suffix.ends_with("/s")) suffix.resize(suffix.size() - 2);
  if (suffix.empty() || suffix == "B") return 1;
  static constexpr char kLetters[] = {'K', 'M', 'G', 'T', 'P', 'E'};
  const char letter = suffix[0] == 'k' ? 'K' : suffix[0];
  const std::string rest = suffix.substr(1);
  std::uint64_t binary = 1, decimal = 1;
  for (const char known : kLetters) {
    binary <<= 10;
    decimal *= 1000;
    if (known != letter) continue;
    if (rest.empty() || rest == "i" || rest == "iB") return binary;
    if (rest == "B") return decimal;
  }
  return 0;
}

std::uint64_t time_unit(const std::string& suffix) {
  if (suffix == "ns") return 1;
  if (suffix == "us") return 1000;
  if (suffix == "ms") return 1'000'000;
  if (suffix == "s") return 1'000'000'000;
  return 0;
}

int hex(char c) {
  if (digit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

std::string decode(const std::string& in, const std::string& whole) {
  std::string out;
  for (std::size_t i = 0; i < in.size(); ++i) {
    char c = in[i];
    if (c == '%') {
      const int high = i + 1 < in.size() ? hex(in[i + 1]) : -1;
      const int low = i + 2 < in.size() ? hex(in[i + 2]) : -1;
      if (high < 0 || low < 0)
        refuse("URI", whole, "\"%\" is not followed by two hexadecimal digits", "write % as %25");
      c = static_cast<char>(high << 4 | low);
      i += 2;
    }
    if (c == '\0') refuse("URI", whole, "holds a NUL", "");
    out += c;
  }
  return out;
}

}  // namespace

std::uint64_t parse_size(const std::string& text, const std::string& what) {
  return parse_scaled(text, what, "a byte", "write a size such as 4096, 64MiB or 1.5GiB", size_unit);
}

std::uint64_t parse_duration_ns(const std::string& text, const std::string& what) {
  if (text == "0") return 0;
  return parse_scaled(text, what, "a nanosecond", "write a time with its unit, such as 100ns, 20us, 1.5ms or 2s",
                      time_unit);
}

std::uint64_t parse_number(const std::string& text, const std::string& what, std::uint64_t low, std::uint64_t high) {
  const std::string hint = "accepted: " + std::to_string(low) + " to " + std::to_string(high);
  std::uint64_t number = 0;
  if (text.empty()) refuse(what, text, "not a number", hint);
  for (const char c : text) {
    if (!digit(c)) refuse(what, text, "not a decimal number", hint);
    const std::uint64_t next = static_cast<std::uint64_t>(c - '0');
    if (number > (~std::uint64_t{0} - next) / 10) refuse(what, text, "out of range", hint);
    number = number * 10 + next;
  }
  if (number < low || number > high) refuse(what, text, "out of range", hint);
  return number;
}

bool parse_switch(const std::string& text, const std::string& what) {
  for (const char* yes : {"1", "true", "yes", "on"})
    if (text == yes) return true;
  for (const char* no : {"0", "false", "no", "off"})
    if (text == no) return false;
  refuse(what, text, "not a switch", "accepted: 1, 0, true, false, yes, no, on, off");
}

std::string format_size(std::uint64_t bytes) {
  static constexpr std::array<const char*, 7> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  std::size_t unit = 0;
  while (unit + 1 < kUnits.size() && bytes >> (10 * (unit + 1)) != 0) ++unit;
  // Small sizes stand in messages about alignment, where a rounded figure would mislead.
  if (unit == 1 && bytes * 100 % 1024 != 0) unit = 0;
  const double value = static_cast<double>(bytes) / static_cast<double>(std::uint64_t{1} << (10 * unit));
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value);
  std::string number = text;
  number.erase(number.find_last_not_of('0') + 1);
  if (number.back() == '.') number.pop_back();
  return number + ' ' + kUnits[unit];
}

std::string nearest(const std::string& text, const std::vector<std::string>& known) {
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(1, text.size() / 3) + 1;
  std::vector<std::size_t> row;
  for (const std::string& candidate : known) {
    row.resize(candidate.size() + 1);
    for (std::size_t j = 0; j < row.size(); ++j) row[j] = j;
    for (std::size_t i = 0; i < text.size(); ++i) {
      std::size_t diagonal = std::exchange(row[0], i + 1);
      for (std::size_t j = 0; j < candidate.size(); ++j) {
        const std::size_t change = diagonal + (text[i] == candidate[j] ? 0 : 1);
        diagonal = row[j + 1];
        row[j + 1] = std::min({change, row[j] + 1, diagonal + 1});
      }
    }
    if (row.back() < best_distance) {
      best_distance = row.back();
      best = candidate;
    }
  }
  return best;
}

Uri parse_uri(const std::string& text) {
  // What begins as a path does is one, to its last character; but a node of ugds_drv's may have parameters.
  const bool is_node = text.starts_with("/dev/ugds_drv");
  const bool is_path = text.starts_with("/") || text.starts_with("./") || text.starts_with("../");
  if (is_path && !is_node) {
    if (text.find('\0') != std::string::npos) refuse("URI", text.c_str(), "has a NUL in it", "");
    return {.scheme = "", .place = text, .query = {}};
  }
  const std::size_t colon = is_path ? std::string::npos : text.find(':');
  const char* form =
      "write scheme:place?name=value, such as emulated:1GiB, emulated:/path/to/image or pci:0000:65:00.0, or a path: "
      "/data/kv.bin, ./kv.bin";
  if (!is_path && (colon == std::string::npos || colon == 0)) refuse("URI", text, "has no scheme", form);
  Uri uri;
  if (!is_path) uri.scheme = text.substr(0, colon);
  for (const char c : uri.scheme) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (!letter && !digit(c) && c != '+' && c != '-' && c != '.' && c != '_')
      refuse("URI", text, "has no scheme", form);
  }
  const std::size_t begin = is_path ? 0 : colon + 1;
  const std::size_t question = text.find('?', begin);
  uri.place = decode(text.substr(begin, question == std::string::npos ? question : question - begin), text);
  if (question == std::string::npos) return uri;
  std::size_t at = question + 1;
  while (at <= text.size()) {
    const std::size_t end = std::min(text.find('&', at), text.size());
    const std::string item = text.substr(at, end - at);
    at = end + 1;
    if (item.empty() && end == text.size()) break;  // "?" or "&" at the end
    const std::size_t equals = item.find('=');
    if (equals == std::string::npos || equals == 0)
      refuse("URI", text, "parameter \"" + item + "\" is not name=value", form);
    const std::string name = decode(item.substr(0, equals), text);
    for (const auto& [other, value] : uri.query)
      if (other == name) refuse("URI", text, "parameter \"" + name + "\" is given twice", "");
    uri.query.emplace_back(name, decode(item.substr(equals + 1), text));
  }
  return uri;
}

namespace {

/// The UTF-8 character at the start of the text: its bytes, and its number. No bytes: there is none.
std::pair<std::size_t, std::uint32_t> character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint32_t>(static_cast<unsigned char>(text[i])); };
  const std::uint32_t first = byte(0);
  if (first < 0x80) return {1, first};
  const std::size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || size > text.size()) return {};
  std::uint32_t number = first & (0x7fu >> size);
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    number = number << 6 | (byte(i) & 0x3f);
  }
  static constexpr std::uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  if (number < kLeast[size] || number > 0x10ffff || (number >= 0xd800 && number < 0xe000)) return {};
  return {size, number};
}

}  // namespace

std::string json_text(std::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const auto [size, number] = character(text);
    // What a terminal obeys, what some end a line at, and what is no text.
    const bool escaped =
        size == 0 || number < 0x20 || (number >= 0x7f && number < 0xa0) || number == 0x2028 || number == 0x2029;
    if (escaped) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", size == 0 ? 0xfffd : number);
      out += code;
    } else {
      if (number == '"' || number == '\\') out += '\\';
      out += text.substr(0, size);
    }
    text.remove_prefix(std::max<std::size_t>(size, 1));
  }
  return out += '"';
}

}  // namespace ugds
