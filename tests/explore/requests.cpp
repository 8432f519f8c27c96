// SPDX-License-Identifier: Apache-2.0
//
// Requests, recoveries and closings of one handle, in every order in which the device and the threads can act.
#include <doctest/doctest.h>

#include <cerrno>

#include "handle.hpp"

using namespace ugds;
using namespace ugds::explore;

namespace {

/// Closes a buffer as its owner may at any time, registers it again at the same address, and uses the stale reference.
void close_and_register_again(Opened& open) {
  begin("close A");
  if (open.a().close(&open.device()) == EBUSY) {
    begin("close A when idle");
    open.a().close_when_idle();
    open.check();
    return;
  }
  begin("register A again");
  open.a().add();
  begin("read by the stale reference");
  require(open.read(Way::operation, open.a().stale(), open.a(), 4, 40) < 0, kStale, "a read by it succeeded");
  require(!open.device().touches(open.a().page(4), 4096), kStale, "a command of it was given to the device");
}

/// A read by the registration that there is, if there is one.
void read_a(Opened& open, Way way, std::size_t first, std::uint64_t lba, std::size_t pages = 1) {
  const memory::Reference memory = open.a().reference();
  if (memory) open.read(way, memory, open.a(), first, lba, pages);
}

constexpr Traits kEverything{.errors = 1,
                             .duplicates = 1,
                             .unknown = 1,
                             .bad_heads = 1,
                             .fatal = 1,
                             .removals = 1,
                             .stuck = true,
                             .restarts = 1};

}  // namespace

TEST_CASE("one request and its buffer's end, with a controller that does anything") {
  explore::explore({"one request, closing its buffer", 8}, [] {
    Opened open(kEverything);
    open.run({{"reader",
               [&] {
                 begin("read into A");
                 read_a(open, Way::short_way, 0, 0);
                 begin("read into A again");
                 read_a(open, Way::operation, 1, 8);
               }},
              {"closer", [&] { close_and_register_again(open); }}});
  });
}

TEST_CASE("two requests on one queue and their buffer's end") {
  explore::explore({"two requests, closing their buffer", 8}, [] {
    Opened open({.errors = 0, .stuck = true});
    open.run({{"reader",
               [&] {
                 begin("read into A");
                 read_a(open, Way::operation, 0, 0);
               }},
              {"writer",
               [&] {
                 begin("write from B");
                 open.write(Way::short_way, open.b(), 1, 8);
                 begin("read into A too");
                 read_a(open, Way::short_way, 2, 16);
               }},
              {"closer", [&] { close_and_register_again(open); }}});
  });
}

TEST_CASE("a request of several commands, some of which fail") {
  explore::explore({"a request of three commands", 9}, [] {
    Opened open({.errors = 2, .stuck = true, .mdts = 1}, 4);
    open.run({{"reader",
               [&] {
                 begin("read six pages into A");
                 read_a(open, Way::operation, 0, 0, 6);
               }},
              {"closer", [&] {
                 begin("close A");
                 open.a().close(&open.device());
               }}});
  });
}

TEST_CASE("a caller that goes away") {
  explore::explore({"an interrupted request", 9}, [] {
    Opened open({.errors = 0, .duplicates = 1, .fatal = 1, .stuck = true});
    const engine::Interrupt at_once{[](void*) { return true; }, nullptr};
    open.run({{"reader",
               [&] {
                 begin("read into A, and be interrupted");
                 open.read(Way::operation, open.a().reference(), open.a(), 0, 0, 1, at_once);
                 begin("close A");
                 open.a().close(&open.device());
               }},
              {"other", [&] {
                 begin("read into B");
                 open.read(Way::short_way, open.b().reference(), open.b(), 1, 8);
                 begin("read into B again");
                 open.read(Way::operation, open.b().reference(), open.b(), 2, 16);
               }}});
  });
}
