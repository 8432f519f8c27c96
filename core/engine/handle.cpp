// SPDX-License-Identifier: Apache-2.0
#include "engine/handle.hpp"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <cerrno>

#include "base/environment.hpp"
#include "base/steps.hpp"
#include "base/text.hpp"
#include "engine/batch.hpp"
#include "engine/stream_worker.hpp"
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
  if (policy.retry.value_or(0) > kMostRetries) {
    fail(EINVAL, "open", std::to_string(*policy.retry) + " retries", "use 0 to 16");
  }
  if (policy.deadline_ns > kLongestDeadline)
    fail(EINVAL, "open", "a deadline of more than 1e9 seconds", "give a time, such as 30s");
}

/// Takes the parameters that every transport has out of a URI. What the caller said stands above what it says.
void take_common(Uri& uri, Policy& policy) {
  std::erase_if(uri.query, [&](const auto& parameter) {
    const auto& [name, value] = parameter;
    if (name == "interrupts") {
      const bool wanted = parse_switch(value, name);
      if (policy.interrupts == Interrupts::unsaid) policy.interrupts = wanted ? Interrupts::yes : Interrupts::no;
      return true;
    }
    if (name == "mode") {
      if (policy.mode.empty()) policy.mode = value;
      return true;
    }
    if (name == "deadline") {
      const std::uint64_t deadline = parse_duration_ns(value, name);
      if (deadline == 0) fail(EINVAL, "open", "a deadline of 0", "give a time, such as 30s");
      if (policy.deadline_ns == 0) policy.deadline_ns = deadline;
      return true;
    }
    if (name == "retry") {
      const auto retry = static_cast<std::uint32_t>(parse_number(value, name, 0, kMostRetries));
      if (!policy.retry) policy.retry = retry;
      return true;
    }
    if (name == "ns") {
      const auto id = static_cast<std::uint32_t>(parse_number(value, name, 1, 0xfffffffe));
      if (policy.namespace_id == 0) policy.namespace_id = id;
      return true;
    }
    return false;
  });
  if (policy.deadline_ns == 0) policy.deadline_ns = kDefaultDeadline;
  if (policy.interrupts != Interrupts::unsaid) return;
  const char* mode = environment("UGDS_INTERRUPT_MODE");
  if (mode == nullptr || *mode == '\0') return;
  policy.interrupts = parse_switch(mode, "UGDS_INTERRUPT_MODE") ? Interrupts::yes : Interrupts::no;
}

}  // namespace

Handle::Handle(const std::string& text, const Policy& policy) : policy_(policy) {
  EventLog::prepare();
  events_.set_device(text.c_str());
  try {
    check(policy);
    Uri uri = parse_uri(text);
    take_common(uri, policy_);
    // What lies behind a file has queues of its own: large commands, and waiters that sleep, suit it.
    if (policy_.mode.empty() && device::is_file(uri)) policy_.mode = "throughput";
    scheduler_.emplace(policy_.mode);
    scheduler_->plan(policy_);
    set_up(text, uri);
  } catch (Failure& failure) {
    tear_down();
    Error error = failure.error();
    error.operation = "open";  // whatever part of it failed
    if (error.device[0] == '\0') set_device(error, text.c_str());
    throw Failure(error);
  } catch (...) {
    tear_down();
    throw;
  }
}

Handle::~Handle() {
  delete streams_.exchange(nullptr);  // NOLINT: made by stream_worker()
  tear_down();
  for (auto& batch : batches_) delete batch.load(std::memory_order_relaxed);  // NOLINT
  events_.tell_rest();
}

StreamWorker& Handle::stream_worker() {
  if (StreamWorker* there = streams()) return *there;
  const std::lock_guard guard(streams_lock_);
  if (StreamWorker* there = streams()) return *there;
  auto made = std::make_unique<StreamWorker>(*this);
  streams_.store(made.get(), std::memory_order_release);
  return *made.release();
}

std::uint64_t Handle::stream_operations() const {
  const StreamWorker* worker = streams();
  return worker != nullptr ? worker->pending() : 0;
}

