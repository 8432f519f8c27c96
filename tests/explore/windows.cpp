// SPDX-License-Identifier: Apache-2.0
//
// The windows between threads, at the granularity of their atomic steps, with the store buffers of total store order:
// holding a registration against closing it, owning a queue pair, and whoever submits, reaps or looks around while
// another recovers.
#include <doctest/doctest.h>

#include <cerrno>

#include "base/clock.hpp"
#include "handle.hpp"

using namespace ugds;
using namespace ugds::explore;

namespace {

/// A registration with ledgers, and no device.
class Held : public World {
 public:
  Held() {
    memory::Registry::instance().add_ledger(ledger_);
    buffer_ = std::make_unique<Buffer>(0);
    first_ = buffer_->reference();
  }
  ~Held() override {
    auto& registry = memory::Registry::instance();
    if (buffer_->is_open()) {
      require(registry.in_flight(buffer_->reference()) == 0, kCounts, "a hold is left");
      require(buffer_->close(nullptr) != EBUSY, kNotRefused, "nothing is held");
    }
    registry.remove_ledger(ledger_);
    require(registry.open_registrations() == 0, kReleased, "a registration is left");
  }

  /// Holds the first registration, uses it, and lets go.
  void use(bool shared) {
    const memory::Hold hold = shared ? memory::hold_shared(ledger_, first_) : memory::hold(ledger_, first_);
    if (hold != memory::Hold::held) {
      require(tried_, kHeld, "an open registration was not held");
      return;
    }
    require(!closed_, kStale, "a closed registration was held");
    ++users_;
    // Another thread may try anything meanwhile: also before what this one stored is seen.
    step();
    idle();
    require(!closed_, kHeld, "it was closed under its user");
    --users_;
    if (shared) {
      ledger_.remove_shared(first_.registration->index());
    } else {
      ledger_.remove(first_.registration->index());
    }
  }
  /// Once. Whether it is closed.
  bool close() {
    tried_ = true;
    const int code = memory::Registry::instance().close(first_);
    if (code == EBUSY) return false;
    require(users_ == 0, kHeld, "it was closed under its user");
    closed_ = true;
    buffer_->forget();
    return true;
  }
  void register_again() { buffer_->add(); }
  void close_when_idle() {
    tried_ = true;
    memory::Registry::instance().close_when_idle(first_);
  }
  /// As whatever registers or closes does.
  void look() {
    auto& registry = memory::Registry::instance();
    registry.close({.registration = first_.registration, .generation = ~std::uint64_t{1}});  // of none
    closed_ = closed_ || first_.registration->generation() != first_.generation;
    if (closed_ && buffer_->is_open()) {
      require(users_ == 0, kHeld, "it was closed when idle, under its user");
      buffer_->forget();
    }
  }

 private:
  memory::Ledger ledger_;
  std::unique_ptr<Buffer> buffer_;
  memory::Reference first_;
  int users_ = 0;
  bool tried_ = false, closed_ = false;
};

}  // namespace

TEST_CASE("holding a registration while it is closed and its slot is used again") {
  for (const bool shared : {false, true}) {
    explore::explore({shared ? "hold_shared against close" : "hold against close", 1000, 0}, [shared] {
      Held held;
      run_threads(held,
                  {{"user",
                    [&] {
                      held.use(shared);
                      held.use(shared);
                    }},
                   {"closer",
                    [&] {
                      if (held.close()) held.register_again();
                    }}},
                  {.preemptions = 3});
    });
  }
}

TEST_CASE("holding a registration that is to be closed when idle") {
  explore::explore({"hold against close_when_idle", 1000, 0}, [] {
    Held held;
    run_threads(held,
                {{"user",
                  [&] {
                    held.use(false);
                    held.use(false);
                  }},
                 {"closer",
                  [&] {
                    held.close_when_idle();
                    held.look();
                  }}},
                {.preemptions = 2});
    run_threads(held, {{"the end", [&] { held.look(); }}});
  });
}

TEST_CASE("two threads submit and reap on one queue pair") {
  explore::explore({"two requests on one queue pair", 1000, 0}, [] {
    Opened open({.errors = 0});
    open.run({{"one", [&] { open.read(Way::short_way, open.a().reference(), open.a(), 0, 0); }},
              {"other", [&] { open.read(Way::operation, open.a().reference(), open.a(), 1, 8); }}},
             {.preemptions = 1});
  });
}

TEST_CASE("one thread submits while another closes the buffer") {
  explore::explore({"a request against closing its buffer", 1000, 0}, [] {
    Opened open({.errors = 0});
    open.run({{"reader", [&] { open.read(Way::short_way, open.a().reference(), open.a(), 0, 0); }},
              {"closer", [&] { open.a().close(&open.device()); }}},
             {.preemptions = 2});
  });
}

TEST_CASE("one thread reaps while another recovers") {
  explore::explore({"a request against recovery", 1000, 0}, [] {
    Opened open({.errors = 0, .fatal = 1, .aborts = false, .stuck = true});
    open.run({{"reader", [&] { open.read(Way::short_way, open.a().reference(), open.a(), 0, 0); }},
              {"other",
               [&] {
                 open.handle().check_controller();
                 open.read(Way::operation, open.b().reference(), open.b(), 1, 8);
               }}},
             {.preemptions = 1});
  });
}
