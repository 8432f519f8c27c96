// SPDX-License-Identifier: Apache-2.0
//
// Registers and what CC.EN, CC.SHN and CSTS do (NVMe Base 2.0, 3.1.3, 3.5 and 3.6).
#include "emulator/impl.hpp"

namespace ugds::emulator {

using nvme::Configuration;
using nvme::ControllerStatus;
using nvme::Register;

namespace {

constexpr std::uint32_t kVersion = 0x0002'0000;  // 2.0
constexpr std::uint32_t kShutdownComplete = 2;
/// Bits 11:0 of ASQ and ACQ are reserved.
constexpr std::uint64_t kQueueAddressMask = ~std::uint64_t{0xfff};

constexpr std::uint32_t offset_of(Register reg) { return static_cast<std::uint32_t>(reg); }

/// A read of all or half of a 64-bit register; false where neither is meant.
bool part_of(Register reg, std::uint64_t value, std::uint32_t offset, std::uint32_t width, std::uint64_t& out) {
  if (offset == offset_of(reg) && width == 8) {
    out = value;
  } else if (offset == offset_of(reg) && width == 4) {
    out = value & 0xffffffffu;
  } else if (offset == offset_of(reg) + 4 && width == 4) {
    out = value >> 32;
  } else {
    return false;
  }
  return true;
}

}  // namespace

void Controller::Impl::bad_access(const char* how, std::uint32_t offset, std::uint32_t width) {
  violations.add("register", "%s of %u bytes at 0x%x", how, width, offset);
}

std::uint64_t Controller::Impl::read(std::uint32_t offset, std::uint32_t width) {
  const std::uint64_t ones = width >= 8 ? nvme::kAllOnes64 : nvme::kAllOnes32;
  if (removed.load(std::memory_order_acquire)) return ones;
  if (faults.lies()) {
    HostGuard guard(*this);
    if (const std::optional<std::uint64_t> lie = faults.read(offset, width)) return *lie;
  }
  if (settling.load(std::memory_order_acquire)) {
    HostGuard guard(*this);
    if (options.pump_by_caller) {
      turn_safely();
    } else {
      settle();
    }
  }
  std::uint64_t value = 0;
  if (part_of(Register::cap, cap, offset, width, value)) return value;
  if (part_of(Register::asq, asq.load(std::memory_order_acquire), offset, width, value)) return value;
  if (part_of(Register::acq, acq.load(std::memory_order_acquire), offset, width, value)) return value;
  if (width == 4) {
    switch (static_cast<Register>(offset)) {
      case Register::vs: return kVersion;
      case Register::intms:
      case Register::intmc: return interrupt_mask.load(std::memory_order_acquire);
      case Register::cc: return cc.load(std::memory_order_acquire);
      case Register::csts: {
        const std::uint32_t status = csts.load(std::memory_order_acquire);
        return removed.load(std::memory_order_acquire) ? nvme::kAllOnes32 : status;
      }
      case Register::nssr: return 0;
      case Register::aqa: return aqa.load(std::memory_order_acquire);
      default: break;
    }
  }
  bad_access("read", offset, width);
  return 0;
}

void Controller::Impl::write(std::uint32_t offset, std::uint64_t value, std::uint32_t width) {
  if (removed.load(std::memory_order_acquire)) return;
  if (offset >= nvme::kDoorbellBase) {
    write_doorbell(offset, value, width);
  } else {
    HostGuard guard(*this);
    write_register(offset, value, width);
  }
  wake();
}

void Controller::Impl::write_register(std::uint32_t offset, std::uint64_t value, std::uint32_t width) {
  const auto word = static_cast<std::uint32_t>(value);
  for (const Register reg : {Register::asq, Register::acq}) {
    std::uint64_t unused = 0;
    if (!part_of(reg, 0, offset, width, unused)) continue;
    std::atomic<std::uint64_t>& target = reg == Register::asq ? asq : acq;
    std::uint64_t next = target.load(std::memory_order_relaxed);
    if (width == 8) next = value;
    if (width == 4 && offset == offset_of(reg)) next = (next >> 32 << 32) | word;
    if (width == 4 && offset != offset_of(reg)) next = (next & 0xffffffffu) | std::uint64_t{word} << 32;
    if (Configuration{cc.load(std::memory_order_relaxed)}.enabled())
      return bad_access("write while enabled", offset, width);
    target.store(next & kQueueAddressMask, std::memory_order_release);
    return;
  }
  if (width != 4) return bad_access("write", offset, width);
  switch (static_cast<Register>(offset)) {
    case Register::intms: interrupt_mask.fetch_or(word, std::memory_order_acq_rel); return;
    case Register::intmc: interrupt_mask.fetch_and(~word, std::memory_order_acq_rel); return;
    case Register::cc: return write_configuration(word);
    case Register::aqa:
      if (Configuration{cc.load(std::memory_order_relaxed)}.enabled())
        return bad_access("write while enabled", offset, width);
      aqa.store(word, std::memory_order_release);
      return;
    case Register::nssr: return;  // CAP.NSSRS is 0: writes have no effect
    default: return bad_access("write", offset, width);
  }
}

void Controller::Impl::write_configuration(std::uint32_t value) {
  const Configuration old{cc.load(std::memory_order_relaxed)}, now{value};
  cc.store(value, std::memory_order_release);
  if (!old.enabled() && now.enabled()) {
    start();
  } else if (old.enabled() && !now.enabled()) {
    stop();
  } else if (now.enabled() && now.with_shutdown(0).raw != old.with_shutdown(0).raw) {
    violations.add("register", "CC was changed from 0x%x to 0x%x while enabled", old.raw, now.raw);
  }
  if (old.shutdown_notification() == 0 && now.shutdown_notification() != 0) shut_down();
}

void Controller::Impl::start() {
  lost_power.store(false, std::memory_order_release);
  if (state == State::stopping) {
    violations.add("register", "CC.EN was set before CSTS.RDY was clear");
    finish_stop();
  }
  const Configuration configuration{cc.load(std::memory_order_relaxed)};
  const nvme::Capabilities capabilities{cap};
  const nvme::AdminQueueAttributes sizes{aqa.load(std::memory_order_relaxed)};
  page_size = configuration.page_size();
  const std::uint64_t sq = asq.load(std::memory_order_relaxed), cq = acq.load(std::memory_order_relaxed);
  const bool legal = page_size >= capabilities.min_page_size() && page_size <= capabilities.max_page_size() &&
                     configuration.submission_entry_power() == 6 && configuration.completion_entry_power() == 4 &&
                     configuration.command_set() == 0 && sizes.submission_entries() >= 2 &&
                     sizes.completion_entries() >= 2 && (sq & (page_size - 1)) == 0 && (cq & (page_size - 1)) == 0;
  state = State::starting;
  if (!legal) return fail_fatally();
  const Access reached_sq = memory.check(sq, std::uint64_t{sizes.submission_entries()} * 64, false);
  const Access reached_cq = memory.check(cq, std::uint64_t{sizes.completion_entries()} * 16, true);
  if (!reached_sq || !reached_cq) {
    report(reached_sq ? reached_cq : reached_sq, "the admin queues");
    return fail_fatally();
  }
  if (faults.take(Fault::Kind::never_ready)) return;
  if (options.ready_ns == 0) return finish_start();
  settle_due = clock.now() + options.ready_ns;
  settling.store(true, std::memory_order_release);
}

void Controller::Impl::finish_start() {
  create_admin_queues();
  state = State::ready;
  csts.store(ControllerStatus{}.with_ready(true).raw, std::memory_order_release);
}

void Controller::Impl::stop() {
  settling.store(false, std::memory_order_release);
  const bool was_ready = ControllerStatus{csts.load(std::memory_order_relaxed)}.ready();
  state = State::stopping;
  if (was_ready && faults.take(Fault::Kind::never_stopped)) return;
  if (!was_ready || options.ready_ns == 0) return finish_stop();
  settle_due = clock.now() + options.ready_ns;
  settling.store(true, std::memory_order_release);
}

void Controller::Impl::finish_stop() {
  drop_everything();
  ++counters.resets;
  state = State::disabled;
  csts.store(0, std::memory_order_release);
}

void Controller::Impl::shut_down() {
  drop_everything();
  static_cast<void>(subsystem->flush(0));  // there is no status to report a failing disk by
  if (state != State::disabled) state = State::shut;
  csts.store(ControllerStatus{csts.load(std::memory_order_relaxed)}.with_shutdown_status(kShutdownComplete).raw,
             std::memory_order_release);
}

bool Controller::Impl::settle() {
  if (!settling.load(std::memory_order_relaxed) || clock.now() < settle_due) return false;
  settling.store(false, std::memory_order_release);
  if (state == State::starting) finish_start();
  if (state == State::stopping) finish_stop();
  return true;
}

void Controller::Impl::fail_fatally() {
  settling.store(false, std::memory_order_release);
  state = State::failed;
  // The commands stay, so that unmapping their memory before the reset is noticed; they do nothing any more.
  for (Command* command : live) {
    command->stage = Command::Stage::held;
    command->has_fault = false;
  }
  waiting_commands.clear();
  late_writers = 0;
  csts.store(ControllerStatus{csts.load(std::memory_order_relaxed)}.with_fatal(true).raw, std::memory_order_release);
}

void Controller::Impl::drop_everything() {
  settling.store(false, std::memory_order_release);
  while (!live.empty()) release(*live.back());
  waiting_commands.clear();
  due_commands.clear();
  late_writers = event_requests = 0;
  timing.reset();
  drop_queues();
  shadow = events = nullptr;
  shadow_iova = event_iova = 0;
  asked = false;
  for (const std::uint16_t vector : raised) vectors[vector].raised = false;
  raised.clear();
}

void Controller::Impl::return_to_initial_state(bool as_found) {
  drop_everything();
  ++counters.resets;
  zero_doorbells();
  doorbells_were_lost = true;
  interrupt_mask.store(0);
  const bool enabled = as_found && options.initially_enabled;
  // What a boot loader leaves behind: queues in memory that it has given back.
  constexpr std::uint64_t kNowhere = 0xdead'0000;
  aqa.store(enabled ? nvme::AdminQueueAttributes::make(2, 2).raw : 0, std::memory_order_release);
  asq.store(enabled ? kNowhere : 0, std::memory_order_release);
  acq.store(enabled ? kNowhere : 0, std::memory_order_release);
  page_size = nvme::Capabilities{cap}.min_page_size();
  cc.store(enabled ? Configuration::make(page_size).with_enabled(true).raw : 0, std::memory_order_release);
  csts.store(0, std::memory_order_release);
  state = State::disabled;
  if (enabled) finish_start();
}

}  // namespace ugds::emulator
