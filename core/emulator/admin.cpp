// SPDX-License-Identifier: Apache-2.0
//
// Admin commands (NVMe Base 2.0, 5), but for queues and Identify.
#include <algorithm>
#include <vector>

#include "base/units.hpp"
#include "emulator/impl.hpp"

namespace ugds::emulator {

namespace status = nvme::status;
using nvme::AdminOpcode;
using nvme::Feature;

namespace {

constexpr std::uint16_t kInvalidLogPage = nvme::make_status(nvme::StatusType::command_specific, 0x09);
constexpr std::uint16_t kEventRequestLimit = nvme::make_status(nvme::StatusType::command_specific, 0x05);
/// As Identify's AERL states, which is 0-based.
constexpr std::uint32_t kMostEventRequests = 4;
constexpr std::uint32_t kSave = 1u << 31;

/// Bytes of a log page that this controller has; 0: none of that identifier.
std::uint64_t log_page_bytes(std::uint32_t page) {
  switch (page) {
    case 0x01: return 64;   // error information, one entry
    case 0x02: return 512;  // SMART / health
    case 0x03: return 512;  // firmware slots
    default: return 0;
  }
}

bool is_stored(Feature feature) {
  switch (feature) {
    case Feature::arbitration:
    case Feature::power_management:
    case Feature::temperature_threshold:
    case Feature::error_recovery:
    case Feature::interrupt_coalescing:
    case Feature::interrupt_vector:
    case Feature::write_atomicity:
    case Feature::async_events: return true;
    default: return false;
  }
}

}  // namespace

std::uint16_t Controller::Impl::prepare_admin(Command& command) {
  const nvme::SubmissionEntry& e = command.entry;
  if (!check_reserved(command)) return status::invalid_field;
  switch (static_cast<AdminOpcode>(e.opcode)) {
    case AdminOpcode::identify:
      command.direction = Direction::to_host;
      command.length = nvme::kIdentifySize;
      return read_prps(command, e.prp1, e.prp2, command.length);
    case AdminOpcode::get_log_page: {
      command.length = ((e.cdw10 >> 16 | std::uint64_t{e.cdw11 & 0xffff} << 16) + 1) * 4;
      if (log_page_bytes(e.cdw10 & 0xff) == 0) return kInvalidLogPage;
      const std::uint64_t offset = e.cdw12 | std::uint64_t{e.cdw13} << 32;
      if (!is_aligned(offset, 4) || offset >= log_page_bytes(e.cdw10 & 0xff)) return status::invalid_field;
      if (command.length > 1_MiB) return status::invalid_field;
      command.direction = Direction::to_host;
      return read_prps(command, e.prp1, e.prp2, command.length);
    }
    case AdminOpcode::async_event:
      if (event_requests >= kMostEventRequests) return kEventRequestLimit;
      ++event_requests;
      command.is_event_request = true;
      command.stage = Command::Stage::held;
      return status::success;
    case AdminOpcode::doorbell_buffer_config: return options.shadow ? status::success : status::invalid_opcode;
    case AdminOpcode::delete_sq:
    case AdminOpcode::create_sq:
    case AdminOpcode::delete_cq:
    case AdminOpcode::create_cq:
    case AdminOpcode::abort:
    case AdminOpcode::set_features:
    case AdminOpcode::get_features: return status::success;
  }
  return status::invalid_opcode;
}

std::uint16_t Controller::Impl::execute_admin(Command& command, std::uint32_t& result, bool& hangs) {
  switch (static_cast<AdminOpcode>(command.entry.opcode)) {
    case AdminOpcode::delete_sq: return delete_submission_queue(command, hangs);
    case AdminOpcode::create_sq: return create_submission_queue(command);
    case AdminOpcode::delete_cq: return delete_completion_queue(command);
    case AdminOpcode::create_cq: return create_completion_queue(command);
    case AdminOpcode::get_log_page: {
      // Nothing has happened that a log would tell, and the rest of the page after its end is zero as well.
      const std::vector<std::byte> zeros(command.length);
      return send(command.transfer, zeros.data(), zeros.size());
    }
    case AdminOpcode::identify: return identify(command);
    case AdminOpcode::abort: return abort(command, result);
    case AdminOpcode::set_features: return set_features(command, result);
    case AdminOpcode::get_features: return get_features(command, result);
    case AdminOpcode::doorbell_buffer_config: return configure_shadow(command);
    case AdminOpcode::async_event: break;
  }
  return status::invalid_opcode;
}

std::uint16_t Controller::Impl::set_features(const Command& command, std::uint32_t& result) {
  const auto feature = static_cast<Feature>(command.entry.cdw10 & 0xff);
  const std::uint32_t value = command.entry.cdw11;
  if ((command.entry.cdw10 & kSave) != 0) return status::feature_not_saveable;
  if (feature == Feature::number_of_queues) {
    if ((value & 0xffff) == 0xffff || value >> 16 == 0xffff) return status::invalid_field;
    // The number is settled once queues exist.
    if (submission_ids.size() > 1 || completion_ids.size() > 1) return status::command_sequence_error;
    if (options.queues == 0) return status::internal_error;  // 0-based counts cannot say "none"
    const std::uint32_t submissions = std::min((value & 0xffff) + 1, options.queues);
    const std::uint32_t completions = std::min((value >> 16) + 1, options.queues);
    granted = std::max(submissions, completions);
    features[static_cast<std::size_t>(feature)] = result = (completions - 1) << 16 | (submissions - 1);
    return status::success;
  }
  if (feature == Feature::volatile_write_cache) {
    if (!subsystem->has_write_cache() || (value & ~1u) != 0) return status::invalid_field;
    std::uint32_t& enabled = features[static_cast<std::size_t>(feature)];
    // What a disabled cache holds must not be lost.
    if (enabled != 0 && value == 0 && subsystem->flush(0) != 0) return status::write_fault;
    enabled = value;
    return status::success;
  }
  if (!is_stored(feature)) return status::invalid_field;
  features[static_cast<std::size_t>(feature)] = value;
  return status::success;
}

std::uint16_t Controller::Impl::get_features(const Command& command, std::uint32_t& result) {
  const auto feature = static_cast<Feature>(command.entry.cdw10 & 0xff);
  const std::uint32_t select = command.entry.cdw10 >> 8 & 7;
  const bool has_cache = subsystem->has_write_cache();
  if (feature == Feature::volatile_write_cache ? !has_cache
                                               : feature != Feature::number_of_queues && !is_stored(feature))
    return status::invalid_field;
  constexpr std::uint32_t kCurrent = 0, kSaved = 2, kCapabilities = 3, kChangeable = 1u << 2;
  if (select > kCapabilities) return status::invalid_field;
  result = features[static_cast<std::size_t>(feature)];
  if (feature == Feature::number_of_queues && granted != 0 && result == 0) result = (granted - 1) << 16 | (granted - 1);
  if (select != kCurrent && select <= kSaved) result = feature == Feature::volatile_write_cache ? 1 : 0;
  if (select == kCapabilities) result = kChangeable;
  return status::success;
}

std::uint16_t Controller::Impl::abort(const Command& command, std::uint32_t& result) {
  const std::uint32_t id = command.entry.cdw10 & 0xffff, cid = command.entry.cdw10 >> 16;
  result = 1;  // not aborted
  if (id >= submission.size() || submission[id] == nullptr) return status::success;
  // What still waits in the queue becomes a command, which can be aborted: as far as there are slots. Of what is beyond
  // them the controller does not know yet.
  observe(*submission[id]);
  fetch(*submission[id], submission[id]->depth);
  if (!processes()) return status::success;  // something that was fetched was the end of it
  for (Command* other : live) {
    if (other->sq != id || other->entry.cid != cid || other == &command) continue;
    if (other->has_fault && other->stage == Command::Stage::held && !other->fault.abortable) break;
    complete(*other, status::abort_requested, 0);
    ++counters.aborts;
    result = 0;
    break;
  }
  return status::success;
}

std::uint16_t Controller::Impl::configure_shadow(const Command& command) {
  const nvme::SubmissionEntry& e = command.entry;
  for (const std::uint64_t prp : {e.prp1, e.prp2}) {
    if (is_aligned(prp, page_size)) continue;
    violations.add("prp-alignment", "a doorbell buffer at 0x%llx has an offset in its page",
                   static_cast<unsigned long long>(prp));
    return status::invalid_field;
  }
  if (const Access access = memory.check(e.prp1, page_size, false); !access) return report(access, "shadow doorbells");
  if (const Access access = memory.check(e.prp2, page_size, true); !access) return report(access, "event indices");
  std::byte* words = memory.contiguous(e.prp1, page_size, false);
  std::byte* indices = memory.contiguous(e.prp2, page_size, true);
  // Pages of this process that are not neighbours would need a translation at every look.
  if (words == nullptr || indices == nullptr) return status::invalid_field;
  shadow = words;
  events = indices;
  shadow_iova = e.prp1;
  event_iova = e.prp2;
  for (const std::uint16_t id : submission_ids) {
    if (id == 0) continue;
    connect(submission[id]->doorbell, nvme::submission_doorbell(id, stride()), false);
    park(submission[id]->doorbell, submission[id]->depth);
  }
  for (const std::uint16_t id : completion_ids) {
    if (id == 0) continue;
    connect(completion[id]->doorbell, nvme::completion_doorbell(id, stride()), false);
    park(completion[id]->doorbell, completion[id]->depth);
  }
  return status::success;
}

}  // namespace ugds::emulator
