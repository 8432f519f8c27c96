// SPDX-License-Identifier: Apache-2.0
//
// The devices that the threads share: each is closed and opened again under them, breaks, loses its power, and keeps
// its data over all that.
#pragma once

#include <array>
#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <random>
#include <string>

#include "engine/table.hpp"
#include "engine_gpu_host.hpp"

namespace soak_test {

using namespace gpu_test;
using emulator::Fault;
using engine::Table;

/// What happened, over all threads. Errors by their number.
struct Figures {
  std::atomic<std::uint64_t> operations{0}, faults{0}, resets{0}, aborts{0}, closes{0}, closes_refused{0}, forced{0},
      power_cuts{0}, deregistrations{0}, deregistrations_refused{0}, cancels{0}, abandoned{0}, streams{0},
      uncollected{0};
  std::array<std::atomic<std::uint64_t>, 256> errors{};
};

class Devices {
 public:
  static constexpr unsigned kCount = 3;
  /// Long for a busy machine to do a command in, and short for a million requests of which many wait for it.
  static constexpr std::uint64_t kDeadline = 25'000'000;

  Devices(Figures& figures, std::uint64_t seed) : figures_(figures), random_(seed) {
    for (unsigned i = 0; i < kCount; ++i) open(i);
  }
  ~Devices() {
    for (unsigned i = 0; i < kCount; ++i) {
      for (int tries = 0; !reopen(i, false); ++tries) REQUIRE(tries < 100);
      CHECK(emulator::forget_subsystem(name(i)));
    }
  }
  Devices(const Devices&) = delete;

  engine::HandleId current(unsigned number) const { return all_[number].id.load(std::memory_order_acquire); }

  /// Closes a device and opens it again, in another mode. False: it is in use, and stays.
  bool reopen(unsigned number, bool again = true) {
    One& one = all_[number];
    const std::unique_lock lock(one.lock, std::try_to_lock);
    if (!lock) return false;
    const engine::HandleId id = one.id;
    bool wedged = false;
    {
      const Table::Use use(Table::instance(), id);
      if (!use) return false;  // it could not be opened again
      wedged = use->state() == State::wedged;
      if (wedged || !again) controller_of(*use).clear_faults();
      for (const auto& violation : controller_of(*use).violations()) {
        FAIL_CHECK(violation.rule << ": " << violation.what);
      }
      controller_of(*use).clear_violations();
    }
    const auto counters = counters_of(id);
    const int code = Table::instance().close(id, wedged ? Table::Mode::force : Table::Mode::bounded, 300'000'000);
    if (code != 0) {
      if (code != EBUSY) FAIL_CHECK("closing a device gave " << code);
      ++figures_.closes_refused;
      return false;
    }
    figures_.resets += counters.resets;
    figures_.aborts += counters.aborts;
    ++(wedged ? figures_.forced : figures_.closes);
    if (Table::instance().close(id, Table::Mode::check) != ESTALE) FAIL_CHECK("a closed device was closed again");
    if (again) open(number);
    return true;
  }

  /// Takes the power away from whoever has it open.
  void cut_power(unsigned number, engine::Handle& handle, std::uint64_t seed) {
    One& one = all_[number];
    const std::unique_lock lock(one.lock, std::try_to_lock);
    if (!lock) return;
    one.cuts.fetch_add(1, std::memory_order_seq_cst);
    controller_of(handle).power_cut(0.3, seed);
    one.cuts.fetch_add(1, std::memory_order_seq_cst);
    ++figures_.power_cuts;
  }
  /// Has a device wedged by what `request` asks of it, unless it is being closed.
  template <class Request>
  void wedge(unsigned number, engine::Handle& handle, Request&& request) {
    const std::unique_lock lock(all_[number].lock, std::try_to_lock);
    if (!lock) return;
    Fault fault;
    fault.abortable = false;
    for (const auto kind : {Fault::Kind::late_write, Fault::Kind::never_stopped, Fault::Kind::reset_fails}) {
      fault.kind = kind;
      controller_of(handle).inject(fault);
    }
    ++figures_.faults;
    request();
    controller_of(handle).clear_faults();  // one that has failed to stop by then cannot be closed but by force
  }

