// SPDX-License-Identifier: Apache-2.0
//
// When a command is overdue, or the controller fails. The order is what keeps memory safe: stop submitting; abort; if
// the abort is not confirmed, stop the controller; only when it is known to have stopped are the commands retired and
// their memory released. If nothing stops it, the handle is wedged and what it may still write to stays held.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <ctime>

#include "base/clock.hpp"
#include "engine/abort_limit.hpp"
#include "engine/batch.hpp"
#include "engine/handle.hpp"
#include "engine/idle.hpp"
#include "engine/wedge_trace.hpp"
#include "nvme/status.hpp"

namespace ugds::engine {

namespace {

std::atomic<std::uint64_t> abort_limit{kAbortLimit};
/// The same for a command that was not aborted, as when it was completing just then.
constexpr std::uint64_t kNotAbortedGrace = 10'000'000;
/// How long the system, which waits for the device, waits for the commands that it still executes.
constexpr std::uint64_t kLastWords = 2'000'000'000;
/// How often a start is tried while the system goes on stopping the device.
constexpr int kRestarts = 8;
/// How long a drain polls before it sleeps between its looks.
constexpr std::uint64_t kPatience = 1'000'000;

void nap() {
  const timespec wait{0, 100'000};
  nanosleep(&wait, nullptr);
}

}  // namespace

void set_abort_limit(std::uint64_t ns) { abort_limit.store(ns != 0 ? ns : kAbortLimit); }

void Handle::set_state(State state, const char* why) {
  {
    std::lock_guard guard(why_lock_);
    why_ = why;
  }
  state_.store(state, std::memory_order_seq_cst);
}

/// What happens to the device as a whole: few such events there are, and none of them is left out.
void Handle::tell(const char* name, Level level, const char* action, const char* detail, const char* remedy) {
  Event event;
  event.name = name;
  event.level = level;
  event.action = action;
  event.remedy = remedy;
  set_detail(event, "%s", detail);
  events_.tell(event);
}

/// Every queue pair is ours: what their rings hold of the last commands is kept beside the event.
void Handle::tell_wedged(const char* why) {
  try {
    std::vector<queue::TraceRecord> records;
    for (const auto& pair : queues_) pair->last_commands(records, geometry_.block_shift);
    EventLog::instance().keep_trace(trace_text(records, device_->uri(), device::transport_name(device_->transport())));
  } catch (const std::exception&) {
    // No memory: the event says what there is to say.
  }
  char held[64];
  std::snprintf(held, sizeof held, "; commands in flight: %llu", static_cast<unsigned long long>(in_flight()));
  tell(
      "wedged", Level::error, "what its commands may write to stays mapped and held", (std::string(why) + held).c_str(),
      "close it, which resets its function once more (in C with a time below -1); if even that does not stop it, reset "
      "or unplug it from outside and close it again");
}

void Handle::set_lost(const char* why) {
  set_state(State::lost, why);
  tell("lost", Level::error, "every request ends with an error", why, device_->gone().hint);
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
  for (auto& pair : queues_) {
    if (pair->has_orphans()) check_deadline(*pair, false);
  }
}

/// Commands whose callers have gone have a deadline too: nobody else would look at it, and their memory is held. While
/// the device is drained those whose callers are elsewhere have it too: `all`.
void Handle::check_deadline(queue::QueuePair& pair, bool all) {
  if (state() != State::ready || !pair.try_acquire()) return;
  pair.reap();
  std::uint16_t cid = 0;
  const std::uint64_t oldest = all ? pair.oldest(cid) : pair.oldest_orphan(cid), now = ticks();
  const bool overdue = oldest != 0 && now > oldest && now - oldest > ns_to_ticks(policy_.deadline_ns);
  if (overdue) pair.expire(cid, oldest);
  pair.release();
  if (overdue) recover_overdue(pair, cid, oldest);
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
  set_lost(device_->gone().cause);
  acquire_all();
  retire_all(nvme::status::aborted_by_host);
  release_all();
}

void Handle::give_back() {
  std::lock_guard guard(recovery_lock_);
  if (state() == State::lost) return;
  set_state(State::recovering, "the system asks for the device");
  tell("revoked", Level::warning, "what is in flight may end, then the device is given up", "the system asks for it");
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
    constexpr const char* kWhy = "the system took it back: it is being removed, or unbound from its driver";
    set_lost(kWhy);
    retire_all(nvme::status::aborted_by_host);  // after that: its callers look at the state
  } else {
    for (auto& pair : queues_) pair->disbelieve();
    constexpr const char* kWhy = "the system asks for the device, which could be neither stopped nor let go of";
    set_state(State::wedged, kWhy);
    tell_wedged(kWhy);
  }
  release_all();
}

void Handle::recover_overdue(queue::QueuePair& pair, std::uint16_t cid, std::uint64_t staged) {
  std::lock_guard guard(recovery_lock_);
  if (state() != State::ready) return;
  set_state(State::recovering, "a command is overdue");
  Event event;
  event.name = "overdue";
  // Whoever saw the old state submits under ownership: after this nobody is submitting.
  acquire_all();
  pair.describe(cid, event);
  release_all();
  event.action = "abort";
  event.remedy = "raise the deadline if the device is merely slow";
  set_detail(event, "in flight for %.3f s, and the deadline is %.3f s",
             static_cast<double>(ticks_to_ns(ticks() - staged)) * 1e-9,
             static_cast<double>(policy_.deadline_ns) * 1e-9);
  events_.tell(event);
  const char* answer = "";
  const bool ended = confirmed_abort(pair, cid, staged, answer);
  event.name = "abort";
  event.action = ended ? "none: the command has ended" : "the controller is reset";
  event.level = ended ? Level::info : Level::warning;
  event.remedy = "";
  set_detail(event, "%s", answer);
  events_.tell(event);
  if (ended) return set_state(State::ready, "");
  reset_and_restart("a command is overdue");
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
  reset_and_restart(why);
}

void Handle::recover_halted() {
  std::lock_guard guard(recovery_lock_);
  const char* const why = device_->halted();
  if (why == nullptr || state() != State::ready) return;  // who recovers otherwise looks at it too
  set_state(State::recovering, why);
  tell("revoked", Level::warning, "the function is reset", why, "register what the exporter of the memory gives now");
  reset_and_restart(why);
}

/// `said`: what came of it, in words.
bool Handle::confirmed_abort(queue::QueuePair& pair, std::uint16_t cid, std::uint64_t staged, const char*& said) {
  const auto in_flight = [&] {
    Idle idle;
    while (!pair.try_acquire()) idle.pause(turn_);
    pair.reap();
    const bool still = pair.is_in_flight(cid, staged);
    pair.release();
    return still;
  };
  said = "the command came in the end, before it was aborted";
  if (!in_flight()) return true;
  const std::uint64_t start = monotonic_ns();
  aborts_.fetch_add(1, std::memory_order_relaxed);
  const Answer answer = controller_->execute(nvme::abort(pair.id(), cid), abort_limit.load());
  if (answer.timed_out || answer.status != 0 || pair.distrusted()) {
    said = answer.timed_out     ? "the Abort command was not answered"
           : answer.status != 0 ? nvme::status_words(answer.status)
                                : "the controller posts completions that no command was waiting for";
    return false;
  }
  const bool aborted = nvme::was_aborted(answer.result);
  said = aborted ? "the controller says that it aborted the command, and its completion came"
                 : "the controller says that it did not abort the command, and its completion came";
  // "Aborted" is no proof that the data has stopped: the command's own completion is.
  const std::uint64_t spent = monotonic_ns() - start;
  const std::uint64_t limit = aborted ? abort_limit.load() : spent + kNotAbortedGrace;
  Idle idle;
  for (;;) {
    // Before the look: what has come while this thread had no processor is in time.
    const bool late = monotonic_ns() - start > limit;
    if (!in_flight()) break;
    if (late) {
      said = aborted ? "the controller says that it aborted the command, but no completion of it came"
                     : "the controller says that it did not abort the command";
      return false;
    }
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

/// Called by whoever owns every queue pair. `how`: by which step.
bool Handle::stop(const char** how) {
  // One whose DMA the system has stopped, or is stopping, looks disabled and cannot be started again.
  const char* ignored = nullptr;
  const char*& step = how != nullptr ? *how : ignored;
  step = "controller reset (CC.EN)";
  if (!device_->limits().may_be_halted && controller_->disable()) return true;
  step = "function reset";
  return reset_function();
}

/// What a reset has ended in batches, and nobody was told of yet.
void Handle::submit_again() {
  if (retries() == 0) return;
  for (std::uint32_t slot = 0; slot < kMostBatches; ++slot) {
    if (Batch* const one = batch(slot)) one->submit_again();
  }
}

bool Handle::reset_and_restart(const char* why) {
  const std::uint64_t begun = monotonic_ns();
  acquire_all();
  bool stopped = false;
  int tries = 0;
  do {
    const char* how = "";
    const std::uint64_t ended = in_flight();
    stopped = stop(&how);
    if (!stopped) {
      std::string words = "the controller could not be stopped: it may still write to the memory of its commands";
      if (const std::string cause = device_->unreachable(); !cause.empty()) words += "; " + cause;
      for (auto& pair : queues_) pair->disbelieve();
      set_state(State::wedged, words.c_str());
      tell_wedged(words.c_str());
    } else if (controller_->gone()) {
      set_lost(device_->gone().cause);  // before its callers are told
      retire_all(nvme::status::aborted_by_host);
    } else {
      char words[200];
      std::snprintf(words, sizeof words, "%s; commands in flight that it ended: %llu", why,
                    static_cast<unsigned long long>(ended));
      resets_.fetch_add(1, std::memory_order_relaxed);
      // A file's medium is the kernel's, which outlives its controller.
      const bool in_doubt = identity_.volatile_write_cache && !geometry_.bytewise && durability_.reset(written());
      tell("reset", Level::warning, how, words,
           in_doubt ? "what was written and not flushed may be lost: write it again; the next flush fails, to say so"
                    : "");
      retire_all(nvme::status::aborted_by_host);
      if (start_again()) {
        submit_again();
        std::snprintf(words, sizeof words, "%.1f ms from the reset's beginning",
                      static_cast<double>(monotonic_ns() - begun) * 1e-6);
        tell("recovered", Level::info, "requests go on", words);
        set_state(State::ready, "");
      }
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
    shadow_doorbells_ = controller_->configure_shadow_doorbells(static_cast<std::uint32_t>(queues_.size()));
    retire_all(nvme::status::aborted_by_host);  // nothing is in flight; gives the rings their new doorbells
    if (interrupts_) interrupts_ = set_interrupts();
    for (auto& pair : queues_) create_queue(*pair);
    return true;
  } catch (const std::exception& error) {
    if (controller_->gone()) {
      set_lost(device_->gone().cause);
      return false;
    }
    // Set-up stopped the controller again, or it never started: nothing is held.
    const bool stopped = stop();
    const std::string why = std::string("the controller could not be started again: ") + error.what();
    set_state(stopped ? State::failed : State::wedged, why.c_str());
    if (stopped) {
      tell("failed", Level::error, "every request ends with an error", why.c_str(),
           "close the device and open it again");
    } else {
      for (auto& pair : queues_) pair->disbelieve();
      tell_wedged(why.c_str());
    }
    return false;
  }
}

bool Handle::force_stop() {
  std::lock_guard guard(recovery_lock_);
  if (state() != State::wedged) return true;
  acquire_all();
  const bool stopped = reset_function();
  if (stopped) {
    retire_all(nvme::status::aborted_by_host);
    set_state(State::failed, "it was wedged, and the function was reset to close it");
    tell("reset", Level::warning, "function reset", "a wedged device was stopped to close it: what it held is released",
         "open it again");
  }
  release_all();
  return stopped;
}

/// Requests of batches that wait for room, as after a reset: their callers need not be there. Whether there are any.
bool Handle::push_batches() {
  bool any = false;
  for (std::uint32_t slot = 0; slot < kMostBatches; ++slot) {
    if (Batch* const one = batch(slot)) any = one->push() || any;
  }
  return any;
}

bool Handle::drain(std::uint64_t limit_ns) {
  const std::uint64_t start = monotonic_ns();
  Idle idle;
  for (unsigned round = 0; push_batches() || in_flight() != 0; ++round) {
    reap_all();
    if ((round & 63) == 63) {
      check_controller();
      for (auto& pair : queues_) check_deadline(*pair, true);
      if (state() == State::wedged) return false;  // nothing of it ends any more
      const std::uint64_t spent = monotonic_ns() - start;
      if (spent > limit_ns) return !push_batches() && in_flight() == 0;
      if (spent > kPatience && turn_.run == nullptr) nap();
    }
    idle.pause(turn_);
  }
  return true;
}

}  // namespace ugds::engine