BatchId Handle::open_batch(std::uint32_t capacity, Priority priority) {
  std::lock_guard guard(batches_lock_);
  const auto free = std::find(batch_is_open_.begin(), batch_is_open_.end(), false);
  if (free == batch_is_open_.end()) {
    fail(EMFILE, "batch", std::to_string(kMostBatches) + " batches are open on the device, which is the most",
         "close one that is not needed");
  }
  const auto slot = static_cast<std::uint32_t>(free - batch_is_open_.begin());
  if (batch(slot) == nullptr) batches_[slot].store(new Batch(*this), std::memory_order_release);  // NOLINT
  const std::uint32_t generation = batch(slot)->open(capacity, priority);
  *free = true;
  return {slot, generation};
}

bool Handle::close_batch(BatchId id) {
  Batch* const one = batch(id.slot);
  if (one == nullptr || !one->close(id.generation)) return false;
  // Where the generations of a slot are spent it is not used again: a stale identifier never means a later batch.
  if (id.generation == Batch::kLastGeneration) return true;
  std::lock_guard guard(batches_lock_);
  batch_is_open_[id.slot] = false;
  return true;
}

void Handle::set_up(const std::string& text, const Uri& uri) {
  setup_step("open: device");
  device_ = device::open(text, uri);
  turn_ = Turn(*device_);
  rings_may_block_ = device_->limits().registers_may_block;
  static_cast<void>(ticks_per_second());  // measured here rather than at the first deadline
  controller_ = std::make_unique<Bringup>(*device_);
  controller_->enable();
  identity_ = controller_->identify(policy_.namespace_id);
  make_queues();
  geometry_.number = memory::Registry::instance().attach(*device_);
  if (!geometry_.bytewise) bounce_ = std::make_unique<Bounce>(*this);
  device_->notify({.asked = [](void* self) { static_cast<Handle*>(self)->give_back(); },
                   .halted = [](void* self) { static_cast<Handle*>(self)->recover_halted(); },
                   .context = this});
}

/// How many queue pairs there will be.
std::uint32_t Handle::plan_queues() {
  const std::uint32_t wanted = policy_.queues != 0 ? policy_.queues : std::clamp(processors(), 2u, 16u) + 1;
  // Each has two doorbells, after the admin queue's.
  const std::uint64_t pair_bytes = std::uint64_t{2} * controller_->capabilities().doorbell_stride();
  const std::uint64_t room = (device_->limits().register_bytes - nvme::kDoorbellBase) / pair_bytes;
  if (room < 2) fail(EOPNOTSUPP, "open", "the controller's registers have no room for an I/O queue's doorbells");
  return controller_->negotiate_queues(static_cast<std::uint32_t>(std::min<std::uint64_t>(wanted, room - 1)));
}

void Handle::set_geometry() {
  geometry_.capacity = identity_.capacity();
  geometry_.bytewise = device_->limits().bytewise;
  geometry_.memory_mask = geometry_.bytewise ? 0 : 3;
  geometry_.block_mask = identity_.block_size - 1;
  geometry_.namespace_id = identity_.namespace_id;
  geometry_.block_shift = static_cast<std::uint32_t>(std::countr_zero(identity_.block_size));
  geometry_.chunk = static_cast<std::uint32_t>(std::min(identity_.max_transfer, identity_.capacity()));
  // The worst case of a chunk: it begins just before a page's end.
  geometry_.lists = nvme::list_pages_needed(geometry_.chunk / controller_->page_size() + 2, controller_->page_size());
  scheduler_->begin(device_->virtual_clock(), geometry_.chunk, [this](Observed& observed) {
    observed.commands_in_flight = in_flight();
    observed.interrupts = interrupts();
  });
  geometry_.fast[0] = static_cast<std::uint32_t>(std::min<std::uint64_t>(geometry_.chunk, kSmall));
  geometry_.write_mask = geometry_.bytewise ? device_->medium().write_unit - 1 : 0;
  // The short way knows no rule of writes alone.
  geometry_.fast[1] = scheduler_->background_writes() || geometry_.write_mask != 0 ? 0 : geometry_.fast[0];
}

void Handle::make_queue(std::uint16_t id, std::uint32_t depth, std::uint32_t lists, bool huge) {
  const std::uint32_t most = controller_->capabilities().max_queue_entries();
  const queue::Shape shape{.id = id,
                           .depth = depth,
                           // Twice as deep where it can be: then the controller need not be told of every completion
                           // that was taken.
                           .completion_depth = std::min(2 * depth, most),
                           .page_size = controller_->page_size(),
                           .list_pages = std::max({1u, lists, geometry_.lists}),
                           .pacer = &scheduler_->pacer(),
                           .events = &events_,
                           .huge = huge,
                           .bytewise = geometry_.bytewise};
  auto pair = std::make_unique<queue::QueuePair>(*device_, shape, controller_->submission_doorbell(id),
                                                 controller_->completion_doorbell(id));
  pair->ledger().set_whose("on queue " + std::to_string(id) + " of " + device_->uri());
  memory::Registry::instance().add_ledger(pair->ledger());
  scheduler_->pacer().watch(*pair);
  queues_.push_back(std::move(pair));
}

