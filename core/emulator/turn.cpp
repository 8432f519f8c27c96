// SPDX-License-Identifier: Apache-2.0
//
// One turn of the controller: look at every doorbell, fetch, execute what is due, post.
#include <algorithm>

#include "emulator/impl.hpp"

namespace ugds::emulator {

namespace {

constexpr std::uint64_t kNever = ~std::uint64_t{0};

}  // namespace

bool Controller::Impl::turn() {
  ++counters.turns;
  bool worked = settle();
  if (asked) {
    asked = false;
    for (const std::uint16_t id : submission_ids) park(submission[id]->doorbell, submission[id]->depth);
    for (const std::uint16_t id : completion_ids) park(completion[id]->doorbell, completion[id]->depth);
  }
  if (processes()) {
    if (state == State::ready) worked |= fetch_all();
    worked |= run_due();
    if (late_writers != 0) worked |= write_late();
    worked |= post_held();
    if (!torn.empty()) mend_torn();
  }
  if (!worked && clock.is_virtual() && !removed.load(std::memory_order_relaxed)) {
    const std::uint64_t next = std::min(next_event(), held_at);
    if (next != kNever) {
      clock.advance_to(next);
      worked = settle();
      if (processes()) worked |= run_due();
    }
  }
  if (!raised.empty()) deliver();
  if (removed.load(std::memory_order_relaxed) && !submission_ids.empty()) {
    drop_everything();
    state = State::disabled;
  }
  return worked;
}

bool Controller::Impl::fetch_all() {
  bool worked = false;
  std::uint16_t last = 0;  // to have a turn before the slots ran out
  for (const std::uint16_t id : completion_ids) observe(*completion[id]);
  for (const std::uint16_t id : submission_ids) {
    SubmissionQueue& queue = *submission[id];
    observe(queue);
    if (queue.head == queue.tail) continue;
    // What a full completion queue cannot take is not begun either.
    if (!completion[queue.completion_queue]->held.empty()) continue;
    if (!fetch(queue, options.burst)) continue;
    worked = true;
    if (state != State::ready || removed.load(std::memory_order_relaxed)) return true;
    if (free_slots == 0 && id != 0) last = id;
  }
  if (last != 0) {  // the next round begins where this one stopped
    const auto first = submission_ids.begin() + 1;
    std::rotate(first, std::find(first, submission_ids.end(), last) + 1, submission_ids.end());
  }
  return worked;
}

void Controller::Impl::schedule(Command& command) {
  const auto opcode = static_cast<nvme::Opcode>(command.entry.opcode);
  const bool moves_blocks =
      !command.admin() && command.status == 0 && (opcode == nvme::Opcode::read || opcode == nvme::Opcode::write);
  const bool late = command.has_fault && command.fault.kind == Fault::Kind::late;
  if (moves_blocks && timing.modelled()) command.due = timing.due(clock.now(), command.length);
  if (late) command.due = std::max(command.due, clock.now()) + command.fault.delay_ns;
  if (command.due == 0) {
    due_commands.push_back({0, command.sequence, &command});
  } else {
    waiting_commands.push_back({command.due, command.sequence, &command});
    std::push_heap(waiting_commands.begin(), waiting_commands.end());
  }
}

bool Controller::Impl::run_due() {
  if (!waiting_commands.empty()) {
    const std::uint64_t now = clock.now();
    while (!waiting_commands.empty() && waiting_commands.front().due <= now) {
      due_commands.push_back(waiting_commands.front());
      std::pop_heap(waiting_commands.begin(), waiting_commands.end());
      waiting_commands.pop_back();
    }
  }
  if (due_commands.empty()) return false;
  if (options.order == Order::reverse) {
    std::sort(due_commands.begin(), due_commands.end(),
              [](const Due& a, const Due& b) { return a.sequence > b.sequence; });
  } else if (options.order == Order::random) {
    std::shuffle(due_commands.begin(), due_commands.end(), random);
  }
  // By index: an Abort fetches, which appends.
  std::size_t done = 0;
  while (done < due_commands.size() && processes() && !removed.load(std::memory_order_relaxed)) {
    const Due next = due_commands[done++];
    if (next.command->sequence != next.sequence || next.command->stage != Command::Stage::waiting) continue;
    execute(*next.command);
    if (waiting.load(std::memory_order_relaxed) != 0) break;
  }
  due_commands.erase(due_commands.begin(), due_commands.begin() + static_cast<std::ptrdiff_t>(done));
  return true;
}

void Controller::Impl::execute(Command& command) {
  std::uint16_t status = command.status;
  std::uint32_t result = 0;
  bool hangs = false;
  ++counters.commands;
  if (command.has_fault && command.fault.kind == Fault::Kind::status) {
    status = command.fault.status;
  } else if (status == 0 && command.has_fault && command.fault.kind == Fault::Kind::abort_lies) {
    result = 0;
  } else if (status == 0 && !(command.has_fault && command.fault.kind == Fault::Kind::ignored)) {
    status = command.admin() ? execute_admin(command, result, hangs) : execute_io(command);
    if (status == 0 && command.has_fault && command.fault.kind == Fault::Kind::corrupt) corrupt(command);
  }
  if (command.has_fault && command.fault.kind == Fault::Kind::result)
    result = static_cast<std::uint32_t>(command.fault.value);
  if (command.has_fault && command.fault.kind == Fault::Kind::abort_denies) result |= 1;
  if (hangs || removed.load(std::memory_order_relaxed)) {
    command.stage = Command::Stage::held;
    return;
  }
  complete(command, status, result);
}

void Controller::Impl::complete(Command& command, std::uint16_t status, std::uint32_t result) {
  check_lists_unchanged(command);
  SubmissionQueue& queue = *submission[command.sq];
  CompletionQueue& target = *completion[queue.completion_queue];
  Posting posting;
  posting.result = result;
  posting.sq = command.sq;
  posting.cid = command.entry.cid;
  posting.status = status;
  if (command.has_fault) {
    posting.wrong_head = command.fault.kind == Fault::Kind::wrong_sq_head;
    posting.silent = command.fault.kind == Fault::Kind::lost_interrupt;
    posting.wrong_phase = command.fault.kind == Fault::Kind::wrong_phase;
    posting.doubled = command.fault.kind == Fault::Kind::double_interrupt;
    if (command.fault.kind == Fault::Kind::torn) posting.rest_due = clock.now() + command.fault.delay_ns;
    if (posting.wrong_head || posting.rest_due != 0) queue.head_known = false;
    if (command.fault.kind == Fault::Kind::lost) {
      queue.clear_in_flight(posting.cid);
      return release(command);
    }
    if (command.fault.kind == Fault::Kind::unknown_id) {
      Posting stray = posting;
      stray.extra = true;
      stray.frees_cid = false;
      stray.cid ^= 0x8000;  // not its neighbour's: the host may have that one in its queue already
      while (queue.is_in_flight(stray.cid)) ++stray.cid;
      target.extras = true;
      post(target, stray);
    }
  }
  post(target, posting);
  if (command.has_fault && command.fault.kind == Fault::Kind::duplicate) {
    posting.extra = true;
    posting.frees_cid = false;
    target.extras = true;
    post(target, posting);
  }
  release(command);
}

bool Controller::Impl::write_late() {
  const auto pattern = static_cast<int>(++late_pattern & 0xff);
  for (Command* command : live) {
    if (!command->has_fault || command->fault.kind != Fault::Kind::late_write ||
        command->direction != Direction::to_host)
      continue;
    for (const Transfer::Piece& piece : command->transfer.data) {
      int error = 0;
      auto overwrite = [&](std::byte* at, std::uint64_t bytes, Copier* copier) {
        error = mover.fill(at, pattern, bytes, copier);
        return error == 0;
      };
      const Access access = memory.data_runs(piece.iova, piece.bytes, true, overwrite);
      if (access && error == 0) continue;
      if (!access) report(access, "a late write");
      command->fault.kind = Fault::Kind::hang;
      --late_writers;
      break;
    }
  }
  return false;  // it is not progress: virtual time goes on, and the thread may rest between two writes
}

bool Controller::Impl::post_held() {
  bool worked = false;
  for (const std::uint16_t id : completion_ids) {
    CompletionQueue& queue = *completion[id];
    if (queue.held.empty()) [[likely]]
      continue;
    observe(queue);
    while (!queue.held.empty() && !queue.full() && processes()) {
      const Posting posting = queue.held.front();
      queue.held.pop_front();
      write_entry(queue, posting);
      worked = true;
    }
  }
  return worked;
}

void Controller::Impl::mend_torn() {
  std::erase_if(torn, [&](const Torn& one) {
    if (one.due > clock.now()) return false;
    one.entry->result = one.result;
    one.entry->sq_head = one.sq_head;
    one.entry->sq_id = one.sq_id;
    return true;
  });
}

std::uint64_t Controller::Impl::next_event() const {
  std::uint64_t next = kNever;
  if (!due_commands.empty() && processes()) return clock.now();
  if (!waiting_commands.empty() && processes()) next = waiting_commands.front().due;
  if (settling.load(std::memory_order_relaxed)) next = std::min(next, settle_due);
  for (const Torn& one : torn) next = std::min(next, one.due);
  return next;
}

}  // namespace ugds::emulator