  /// Grows with every power cut. While one goes on it waits: what was asked before has been decided then.
  std::uint64_t power_cuts(unsigned number) const {
    for (;;) {
      const std::uint64_t cuts = all_[number].cuts.load(std::memory_order_seq_cst);
      if (cuts % 2 == 0) return cuts;
      std::this_thread::yield();
    }
  }

 private:
  struct One {
    std::atomic<engine::HandleId> id{0};
    std::atomic<std::uint64_t> cuts{0};
    std::mutex lock;
  };

  static std::string name(unsigned number) { return "soak" + std::to_string(number); }

  static emulator::Counters counters_of(engine::HandleId id) {
    const Table::Use use(Table::instance(), id);
    return use ? controller_of(*use).counters() : emulator::Counters{};
  }

  void open(unsigned number) {
    std::unique_lock lock(random_lock_);
    const auto pick = [&](auto... of) {
      const std::common_type_t<decltype(of)...> all[] = {of...};
      return all[random_() % sizeof...(of)];
    };
    const char* order = pick("fifo", "reverse", "random");
    std::string uri = "emulated:4MiB?timeout=1&name=" + name(number) + "&mdts=" + pick("2", "3", "5") +
                      "&order=" + order + "&seed=" + std::to_string(random_() % 1000) + "&ready=" + pick("0", "1ms");
    if (number == 0) uri += "&pump=caller";
    if (number == 1) uri += "&doorbells=trapped&slots=6&burst=2";
    Policy policy;
    policy.mode = pick("latency", "throughput", "priority", "adaptive");
    policy.queues = pick(1u, 2u, 4u);
    policy.depth = pick(2u, 8u, 32u, 64u);
    policy.deadline_ns = kDeadline;
    policy.interrupts = number != 0 && pick(true, false) ? engine::Interrupts::yes : engine::Interrupts::no;
    lock.unlock();
    all_[number].id.store(Table::instance().open(uri, policy), std::memory_order_release);
  }

  Figures& figures_;
  std::mutex random_lock_;
  std::mt19937_64 random_;
  std::array<One, kCount> all_;
};

/// One of the faults that a controller may have: most are errors, some need a reset, few do not end by one.
inline void inject_any(emulator::Controller& controller, std::mt19937_64& random, Figures& figures) {
  Fault fault;
  fault.skip = random() % 20;
  const auto roll = random() % 1000;
  fault.abortable = random() % 3 != 0;
  if (roll < 520) {
    const std::uint16_t some[] = {nvme::status::unrecovered_read_error, nvme::status::write_fault,
                                  nvme::status::internal_error, nvme::status::data_transfer_error};
    fault.status = some[random() % std::size(some)];
  } else if (roll < 640) {
    fault.kind = Fault::Kind::late;
    fault.delay_ns = random() % 40'000'000;
  } else if (roll < 700) {
    fault.kind = Fault::Kind::hang;
  } else if (roll < 760) {
    fault.kind = Fault::Kind::late_write;
  } else if (roll < 800) {
    fault.kind = Fault::Kind::duplicate;
  } else if (roll < 840) {
    fault.kind = Fault::Kind::unknown_id;
  } else if (roll < 880) {
    fault.kind = Fault::Kind::wrong_sq_head;
  } else if (roll < 920) {
    fault.kind = Fault::Kind::fatal;
  } else if (roll < 980) {
    fault.kind = Fault::Kind::lost_interrupt;
  } else if (roll < 996) {
    fault.kind = Fault::Kind::remove;
  } else {
    // It hangs, and stops by a reset of the function only; or it does not start again.
    fault.kind = Fault::Kind::hang;
    fault.abortable = false;
    Fault more;
    more.kind = roll < 998 ? Fault::Kind::never_stopped : Fault::Kind::never_ready;
    controller.inject(more);
  }
  controller.inject(fault);
  ++figures.faults;
}

}  // namespace soak_test
