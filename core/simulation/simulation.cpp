// SPDX-License-Identifier: Apache-2.0
#include "simulation/simulation.hpp"

#include <algorithm>
#include <cerrno>
#include <deque>
#include <memory>
#include <optional>
#include <random>

#include "base/error.hpp"
#include "device/emulated.hpp"
#include "engine/batch.hpp"
#include "engine/mode.hpp"
#include "engine/operation.hpp"

namespace ugds::simulation {

using engine::Handle;
using nvme::Opcode;

namespace {

constexpr std::uint64_t kNever = ~std::uint64_t{0};
constexpr std::uint64_t kPoll = 5'000;

class Unpaced final : public engine::Mode {
 public:
  engine::Settings begin() const override {
    engine::Settings settings;
    settings.pacing.latency_low = settings.pacing.latency_high = 0;
    return settings;
  }
};

/// What all actors share.
struct World {
  Handle& handle;
  const memory::Reference& buffer;
  const std::atomic<std::uint64_t>& clock;
  std::uint64_t record_from, record_until;
  std::mt19937_64 random;
  /// For those who hold queue pairs: whose turn it is, who holds each, and who waits for it.
  std::uint32_t next_queue = 0;
  std::vector<std::deque<const void*>> held;

  std::uint64_t now() const { return clock.load(std::memory_order_relaxed); }
};

/// A caller: it counts its requests' ends, and finds them places on the device, one after the other.
class Caller {
 public:
  Caller(World& world, const Actor& plan, std::uint32_t number)
      : world_(world), plan_(plan), number_(number), first_(number * (world.handle.geometry().capacity / 16)) {}
  virtual ~Caller() = default;
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  /// One turn at the present instant. Whether anything ended or began.
  bool turn() {
    engine::this_caller = number_ + 1;  // a thread of its own has a queue pair of its own
    return step();
  }
  /// When it begins something by itself.
  virtual std::uint64_t wakes_at() const { return kNever; }
  Outcome take() { return std::move(outcome_); }

 protected:
  virtual bool step() = 0;

  const Actor& plan() const { return plan_; }
  World& world() const { return world_; }
  std::uint64_t next_offset() {
    const std::uint64_t places = world_.handle.geometry().capacity / plan_.size;
    return (first_ / plan_.size + count_++) % places * plan_.size;
  }
  void record(std::uint64_t began, std::int64_t result, const Error& error) {
    if (result < 0) throw Failure(error);
    const std::uint64_t now = world_.now();
    if (now < world_.record_from || now >= world_.record_until) return;
    outcome_.bytes += plan_.size;
    outcome_.latencies.push_back(now - began);
  }

 private:
  World& world_;
  const Actor plan_;
  const std::uint32_t number_;
  const std::uint64_t first_;
  std::uint64_t count_ = 0;
  Outcome outcome_;
};

/// Synchronous requests.
class Synchronous final : public Caller {
 public:
  using Caller::Caller;
  ~Synchronous() override { let_go(); }

  std::uint64_t wakes_at() const override { return operation_ || pair_ != nullptr ? kNever : at_; }

 private:
  bool step() override {
    if (!operation_) {
      if (world().now() < at_ || !has_queue()) return false;
      transfer_ = {.opcode = plan().opcode,
                   .buffer = world().buffer,
                   .offset = next_offset(),
                   .size = plan().size,
                   .priority = plan().priority};
      operation_.emplace(world().handle, transfer_, pair_);
    }
    if (!operation_->turn()) return false;
    const std::int64_t result = operation_->result();
    record(began_, result, last_error());
    operation_.reset();
    let_go();
    at_ = world().now();
    if (plan().pause_ns != 0)
      at_ += std::uniform_int_distribution<std::uint64_t>(0, 2 * plan().pause_ns)(world().random);
    waits_ = false;
    return true;
  }

  /// Whether the request may begin. Its time runs from its first asking.
  bool has_queue() {
    if (!waits_) began_ = world().now();
    if (!plan().holds_queue) return true;
    if (!waits_) {
      waits_ = true;
      index_ = world().next_queue++ % world().held.size();
      world().held[index_].push_back(this);
      pair_ = world().handle.queues()[index_].get();
    }
    return world().held[index_].front() == this;
  }
  void let_go() {
    if (pair_ == nullptr) return;
    std::erase(world().held[index_], this);
    pair_ = nullptr;
  }

  engine::Transfer transfer_;
  std::optional<engine::Operation> operation_;
  queue::QueuePair* pair_ = nullptr;  ///< that it holds, or waits for
  std::size_t index_ = 0;
  bool waits_ = false;
  std::uint64_t at_ = 0, began_ = 0;
};

/// A batch that is kept full.
class Batched final : public Caller {
 public:
  Batched(World& world, const Actor& plan, std::uint32_t number)
      : Caller(world, plan, number),
        id_(world.handle.open_batch(plan.depth, plan.priority)),
        batch_(*world.handle.batch(id_.slot)),
        began_(plan.depth) {
    for (std::uint32_t i = 0; i < plan.depth; ++i) free_.push_back(i);
  }
  ~Batched() override { world().handle.close_batch(id_); }

 private:
  /// What the engine is asked for.
  struct Asked {
    static constexpr bool kOffsetsTell = false;
    const Batched* by;
    const memory::Reference& begin_run(std::size_t) const { return by->world().buffer; }
    const memory::Reference& buffer() const { return by->world().buffer; }
    bool same_buffer(std::size_t) const { return true; }
    engine::Wanted operator()(std::size_t i) const {
      return {.offset = by->offsets_[i],
              .size = by->plan().size,
              .cookie = by->free_[i],
              .write = by->plan().opcode == nvme::Opcode::write ? 1u : 0u};
    }
  };

