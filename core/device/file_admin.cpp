// SPDX-License-Identifier: Apache-2.0
//
// The admin commands of the controller of files: what bringing a controller up asks for.
#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "device/bytewise.hpp"
#include "device/file.hpp"
#include "nvme/commands.hpp"
#include "nvme/identify.hpp"
#include "nvme/registers.hpp"

namespace ugds::device {

using nvme::AdminOpcode;

void FileDevice::administer(std::uint32_t tail) {
  const std::lock_guard guard(admin_lock_);
  if (!enabled_.load(std::memory_order_acquire) || tail >= admin_.entries) return;
  while (admin_.head != tail) {
    nvme::SubmissionEntry entry;
    std::memcpy(static_cast<void*>(&entry), admin_.submission + admin_.head * sizeof entry, sizeof entry);
    admin_.head = admin_.head + 1 == admin_.entries ? 0 : admin_.head + 1;
    std::uint32_t result = 0;
    const std::uint16_t status = execute(entry, result);
    auto* const at = reinterpret_cast<nvme::CompletionEntry*>(admin_.completion) + admin_.completion_tail;
    at->result = result;
    at->sq_head = static_cast<std::uint16_t>(admin_.head);
    at->sq_id = 0;
    std::atomic_ref(at->last).store(nvme::CompletionWord::make(entry.cid, admin_.phase, status).raw,
                                    std::memory_order_release);
    if (++admin_.completion_tail == admin_.completion_entries) {
      admin_.completion_tail = 0;
      admin_.phase = !admin_.phase;
    }
  }
}

std::uint16_t FileDevice::execute(const nvme::SubmissionEntry& entry, std::uint32_t& result) {
  switch (static_cast<AdminOpcode>(entry.opcode)) {
    case AdminOpcode::identify: identify(entry); return nvme::status::success;
    case AdminOpcode::set_features: {
      if ((entry.cdw10 & 0xff) != static_cast<std::uint32_t>(nvme::Feature::number_of_queues))
        return nvme::status::invalid_field;
      const std::uint32_t granted = std::min(entry.cdw11 & 0xffff, kMostQueues - 1);
      result = granted << 16 | granted;
      return nvme::status::success;
    }
    case AdminOpcode::create_cq: return create_completions(entry);
    case AdminOpcode::create_sq: return create_submissions(entry);
    case AdminOpcode::delete_cq:
    case AdminOpcode::delete_sq: return nvme::status::success;  // as part of an opening that failed
    case AdminOpcode::abort:
      abort(static_cast<std::uint16_t>(entry.cdw10), static_cast<std::uint16_t>(entry.cdw10 >> 16));
      result = 1;  // it was not aborted here and now; its own completion says whether it was
      return nvme::status::success;
    default: return nvme::status::invalid_opcode;
  }
}

std::uint16_t FileDevice::create_completions(const nvme::SubmissionEntry& entry) {
  const std::uint32_t id = entry.cdw10 & 0xffff, vector = entry.cdw11 >> 16;
  if (id == 0 || id > kMostQueues) return nvme::status::invalid_queue_id;
  IoQueue& queue = queues_[id - 1];
  const std::lock_guard guard(queue.lock);
  queue.completion = reinterpret_cast<std::byte*>(entry.prp1);
  queue.completion_entries = (entry.cdw10 >> 16) + 1;
  queue.completion_tail = 0;
  queue.phase = true;
  const bool interrupts = (entry.cdw11 & 2) != 0;
  try {
    if (!queue.io) queue.io = std::make_unique<file::Queue>(make_io(queue.completion_entries / 2));
    if (interrupts && (vector >= eventfds_.size() || eventfds_[vector] < 0))
      return nvme::status::invalid_interrupt_vector;
    queue.io->tell(interrupts ? eventfds_[vector] : -1);
  } catch (const Failure&) {
    return interrupts && queue.io ? nvme::status::invalid_interrupt_vector : nvme::status::internal_error;
  } catch (const std::exception&) {
    return nvme::status::internal_error;
  }
  queue.has_completions = true;
  return nvme::status::success;
}

std::uint16_t FileDevice::create_submissions(const nvme::SubmissionEntry& entry) {
  const std::uint32_t id = entry.cdw10 & 0xffff;
  if (id == 0 || id > kMostQueues) return nvme::status::invalid_queue_id;
  IoQueue& queue = queues_[id - 1];
  const std::lock_guard guard(queue.lock);
  if (!queue.has_completions) return nvme::status::invalid_completion_queue;
  queue.submission = reinterpret_cast<std::byte*>(entry.prp1);
  queue.entries = (entry.cdw10 >> 16) + 1;
  queue.head = queue.tail = 0;
  // The first time only: what a stopped controller had in flight lies in there until the kernel is done with it.
  if (queue.flights.size() < queue.entries) {
    try {
      std::vector<Flight> flights(queue.entries);
      queue.flights.swap(flights);
    } catch (const std::bad_alloc&) {
      return nvme::status::internal_error;
    }
    queue.free = nullptr;
    for (Flight& flight : queue.flights) {
      flight.next = queue.free;
      queue.free = &flight;
    }
  }
  queue.has_submissions = true;
  return nvme::status::success;
}

void FileDevice::identify(const nvme::SubmissionEntry& entry) {
  auto* const page = reinterpret_cast<std::byte*>(entry.prp1);
  std::memset(page, 0, nvme::kIdentifySize);
  const auto cns = static_cast<nvme::Cns>(entry.cdw10 & 0xff);
  if (cns == nvme::Cns::controller) {
    nvme::IdentifyController controller{};
    nvme::set_text(controller.serial, "-");
    nvme::set_text(controller.model, file_ ? file_->kind() : "files");
    nvme::set_text(controller.firmware, "-");
    controller.mdts = 8;  // of 4 KiB: 1 MiB
    controller.nn = 1;
    controller.oncs = nvme::oncs::dataset_management;
    controller.vwc = 1;
    std::memcpy(page, &controller, sizeof controller);
  } else if (cns == nvme::Cns::active_namespaces) {
    page[0] = std::byte{1};
  } else {
    nvme::IdentifyNamespace ns{};
    ns.nsze = ns.ncap = ns.nuse = std::uint64_t{1} << 62;
    ns.formats[0].data_power = 0;  // blocks of one byte
    std::memcpy(page, &ns, sizeof ns);
  }
}

}  // namespace ugds::device