/// The deep queue. Its rings are larger than a page, and must be contiguous for the device.
void Handle::make_batch_queue(std::uint16_t id, std::uint32_t depth) {
  constexpr std::uint32_t kOfOnePage = nvme::kPageSize / sizeof(nvme::SubmissionEntry);
  try {
    make_queue(id, depth, kBatchListPages, true);
    const char* why_not = queues_.back()->why_not_huge();
    batch_memory_ = *why_not == '\0' ? "huge pages" : std::string("ordinary pages: ") + why_not;
  } catch (const Failure& failure) {
    if (failure.error().code != ENOMEM || depth <= kOfOnePage || !device_->limits().physical_addresses) throw;
    make_queue(id, kOfOnePage, kBatchListPages, false);
    batch_memory_ = std::string("a page each: ") + failure.error().cause;
  }
}

void Handle::make_queues() {
  const std::uint32_t count = plan_queues();
  shadow_doorbells_ = controller_->configure_shadow_doorbells(count);
  const std::uint32_t most = controller_->capabilities().max_queue_entries();
  const std::uint32_t depth = std::min(policy_.depth != 0 ? policy_.depth : kDefaultDepth, most);
  // A device may state an MQES of 0; no queue of one entry can carry a command.
  if (depth < 2) fail(EOPNOTSUPP, "open", "the device's queues have a single entry", "the device is not usable");
  set_geometry();
  queues_.reserve(count);
  const std::uint32_t shared = count > 1 ? count - 1 : 1;
  for (std::uint32_t id = 1; id <= shared; ++id) {
    make_queue(static_cast<std::uint16_t>(id), depth, std::min(kListPages, depth), false);
  }
  if (count > 1) make_batch_queue(static_cast<std::uint16_t>(count), std::min(kBatchDepth, most));
  if (policy_.interrupts == Interrupts::yes) make_wakeups();
  for (auto& pair : queues_) create_queue(*pair);
  geometry_.queues = queues_.data();
  geometry_.queue_count = shared;
}

/// Gives each queue pair a vector, where there are enough: the admin queue's is 0, and is shared only if it is the only
/// one. The rest are polled.
void Handle::make_wakeups() {
  const std::uint32_t vectors = device_->limits().interrupt_vectors;
  const bool turned = turn_.run != nullptr && !device_->limits().interrupts_with_turn;
  if (turned) {
    polled_because_ = "the controller is run by its callers (pump=caller)";
  } else if (vectors == 0) {
    polled_because_ = "the device has no interrupt vectors";
  } else if (vectors <= queues_.size() && vectors != 1) {
    polled_because_ = "the device has " + std::to_string(vectors) + " interrupt vectors";
  }
  if (turned || vectors == 0) return;
  const std::size_t armed = vectors == 1 ? 1 : std::min<std::size_t>(queues_.size(), vectors - 1);
  for (std::size_t i = 0; i < armed; ++i) queues_[i]->use_wakeup(std::make_unique<queue::Wakeup>());
  interrupts_ = set_interrupts();
}

/// Tells the transport where the vectors' interrupts go. False: nowhere, and every queue is polled.
bool Handle::set_interrupts() {
  const bool single = device_->limits().interrupt_vectors == 1;
  std::vector<int> eventfds(single ? 0 : 1, -1);
  for (const auto& pair : queues_) {
    if (pair->wakeup() != nullptr) eventfds.push_back(pair->wakeup()->eventfd());
  }
  try {
    device_->set_interrupts(eventfds);
    return true;
  } catch (const Failure& failure) {
    for (auto& pair : queues_) {
      if (pair->wakeup() != nullptr) poll_instead(*pair, failure.error().cause);
    }
    return false;
  }
}

/// Before the descriptors are closed.
void Handle::end_interrupts() noexcept {
  if (!interrupts_) return;
  try {
    device_->set_interrupts({});
  } catch (const std::exception&) {
    // A transport of another process or of the kernel has descriptors of its own by now; no harm is done by those.
  }
}

