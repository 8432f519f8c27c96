// SPDX-License-Identifier: Apache-2.0
#include "engine/bring_up.hpp"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "base/error.hpp"
#include "base/steps.hpp"
#include "device/bytewise.hpp"
#include "engine/policy.hpp"
#include "nvme/status.hpp"

namespace ugds::engine {

using nvme::Register;

namespace {

constexpr std::uint32_t kAdminDepth = 32;
constexpr std::uint64_t kAdminDeadline = 10'000'000'000;
/// CAP.TO may be 0 in the field; and a limit below this is no limit that anybody meets.
constexpr std::uint64_t kLeastReadyLimit = 500'000'000;

}  // namespace

Bringup::Bringup(device::Device& device) : device_(device) {}

nvme::ControllerStatus Bringup::status() const { return {device_.read32(static_cast<std::uint32_t>(Register::csts))}; }

bool Bringup::gone() const {
  return status().gone() && device_.read32(static_cast<std::uint32_t>(Register::vs)) == nvme::kAllOnes32;
}

void Bringup::pause(unsigned round) const {
  if (device_.turn() != nullptr) {
    device_.turn()(device_.turn_context());
    return;
  }
  if (round < 2000) {
    // An emulated controller's thread may need this processor.
    if ((round & 63) == 63) sched_yield();
    return cpu_pause();
  }
  // Longer waits grow to a millisecond, so that a slow controller costs no core.
  const long ns = std::min<long>(1'000'000, 20'000 + 1000L * static_cast<long>(round - 2000));
  const timespec wait{0, ns};
  nanosleep(&wait, nullptr);
}

bool Bringup::wait_ready(bool ready, std::uint64_t limit_ns, std::string& why) const {
  const std::uint64_t start = monotonic_ns();
  for (unsigned round = 0;; ++round) {
    const nvme::ControllerStatus now = status();
    if (now.gone()) {
      why = "the device does not answer on the bus";
      return false;
    }
    // A fatal status ends a wait for readiness; a controller that is being disabled may show it until RDY falls.
    if (now.fatal() && ready) {
      why = "the controller reports a fatal status (CSTS.CFS)";
      return false;
    }
    if (now.ready() == ready) return true;
    if (monotonic_ns() - start > limit_ns) {
      why = "CSTS.RDY did not become " + std::string(ready ? "1" : "0") + " within " +
            std::to_string(limit_ns / 1'000'000) + " ms (CAP.TO)";
      return false;
    }
    pause(round);
  }
}

void Bringup::enable() {
  setup_step("controller: read capabilities");
  capabilities_.raw = device_.read64(static_cast<std::uint32_t>(Register::cap));
  if (capabilities_.raw == nvme::kAllOnes64) {
    fail(ENODEV, "open", "the device does not answer on the bus", "check that it is present and powered");
  }
  page_size_ = std::max(nvme::kPageSize, capabilities_.min_page_size());
  if (!capabilities_.nvm_command_set()) {
    fail(EOPNOTSUPP, "open", "the controller does not offer the NVM command set", "use an NVMe block device");
  }
  // Rings and lists begin at multiples of this, and no controller is known that asks for more.
  if (page_size_ > device::DmaMemory::kAlignment) {
    fail(EOPNOTSUPP, "open", "the controller's smallest page has " + std::to_string(page_size_) + " bytes (CAP.MPSMIN)",
         "no page above 64 KiB is supported");
  }
  const std::uint64_t limit =
      std::max<std::uint64_t>(kLeastReadyLimit, std::uint64_t{capabilities_.ready_timeout_ms()} * 1'000'000);
  const nvme::Configuration found{device_.read32(static_cast<std::uint32_t>(Register::cc))};
  std::string why;
  if (found.enabled()) {
    // CC.EN must not be cleared before CSTS.RDY has followed it (NVMe Base 2.0, 3.1.3.5), unless it never will.
    wait_ready(true, limit, why);
    write(Register::cc, found.with_enabled(false).raw);
  }
  if (!wait_ready(false, limit, why))
    fail(gone() ? ENODEV : EIO, "open", "the controller did not stop: " + why, "reset it");

  setup_step("controller: admin queue");
  const std::uint32_t stride = capabilities_.doorbell_stride();
  shadow_in_use_ = false;
  if (!admin_) {
    admin_ = std::make_unique<queue::QueuePair>(
        device_,
        queue::Shape{
            .id = 0, .depth = kAdminDepth, .completion_depth = kAdminDepth, .page_size = page_size_, .list_pages = 0},
        queue::Doorbell(device_, nvme::submission_doorbell(0, stride)),
        queue::Doorbell(device_, nvme::completion_doorbell(0, stride)));
    page_ = device::DmaMemory(device_, Bytes(page_size_), true);
  } else {
    admin_->restart(nvme::make_status(nvme::StatusType::path, 0x71),
                    queue::Doorbell(device_, nvme::submission_doorbell(0, stride)),
                    queue::Doorbell(device_, nvme::completion_doorbell(0, stride)));
  }
  setup_step("controller: enable");
  write(Register::aqa, nvme::AdminQueueAttributes::make(kAdminDepth, kAdminDepth).raw);
  device_.write64(static_cast<std::uint32_t>(Register::asq), admin_->submission_ring().value);
  device_.write64(static_cast<std::uint32_t>(Register::acq), admin_->completion_ring().value);
  const nvme::Configuration configuration = nvme::Configuration::make(page_size_);
  write(Register::cc, configuration.with_enabled(true).raw);
  if (!wait_ready(true, limit, why)) {
    const int code = gone() ? ENODEV : EIO;
    disable();
    fail(code, "open", "the controller did not become ready: " + why, "reset or power-cycle the device");
  }
}

bool Bringup::disable() noexcept {
  const nvme::Configuration now{device_.read32(static_cast<std::uint32_t>(Register::cc))};
  if (gone()) return true;
  write(Register::cc, now.with_enabled(false).raw);
  std::string why;
  return wait_ready(
             false,
             std::max<std::uint64_t>(kLeastReadyLimit, std::uint64_t{capabilities_.ready_timeout_ms()} * 1'000'000),
             why) ||
         gone();
}

bool Bringup::shut_down() noexcept {
  const nvme::Configuration now{device_.read32(static_cast<std::uint32_t>(Register::cc))};
  if (!gone() && now.enabled() && !status().fatal()) {
    write(Register::cc, now.with_shutdown(1).raw);
    const std::uint64_t start = monotonic_ns();
    for (unsigned round = 0; status().shutdown_status() != 2 && !gone(); ++round) {
      if (monotonic_ns() - start > 5'000'000'000) break;
      pause(round);
    }
  }
  return disable();
}

Answer Bringup::execute(const nvme::SubmissionEntry& command, std::uint64_t deadline_ns) {
  std::lock_guard guard(admin_lock_);
  queue::Request request;
  request.on_idle = queue::OnIdle::done;
  if (!admin_->has_room(0)) return {.timed_out = true};  // earlier ones never came back
  admin_->next() = command;
  admin_->stage(request);
  admin_->ring();
  const std::uint64_t start = monotonic_ns();
  for (unsigned round = 0;; ++round) {
    const bool looks = (round & 15) == 15;
    // Before the completion is looked for: what has come while this thread had no processor is in time.
    const bool late = looks && monotonic_ns() - start > deadline_ns;
    admin_->reap();
    if (request.done.load(std::memory_order_acquire) != 0) {
      return {.status = request.status, .result = request.result};
    }
    if (looks) {
      const nvme::ControllerStatus now = status();
      if (late || now.gone() || now.fatal()) {
        admin_->orphan(request);
        return {.timed_out = true, .gone = now.gone()};
      }
    }
    pause(round);
  }
}

std::uint32_t Bringup::demand(const nvme::SubmissionEntry& command, const char* what) {
  const Answer answer = execute(command, kAdminDeadline);
  if (answer.gone) fail(ENODEV, "open", std::string("the device went away when asked to ") + what);
  if (answer.timed_out) {
    fail(status().fatal() ? EIO : ETIMEDOUT, "open",
         std::string("the device did not answer when asked to ") + what +
             (status().fatal() ? ": fatal controller status (CSTS.CFS)" : ""),
         "check that bus mastering is on and that the IOMMU lets it reach memory; then reset it");
  }
  if (answer.status != 0) {
    Error error;
    error.code = nvme::status_errno(answer.status);
    error.operation = "open";
    error.status = answer.status;
    std::snprintf(error.status_words, sizeof error.status_words, "%s", nvme::status_words(answer.status));
    set_cause(error, "the device refused to %s", what);
    throw Failure(error);
  }
  return answer.result;
}

namespace {

std::uint64_t max_transfer(const nvme::IdentifyController& controller, std::uint64_t min_page, std::uint32_t block,
                           bool bytewise) {
  // MDTS is a power of two of CAP.MPSMIN; 0 states no limit. A shift beyond 20 would be more than any cap of ours.
  std::uint64_t limit =
      controller.mdts == 0 ? kUnstatedMaxTransfer : min_page << std::min<unsigned>(controller.mdts, 20);
  const std::uint64_t blocks = bytewise ? device::kBytewiseMost : nvme::kMaxBlocksPerCommand;
  limit = std::min({limit, kMaxChunk, blocks * block});
  return align_down(limit, block);
}

void check_format(const nvme::IdentifyNamespace& ns, std::uint32_t id, bool bytewise) {
  const nvme::LbaFormat& format = ns.formats[nvme::format_index(ns.flbas, ns.nlbaf)];
  if (bytewise && format.data_power == 0) return;
  const std::string name = "namespace " + std::to_string(id);
  if (format.data_power < 9 || format.data_power > 16) {
    fail(EOPNOTSUPP, "open", name + " states a block size of 2^" + std::to_string(format.data_power) + " bytes",
         "format it with blocks of 512 to 65536 bytes");
  }
  if (format.metadata != 0) {
    fail(EOPNOTSUPP, "open",
         name + " is formatted with " + std::to_string(1u << format.data_power) + "+" +
             std::to_string(format.metadata) + " byte blocks (" +
             (nvme::metadata_interleaved(ns.flbas) ? "extended LBA" : "separate metadata") + ")",
         "format it without metadata (nvme format --lbaf=…), after saving what is on it");
  }
}

}  // namespace

Identity Bringup::identify(std::uint32_t namespace_id) {
  setup_step("controller: identify");
  Identity identity;
  demand(nvme::identify(nvme::Cns::controller, 0, page_.iova(0)), "identify the controller");
  nvme::IdentifyController controller;
  std::memcpy(&controller, page_.data(), sizeof controller);
  identity.model = nvme::get_text(controller.model, sizeof controller.model);
  identity.serial = nvme::get_text(controller.serial, sizeof controller.serial);
  identity.firmware = nvme::get_text(controller.firmware, sizeof controller.firmware);
  identity.volatile_write_cache = (controller.vwc & 1) != 0;
  identity.dataset_management = (controller.oncs & nvme::oncs::dataset_management) != 0;
  offers_shadow_ = (controller.oacs & nvme::oacs::doorbell_buffer_config) != 0;

  if (namespace_id == 0) {
    demand(nvme::identify(nvme::Cns::active_namespaces, 0, page_.iova(0)), "list its namespaces");
    std::memcpy(&namespace_id, page_.data(), sizeof namespace_id);
    if (namespace_id == 0) fail(ENODEV, "open", "the controller has no active namespace", "create and attach one");
  }
  if (namespace_id > controller.nn) {
    fail(EINVAL, "open", "there is no namespace " + std::to_string(namespace_id),
         "the controller has up to " + std::to_string(controller.nn));
  }
  demand(nvme::identify(nvme::Cns::ns, namespace_id, page_.iova(0)), "identify the namespace");
  nvme::IdentifyNamespace ns;
  std::memcpy(&ns, page_.data(), sizeof ns);
  if (ns.nsze == 0) {
    fail(EINVAL, "open", "namespace " + std::to_string(namespace_id) + " is not active", "name one that is");
  }
  check_format(ns, namespace_id, device_.limits().bytewise);
  identity.namespace_id = namespace_id;
  identity.block_size = 1u << ns.formats[nvme::format_index(ns.flbas, ns.nlbaf)].data_power;
  identity.blocks = ns.nsze;
  if (identity.blocks > (std::uint64_t{1} << 62) / identity.block_size) {
    fail(EPROTO, "open", "the namespace states an impossible size: " + std::to_string(identity.blocks) + " blocks",
         "the device is broken or not what it claims to be");
  }
  identity.max_transfer =
      max_transfer(controller, capabilities_.min_page_size(), identity.block_size, device_.limits().bytewise);
  if (identity.max_transfer == 0) {
    fail(EOPNOTSUPP, "open", "the controller's largest transfer is smaller than one block",
         "format with smaller blocks");
  }
  return identity;
}

bool Bringup::configure_shadow_doorbells(std::uint32_t queue_pairs) {
  const std::uint64_t bytes = std::uint64_t{2} * (queue_pairs + 1) * capabilities_.doorbell_stride();
  if (!offers_shadow_ || bytes > page_size_) return false;
  setup_step("controller: shadow doorbells");
  if (!shadow_) {
    shadow_ = device::DmaMemory(device_, Bytes(page_size_), true);
    events_ = device::DmaMemory(device_, Bytes(page_size_), true);
  } else {
    std::memset(shadow_.data(), 0, page_size_);
    std::memset(events_.data(), 0, page_size_);
  }
  const Answer answer = execute(nvme::doorbell_buffer_config(shadow_.iova(0), events_.iova(0)), kAdminDeadline);
  shadow_in_use_ = !answer.timed_out && answer.status == 0;
  return shadow_in_use_;
}

queue::Doorbell Bringup::doorbell(std::uint32_t offset, std::uint16_t queue) const {
  if (!shadow_in_use_ || queue == 0) return queue::Doorbell(device_, offset);
  const std::uint32_t at = offset - nvme::kDoorbellBase;
  return queue::Doorbell(device_, offset, reinterpret_cast<std::uint32_t*>(shadow_.data() + at),
                         reinterpret_cast<std::uint32_t*>(events_.data() + at));
}

queue::Doorbell Bringup::submission_doorbell(std::uint16_t queue) const {
  return doorbell(nvme::submission_doorbell(queue, capabilities_.doorbell_stride()), queue);
}

queue::Doorbell Bringup::completion_doorbell(std::uint16_t queue) const {
  return doorbell(nvme::completion_doorbell(queue, capabilities_.doorbell_stride()), queue);
}

std::uint32_t Bringup::negotiate_queues(std::uint32_t wanted) {
  setup_step("controller: number of queues");
  const std::uint32_t granted =
      nvme::granted_queue_pairs(demand(nvme::set_number_of_queues(wanted), "grant I/O queues"));
  return std::min(granted, wanted);
}

void Bringup::create(const queue::QueuePair& pair, std::optional<std::uint16_t> vector) {
  setup_step("controller: create queue");
  demand(nvme::create_completion_queue(pair.id(), pair.completion_depth(), pair.completion_ring(), vector.has_value(),
                                       vector.value_or(0)),
         "create a completion queue");
  try {
    demand(nvme::create_submission_queue(pair.id(), pair.depth(), pair.submission_ring(), pair.id()),
           "create a submission queue");
  } catch (...) {
    execute(nvme::delete_completion_queue(pair.id()), kAdminDeadline);
    throw;
  }
}

void Bringup::leak() {
  if (admin_) admin_->leak();
  static_cast<void>(admin_.release());  // NOLINT: its memory may still be written to
  page_.leak();
  shadow_.leak();
  events_.leak();
}

}  // namespace ugds::engine
