// SPDX-License-Identifier: Apache-2.0
#include "engine/handle.hpp"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <cerrno>

#include "base/steps.hpp"
#include "engine/unaligned.hpp"
#include "nvme/status.hpp"

namespace ugds::engine {

const char* state_name(State state) {
  switch (state) {
    case State::ready: return "ready";
    case State::recovering: return "recovering";
    case State::wedged: return "wedged";
    case State::failed: return "failed";
    case State::lost: return "lost";
  }
  return "unknown";
}

namespace {

std::uint32_t processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return static_cast<std::uint32_t>(CPU_COUNT(&set));
}

void check(const Policy& policy) {
  if (policy.depth == 1 || policy.depth > 65536) {
    fail(EINVAL, "open", "a queue depth of " + std::to_string(policy.depth), "use 2 to 65536, or 0 for the default");
  }
  if (policy.queues > nvme::kMaxIoQueues) {
    fail(EINVAL, "open", std::to_string(policy.queues) + " queue pairs", "use 1 to 65534, or 0 for the default");
  }
  if (policy.deadline_ns == 0) fail(EINVAL, "open", "a deadline of 0", "give a time, such as 30 seconds");
}

}  // namespace

Handle::Handle(const std::string& uri, const Policy& policy) : policy_(policy) {
  try {
    check(policy);
    setup_step("open: device");
    device_ = device::open(uri);
    turn_ = Turn(*device_);
    set_up();
  } catch (Failure& failure) {
    tear_down();
    Error error = failure.error();
    error.operation = "open";  // whatever part of it failed
    if (error.device[0] == '\0') set_device(error, uri.c_str());
    throw Failure(error);
  } catch (...) {
    tear_down();
    throw;
  }
}

Handle::~Handle() { tear_down(); }

void Handle::set_up() {
  static_cast<void>(ticks_per_second());  // measured here rather than at the first deadline
  controller_ = std::make_unique<Bringup>(*device_);
  controller_->enable();
  identity_ = controller_->identify(policy_.namespace_id);
  make_queues();
  geometry_.number = memory::Registry::instance().attach(*device_);
  bounce_ = std::make_unique<Bounce>(*this);
}

void Handle::make_queues() {
  const std::uint32_t wanted = policy_.queues != 0 ? policy_.queues : std::clamp(processors(), 2u, 16u);
  const std::uint32_t count = controller_->negotiate_queues(wanted);
  identity_.shadow_doorbells = controller_->configure_shadow_doorbells(count);
  const std::uint32_t depth =
      std::min(policy_.depth != 0 ? policy_.depth : kDefaultDepth, controller_->capabilities().max_queue_entries());
  // Twice as deep where it can be: then the controller need not be told of every completion that was taken.
  const std::uint32_t completion_depth = std::min(2 * depth, controller_->capabilities().max_queue_entries());
  // A device may state an MQES of 0; no queue of one entry can carry a command.
  if (depth < 2) fail(EOPNOTSUPP, "open", "the device's queues have a single entry", "the device is not usable");

  geometry_.capacity = identity_.capacity();
  geometry_.block_mask = identity_.block_size - 1;
  geometry_.namespace_id = identity_.namespace_id;
  geometry_.block_shift = static_cast<std::uint32_t>(std::countr_zero(identity_.block_size));
  geometry_.chunk = static_cast<std::uint32_t>(std::min(identity_.max_transfer, identity_.capacity()));
  // The worst case of a chunk: it begins just before a page's end.
  geometry_.lists = nvme::list_pages_needed(geometry_.chunk / controller_->page_size() + 2, controller_->page_size());
  geometry_.window = std::clamp((depth - 1) / 2, 1u, kWindow);
  const std::uint32_t lists = std::max(1u, std::max(std::min(kListPages, depth), geometry_.lists));
  auto& registry = memory::Registry::instance();
  for (std::uint32_t i = 1; i <= count; ++i) {
    const auto id = static_cast<std::uint16_t>(i);
    auto pair =
        std::make_unique<queue::QueuePair>(*device_,
                                           queue::Shape{.id = id,
                                                        .depth = depth,
                                                        .completion_depth = completion_depth,
                                                        .page_size = controller_->page_size(),
                                                        .list_pages = lists},
                                           controller_->submission_doorbell(id), controller_->completion_doorbell(id));
    queues_.reserve(count);
    registry.add_ledger(pair->ledger());
    queues_.push_back(std::move(pair));
    controller_->create(*queues_.back());
  }
  geometry_.queues = queues_.data();
  geometry_.queue_count = count;
}

void Handle::tear_down() {
  auto& registry = memory::Registry::instance();
  // A controller that has stopped and one that never started hold nothing.
  const bool stopped = !controller_ || (state() != State::wedged && controller_->shut_down()) || device_->reset();
  if (geometry_.number != ~0u) registry.detach(geometry_.number, !stopped);
  if (stopped) {
    // Whatever was in flight ended with the controller.
    retire_all(nvme::make_status(nvme::StatusType::path, 0x71));
    for (auto& pair : queues_) registry.remove_ledger(pair->ledger());
    queues_.clear();
    bounce_.reset();
    controller_.reset();
    return;
  }
  // Leaked on purpose, ledgers included: registrations that the controller may still write to can never be closed.
  for (auto& pair : queues_) {
    pair->leak();
    static_cast<void>(pair.release());  // NOLINT
  }
  static_cast<void>(bounce_.release());  // NOLINT
  controller_->leak();
  static_cast<void>(controller_.release());  // NOLINT
  static_cast<void>(device_.release());      // NOLINT
}

queue::QueuePair& Handle::least_loaded() {
  queue::QueuePair* best = queues_[0].get();
  for (auto& pair : queues_) {
    if (pair->load() < best->load()) best = pair.get();
  }
  return *best;
}

std::uint64_t Handle::in_flight() const {
  std::uint64_t total = 0;
  for (const auto& pair : queues_) total += pair->load();
  return total;
}

std::string Handle::why() const {
  std::lock_guard guard(why_lock_);
  return why_;
}

}  // namespace ugds::engine