void Handle::poll_instead(queue::QueuePair& pair, const std::string& why) {
  {
    const std::lock_guard guard(why_lock_);
    polled_because_ = why;
  }
  pair.wakeup()->disarm();
}

/// Creates the queue on the controller; polled where it is refused with its interrupt.
void Handle::create_queue(queue::QueuePair& pair) {
  if (pair.wakeup() == nullptr || !pair.wakeup()->armed()) return controller_->create(pair, {});
  const std::uint16_t vector = device_->limits().interrupt_vectors == 1 ? 0 : pair.id();
  try {
    controller_->create(pair, vector);
  } catch (const Failure& failure) {
    if (failure.error().status == kNoStatus) throw;
    controller_->create(pair, {});
    poll_instead(pair, std::string("the device refused a queue with interrupts: ") + failure.error().status_words);
  }
}

std::string Handle::completion() const {
  std::size_t armed = 0;
  std::string why;
  {
    const std::lock_guard guard(why_lock_);
    why = polled_because_;
  }
  for (const auto& pair : queues_) {
    const queue::Wakeup* wakeup = pair->wakeup();
    if (wakeup == nullptr) continue;
    if (wakeup->armed()) {
      ++armed;
    } else if (why.empty()) {
      why = "interrupts of completions were missed";
    }
  }
  std::string words = armed != 0 ? "interrupt" : "polling";
  if (armed != 0 && armed != queues_.size()) {
    words += " on " + std::to_string(armed) + " of " + std::to_string(queues_.size()) + " queues";
  }
  return why.empty() ? words : words + ": " + why;
}

void Handle::tear_down() {
  auto& registry = memory::Registry::instance();
  if (device_) device_->notify({});
  // A controller that has stopped and one that never started hold nothing.
  const bool stopped =
      !controller_ || (state() != State::wedged && controller_->shut_down()) || device_->reset() || device_->release();
  if (geometry_.number != ~0u) registry.detach(geometry_.number, !stopped);
  if (stopped) {
    end_interrupts();
    // Whatever was in flight ended with the controller.
    retire_all(nvme::status::aborted_by_host);
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
  for (std::uint32_t i = 1; i < geometry_.queue_count; ++i) {
    if (queues_[i]->load() < best->load()) best = queues_[i].get();
  }
  return *best;
}

std::uint64_t Handle::in_flight() const {
  std::uint64_t total = 0;
  for (const auto& pair : queues_) total += pair->load();
  return total;
}

std::uint64_t Handle::written() const {
  std::int64_t total = 0;
  for (const auto& pair : queues_) {
    // In this order: what is counted meanwhile makes it less, which a flush may start from, and not more.
    const std::uint64_t all = pair->statistics().bytes[1].get();
    total += static_cast<std::int64_t>(all - pair->statistics().durable.get());
  }
  return static_cast<std::uint64_t>(std::max<std::int64_t>(total, 0));
}

std::uint64_t Handle::lost_results(Error& first) const {
  std::uint64_t count = 0;
  for (std::uint32_t slot = 0; slot < kMostBatches; ++slot) {
    Batch* const one = batch(slot);
    if (one == nullptr) continue;
    Error error;
    const std::uint64_t failures = one->lost(error);
    if (failures != 0 && count == 0) first = error;
    count += failures;
  }
  return count;
}

std::string Handle::holders() const {
  std::string words;
  const auto add = [&](std::uint64_t count, const char* one, const char* many, const std::string& where) {
    if (count == 0) return;
    if (!words.empty()) words += "; ";
    words += std::to_string(count) + (count == 1 ? one : many) + where;
  };
  for (const auto& pair : queues_) {
    add(pair->load(), " command is in flight on queue ", " commands are in flight on queue ",
        std::to_string(pair->id()));
  }
  for (std::uint32_t slot = 0; slot < kMostBatches; ++slot) {
    if (Batch* const one = batch(slot)) {
      const std::uint64_t left = one->outstanding();
      add(left, " request of batch ", " requests of batch ",
          std::to_string(slot) + (left == 1 ? " is not collected" : " are not collected"));
    }
  }
  add(stream_operations(), " operation is pending on a stream", " operations are pending on streams", "");
  if (state() == State::wedged) words += (words.empty() ? "it is wedged: " : "; it is wedged: ") + why();
  return words;
}

std::string Handle::why() const {
  std::lock_guard guard(why_lock_);
  return why_;
}

}  // namespace ugds::engine