  bool step() override {
    const std::int64_t collected =
        batch_.collect(id_.generation, 0, plan().depth, 0, {}, [this](const engine::Done& done) {
          static const Error none;
          record(began_[done.cookie], done.result, done.error != nullptr ? *done.error : none);
          free_.push_back(static_cast<std::uint32_t>(done.cookie));
        });
    if (free_.empty()) return collected != 0;
    // submit() may ask for a request more than once.
    offsets_.clear();
    for (const std::uint32_t cookie : free_) {
      began_[cookie] = world().now();
      offsets_.push_back(next_offset());
    }
    batch_.submit(id_.generation, free_.size(), true, Asked{this}, [](std::size_t) { return false; });
    free_.clear();
    return true;
  }

  const engine::BatchId id_;
  engine::Batch& batch_;
  std::vector<std::uint64_t> began_, offsets_;
  std::vector<std::uint32_t> free_;
};

/// The actors, the controller, and time.
class Simulation {
 public:
  Simulation(World& world, emulator::Controller& controller, std::span<const Actor> actors)
      : world_(world), controller_(controller), turn_(world.handle.turn()), number_(engine::this_caller) {
    engine::Turn nothing;
    nothing.run = [](void*) {};
    world_.handle.set_turn(nothing);
    try {
      for (const Actor& plan : actors) add(plan);
    } catch (...) {
      end();
      throw;
    }
  }
  ~Simulation() { end(); }
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  std::vector<Outcome> run() {
    while (world_.now() < world_.record_until) {
      exhaust();
      // Whoever waits for a time looks at the clock this often at least.
      std::uint64_t next = std::min(world_.record_until, world_.now() + kPoll);
      for (const auto& caller : callers_) next = std::min(next, caller->wakes_at());
      controller_.hold_time_at(next);
      emulator::Controller::turn(&controller_);
    }
    std::vector<Outcome> outcomes;
    for (const auto& caller : callers_) outcomes.push_back(caller->take());
    return outcomes;
  }

 private:
  void add(const Actor& plan) {
    const auto number = static_cast<std::uint32_t>(callers_.size());
    if (plan.depth != 0) {
      callers_.push_back(std::make_unique<Batched>(world_, plan, number));
    } else {
      callers_.push_back(std::make_unique<Synchronous>(world_, plan, number));
    }
  }

  /// Gives every actor its turn until none has anything left to do now. Each instant another is the first.
  void exhaust() {
    const std::size_t first = instants_++ % callers_.size();
    bool moved;
    do {
      moved = false;
      const std::uint64_t before = state();
      for (std::size_t i = 0; i < callers_.size(); ++i) moved |= callers_[(first + i) % callers_.size()]->turn();
      moved |= state() != before;
    } while (moved);
  }
  /// Changes with everything that is staged or retired: the one only grows, and the other ends what it counts.
  std::uint64_t state() const {
    std::uint64_t staged = 0, flying = 0;
    for (const auto& pair : world_.handle.queues()) staged += pair->staged(), flying += pair->load();
    return staged << 24 | flying;
  }

  /// What is in flight ends by turns of the ordinary kind.
  void end() noexcept {
    controller_.hold_time_at(kNever);
    world_.handle.set_turn(turn_);
    callers_.clear();
    world_.handle.drain(5'000'000'000);
    engine::this_caller = number_;
  }

  World& world_;
  emulator::Controller& controller_;
  const engine::Turn turn_;
  const std::uint32_t number_;
  std::vector<std::unique_ptr<Caller>> callers_;
  std::size_t instants_ = 0;
};

[[noreturn]] void refuse(const std::string& cause, const std::string& hint) { fail(EINVAL, "simulate", cause, hint); }

void check(Handle& handle, const memory::Reference& buffer, std::span<const Actor> actors) {
  if (actors.empty()) refuse("there are no actors", "give one at least");
  if (handle.device().turn() == nullptr || handle.device().virtual_clock() == nullptr) {
    refuse("the device does not go by simulated time",
           "open an emulated one with pump=caller&clock=virtual in its address");
  }
  const std::uint64_t most = std::min(buffer.size, handle.geometry().capacity);
  for (const Actor& actor : actors) {
    if (actor.size == 0 || actor.size > most) {
      refuse("requests of " + std::to_string(actor.size) + " bytes, with a buffer of " + std::to_string(buffer.size) +
                 " and a device of " + std::to_string(handle.geometry().capacity),
             "use requests that fit into either");
    }
  }
}

}  // namespace

void register_control_mode() {
  engine::register_mode(kControlMode, [] { return std::make_unique<Unpaced>(); });
}

std::vector<Outcome> run(Handle& handle, const memory::Reference& buffer, std::span<const Actor> actors,
                         const Span& span) {
  check(handle, buffer, actors);
  auto& controller = dynamic_cast<device::EmulatedDevice&>(handle.device()).controller();
  const std::uint64_t start = controller.virtual_now_ns() + span.warm_up_ns;
  World world{.handle = handle,
              .buffer = buffer,
              .clock = *handle.device().virtual_clock(),
              .record_from = start,
              .record_until = start + span.duration_ns,
              .random = std::mt19937_64(span.seed),
              .held = std::vector<std::deque<const void*>>(handle.geometry().queue_count)};
  return Simulation(world, controller, actors).run();
}

}  // namespace ugds::simulation
