// SPDX-License-Identifier: Apache-2.0
//
// When a command is overdue, or the controller fails. The order is what keeps memory safe: stop submitting; abort; if
// the abort is not confirmed, stop the controller; only when it is known to have stopped are the commands retired and
// their memory released. If nothing stops it, the handle is wedged and what it may still write to stays held.
#include <algorithm>
#include <cstdio>

#include "base/clock.hpp"
#include "engine/handle.hpp"
#include "engine/idle.hpp"
#include "nvme/status.hpp"

namespace ugds::engine {

namespace {

/// How long an Abort may take, and then the command that it aborted.
constexpr std::uint64_t kAbortDeadline = 500'000'000;
constexpr std::uint64_t kAbortedGrace = 100'000'000;
/// How long the system, which waits for the device, waits for the commands that it still executes.
constexpr std::uint64_t kLastWords = 2'000'000'000;
/// How often a start is tried while the system goes on stopping the device.
constexpr int kRestarts = 8;
/// "Command aborted by host", which no device sends.
constexpr std::uint16_t kAbortedByHost = nvme::make_status(nvme::StatusType::path, 0x71);

}  // namespace

void Handle::set_state(State state, const char* why) {
  {
    std::lock_guard guard(why_lock_);
    why_ = why;
  }
  state_.store(state, std::memory_order_seq_cst);
}

void Handle::acquire(queue::QueuePair& pair) {
  // Owners hold a queue pair only for a bounded moment, so this ends.
  Idle idle;
  while (!pair.try_acquire()) idle.pause(turn_);
}

void Handle::acquire_all() {
  for (auto& pair : queues_) acquire(*pair);
}

void Handle::release_all() {
  for (auto& pair : queues_) pair->release();
}

void Handle::retire_all(std::uint16_t status) {
  for (auto& pair : queues_) {
    pair->restart(status, controller_->submission_doorbell(pair->id()), controller_->completion_doorbell(pair->id()));
  }
}

void Handle::check_controller() {
  const nvme::ControllerStatus status = controller_->status();
  if (status.gone() && controller_->gone()) return lose();
  if (status.fatal() && state() == State::ready)
    return recover_broken("the controller reports a fatal status (CSTS.CFS)");
  // Somebody else reset it, or its power was away: what it was given is forgotten, and nothing will complete.
  if (!status.ready() && state() == State::ready)
    return recover_broken("the controller is not ready any more (CSTS.RDY)");
  for (auto& pair : queues_) {
    if (pair->distrusted() && state() == State::ready) {
      return recover_broken("the controller posted a completion that no command was waiting for");
    }
  }
}

void Handle::reap_all() {
  for (auto& pair : queues_) {
    if (!pair->try_acquire()) continue;
    pair->reap();
    pair->release();
  }
}

void Handle::lose() {
  std::lock_guard guard(recovery_lock_);
  if (state() == State::lost) return;
  // A device that has gone from the bus can reach no memory.
  set_state(State::lost, device_->gone().cause);
  acquire_all();
  retire_all(kAbortedByHost);
  release_all();
}

void Handle::give_back() {
  std::lock_guard guard(recovery_lock_);
  if (state() == State::lost) return;
  set_state(State::recovering, "the system asks for the device");
  acquire_all();
  release_all();  // as below: nobody is submitting now
  Idle idle;
  const std::uint64_t start = monotonic_ns();
  while (in_flight() != 0 && monotonic_ns() - start < kLastWords && !controller_->gone()) {
    reap_all();
    idle.pause(turn_);
  }
  acquire_all();
  const bool stopped = controller_->shut_down();
  if (device_->release() || stopped) {  // no DMA follows, whatever the controller did
    set_state(State::lost, "the system took it back: it is being removed, or unbound from its driver");
    retire_all(kAbortedByHost);  // after that: its callers look at the state
  } else {
    for (auto& pair : queues_) pair->disbelieve();
    set_state(State::wedged, "the system asks for the device, which could be neither stopped nor let go of");
  }
  release_all();
}

void Handle::recover_overdue(queue::QueuePair& pair, std::uint16_t cid, std::uint64_t staged) {
  std::lock_guard guard(recovery_lock_);
  if (state() != State::ready) return;
  set_state(State::recovering, "a command is overdue");
  // Whoever saw the old state submits under ownership: after this nobody is submitting.
  acquire_all();
  release_all();
  if (confirmed_abort(pair, cid, staged)) return set_state(State::ready, "");
  reset_and_restart();
}

void Handle::recover_broken(const char* why) {
  std::lock_guard guard(recovery_lock_);
  if (state() != State::ready) return;
  // What the caller saw may be from before another's recovery.
  const nvme::ControllerStatus status = controller_->status();
  bool broken = status.fatal() || !status.ready();
  for (auto& pair : queues_) broken = broken || pair->distrusted();
  if (!broken) return;
  set_state(State::recovering, why);
  reset_and_restart();
}

void Handle::recover_halted() {
  std::lock_guard guard(recovery_lock_);
  const char* const why = device_->halted();
  if (why == nullptr || state() != State::ready) return;  // who recovers otherwise looks at it too
  set_state(State::recovering, why);
  reset_and_restart();
}

bool Handle::confirmed_abort(queue::QueuePair& pair, std::uint16_t cid, std::uint64_t staged) {
  const auto in_flight = [&] {
    Idle idle;
    while (!pair.try_acquire()) idle.pause(turn_);
    pair.reap();
    const bool still = pair.is_in_flight(cid, staged);
    pair.release();
    return still;
  };
  if (!in_flight()) return true;  // it came in the end
  const Answer answer = controller_->execute(nvme::abort(pair.id(), cid), kAbortDeadline);
  if (answer.timed_out || answer.status != 0 || pair.distrusted()) return false;
  // "Aborted" is no proof that the data has stopped: the command's own completion is.
  const std::uint64_t start = monotonic_ns();
  Idle idle;
  while (in_flight()) {
    if (monotonic_ns() - start > (nvme::was_aborted(answer.result) ? kAbortedGrace : kAbortedGrace / 10)) return false;
    idle.pause(turn_);
  }
  return true;
}

/// Every queue pair is ours. True: the controller is known to have stopped, and what exporters took back before is
/// mapped no more.
bool Handle::reset_function() {
  if (!device_->reset()) return false;
  memory::Registry::instance().drop_revoked(geometry_.number);
  return true;
}

bool Handle::stop() {
  // One whose DMA the system has stopped, or is stopping, looks disabled and cannot be started again.
  return (!device_->limits().may_be_halted && controller_->disable()) || reset_function();
}

bool Handle::reset_and_restart() {
  acquire_all();
  bool stopped = false;
  int tries = 0;
  do {
    stopped = stop();
    if (!stopped) {
      for (auto& pair : queues_) pair->disbelieve();
      set_state(State::wedged, "the controller could not be stopped: it may still write to the memory of its commands");
    } else if (controller_->gone()) {
      set_state(State::lost, device_->gone().cause);  // before its callers are told
      retire_all(kAbortedByHost);
    } else {
      retire_all(kAbortedByHost);
      if (start_again()) set_state(State::ready, "");
    }
    // It may have been stopped anew meanwhile.
  } while (state() == State::failed && device_->halted() != nullptr && ++tries < kRestarts);
  release_all();
  return stopped;
}

bool Handle::start_again() {
  try {
    controller_->enable();
    controller_->negotiate_queues(static_cast<std::uint32_t>(queues_.size()));
    identity_.shadow_doorbells = controller_->configure_shadow_doorbells(static_cast<std::uint32_t>(queues_.size()));
    retire_all(kAbortedByHost);  // nothing is in flight; gives the rings their new doorbells
    if (interrupts_) interrupts_ = set_interrupts();
    for (auto& pair : queues_) create_queue(*pair);
    return true;
  } catch (const std::exception& error) {
    if (controller_->gone()) {
      set_state(State::lost, device_->gone().cause);
      return false;
    }
    // Set-up stopped the controller again, or it never started: nothing is held.
    const bool stopped = stop();
    const std::string why = std::string("the controller could not be started again: ") + error.what();
    set_state(stopped ? State::failed : State::wedged, why.c_str());
    return false;
  }
}

bool Handle::force_stop() {
  std::lock_guard guard(recovery_lock_);
  if (state() != State::wedged) return true;
  acquire_all();
  const bool stopped = reset_function();
  if (stopped) {
    retire_all(kAbortedByHost);
    set_state(State::failed, "the function was reset from outside");
  }
  release_all();
  return stopped;
}

bool Handle::drain(std::uint64_t limit_ns) {
  const std::uint64_t start = monotonic_ns();
  Idle idle;
  for (unsigned round = 0; in_flight() != 0; ++round) {
    reap_all();
    if ((round & 63) == 63) {
      check_controller();
      if (monotonic_ns() - start > limit_ns) return in_flight() == 0;
    }
    idle.pause(turn_);
  }
  return true;
}

}  // namespace ugds::engine
