// SPDX-License-Identifier: Apache-2.0
#include "base/text.hpp"

#include <doctest/doctest.h>

#include <cerrno>

#include "base/error.hpp"

using namespace ugds;

namespace {

template <class Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (const Failure& f) {
    CHECK(f.error().code == EINVAL);
    return f.error().message();
  }
  return "";
}

}  // namespace

TEST_CASE("text: sizes are exact") {
  const auto size = [](const char* text) { return parse_size(text, "size"); };
  CHECK(size("0") == 0);
  CHECK(size("4096") == 4096);
  CHECK(size("4096B") == 4096);
  CHECK(size("64MiB") == std::uint64_t{64} << 20);
  CHECK(size("1.5GiB") == std::uint64_t{1536} << 20);
  CHECK(size("2GB") == 2'000'000'000);
  CHECK(size("1.1kB") == 1100);
  CHECK(size("4K") == 4096);
  CHECK(size("4 KiB") == 4096);
  CHECK(size("5.5GiB/s") == 5'905'580'032u);
  CHECK(size("9223372036854775808") == std::uint64_t{1} << 63);
  CHECK(size("8EiB") == std::uint64_t{1} << 63);
}

TEST_CASE("text: what is no size is refused by name") {
  for (const char* text : {"", "x", "-1", "1.5", "0.3KiB", "9EiB", "9223372036854775809", "1Q", "1 2", "1KiBx", ".",
                           "1.", "99999999999999999999999999999", "1e3", "0x10", "+1", " 1"}) {
    CAPTURE(text);
    const std::string message = refusal([&] { parse_size(text, "length"); });
    CHECK(message.find("length") != std::string::npos);
  }
}

TEST_CASE("text: durations need their unit") {
  const auto duration = [](const char* text) { return parse_duration_ns(text, "idle"); };
  CHECK(duration("0") == 0);
  CHECK(duration("100ns") == 100);
  CHECK(duration("20us") == 20'000);
  CHECK(duration("1.5ms") == 1'500'000);
  CHECK(duration("2s") == 2'000'000'000);
  for (const char* text : {"5", "", "5m", "1.5ns", "-1s", "us"}) {
    CAPTURE(text);
    CHECK(refusal([&] { duration(text); }).find("idle") != std::string::npos);
  }
}

TEST_CASE("text: numbers and switches") {
  CHECK(parse_number("7", "n", 0, 7) == 7);
  CHECK(parse_number("18446744073709551615", "n", 0, ~std::uint64_t{0}) == ~std::uint64_t{0});
  for (const char* text : {"", "8", "-1", "1.0", "7x", "18446744073709551616"}) {
    CAPTURE(text);
    CHECK(refusal([&] { parse_number(text, "n", 0, 7); }).find("0 to 7") != std::string::npos);
  }
  for (const char* text : {"1", "true", "yes", "on"}) CHECK(parse_switch(text, "s"));
  for (const char* text : {"0", "false", "no", "off"}) CHECK_FALSE(parse_switch(text, "s"));
  CHECK(refusal([] { parse_switch("2", "s"); }) != "");
}

TEST_CASE("text: sizes for people") {
  CHECK(format_size(0) == "0 B");
  CHECK(format_size(513) == "513 B");
  CHECK(format_size(4096) == "4 KiB");
  CHECK(format_size(4097) == "4097 B");
  CHECK(format_size(std::uint64_t{1536} << 20) == "1.5 GiB");
  CHECK(format_size(~std::uint64_t{0}) == "16 EiB");
}

TEST_CASE("text: the nearest name") {
  CHECK(nearest("latencey", {"lba", "latency", "queues"}) == "latency");
  CHECK(nearest("queue", {"lba", "latency", "queues"}) == "queues");
  CHECK(nearest("zzzzzz", {"lba", "latency", "queues"}) == "");
  CHECK(nearest("", {}) == "");
}

TEST_CASE("text: URIs are taken apart and decoded") {
  const Uri uri = parse_uri("emulated:/a%20b/c?lba=512&name=x%26y%3d&empty=");
  CHECK(uri.scheme == "emulated");
  CHECK(uri.place == "/a b/c");
  REQUIRE(uri.query.size() == 3);
  CHECK(uri.query[0] == std::pair<std::string, std::string>("lba", "512"));
  CHECK(uri.query[1] == std::pair<std::string, std::string>("name", "x&y="));
  CHECK(uri.query[2] == std::pair<std::string, std::string>("empty", ""));
  CHECK(parse_uri("pci:0000:65:00.0?ns=2").place == "0000:65:00.0");
  CHECK(parse_uri("emulated:1GiB").query.empty());
  CHECK(parse_uri("emulated:1GiB?").query.empty());
}

TEST_CASE("text: an absolute path is a place without a scheme") {
  const Uri uri = parse_uri("/dev/ugds_drv0%20?fd=7&ns=2");
  CHECK(uri.scheme.empty());
  CHECK(uri.place == "/dev/ugds_drv0 ");
  REQUIRE(uri.query.size() == 2);
  CHECK(uri.query[0] == std::pair<std::string, std::string>("fd", "7"));
}

TEST_CASE("text: a path is taken as it is") {
  for (const char* path : {"/data/a:b%20c?fd=7&x", "./kv.bin", "../a%zz?", "/"}) {
    CAPTURE(path);
    const Uri uri = parse_uri(path);
    CHECK(uri.scheme.empty());
    CHECK(uri.place == path);
    CHECK(uri.query.empty());
  }
  CHECK(refusal([] { parse_uri(std::string("/a\0b", 4)); }) != "");
}

TEST_CASE("text: what is no URI is refused") {
  for (const char* text : {"", "1GiB", ":x", "a b:x", "e:x?novalue", "e:x?=v", "e:x?a=1&a=2", "e:x?a=%", "e:x?a=%zz",
                           "e:x?a=%0", "e:%00", "e:x?a=1&&b=2"}) {
    CAPTURE(text);
    CHECK(refusal([&] { parse_uri(text); }) != "");
  }
}
