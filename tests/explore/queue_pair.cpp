// SPDX-License-Identifier: Apache-2.0
//
// A queue pair, the registry and its ledgers under every sequence of events: submitting, completing, reaping, letting
// go, resetting, closing and registering again, with a controller that may lie in what it posts.
#include "queue/queue_pair.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>

#include "buffers.hpp"
#include "engine/bring_up.hpp"
#include "nvme/status.hpp"

using namespace ugds;
using namespace ugds::explore;

namespace {

constexpr std::uint16_t kStopped = nvme::make_status(nvme::StatusType::path, 0x71);
constexpr std::size_t kMostRequests = 4;

/// A request, where it lies until the end: what is written to it after it was told of is seen.
struct Submitted {
  queue::ToldRequest request;
  unsigned buffer = 0;
  std::size_t first = 0, pages = 1;
  std::uint64_t lba = 0;
  bool told = false;  ///< its end goes to the list
  bool orphaned = false;
  bool ended = false;
};

class Rig {
 public:
  explicit Rig(const Traits& traits) : device_(traits), bringup_(device_) {
    bringup_.enable();
    number_ = registry().attach(device_);
    pair_ = std::make_unique<queue::QueuePair>(
        device_, queue::Shape{.id = 1, .depth = 3, .completion_depth = 3, .list_pages = 1},
        bringup_.submission_doorbell(1), bringup_.completion_doorbell(1));
    registry().add_ledger(pair_->ledger());
    bringup_.create(*pair_, {});
    for (unsigned i = 0; i < 2; ++i) buffers_[i] = std::make_unique<Buffer>(i);
  }

  void run() {
    do check();
    while (step());
    end();
  }

 private:
  static memory::Registry& registry() { return memory::Registry::instance(); }

  struct Event {
    enum Kind { device, reap, finish, read, read_list, read_told, stale, close, leave, again, orphan, reset } kind;
    std::uint32_t argument = 0;
  };

  /// False: that was the end.
  bool step() {
    events_.clear();
    const std::uint32_t actions = device_.actions();
    // The first leads to the end.
    if (!device_.has_work()) events_.push_back({posted_ != 0 ? Event::reap : Event::finish});
    for (std::uint32_t i = 0; i < actions; ++i) events_.push_back({Event::device, i});
    if (device_.has_work() || posted_ == 0) events_.push_back({Event::reap});
    const bool more = count_ < kMostRequests;
    for (std::uint32_t b = 0; b < 2; ++b) {
      const Buffer& buffer = *buffers_[b];
      if (buffer.is_open() && more && pair_->has_room(0)) events_.push_back({Event::read, b});
      if (b != 0) continue;  // what follows is the same for both
      if (buffer.is_open() && more && pair_->has_room(1)) events_.push_back({Event::read_list, b});
      if (buffer.is_open() && more && pair_->has_room(0)) events_.push_back({Event::read_told, b});
      if (buffer.stale() && pair_->has_room(0)) events_.push_back({Event::stale, b});
      if (buffer.is_open()) events_.push_back({Event::close, b});
      if (buffer.is_open() && !buffer.leaving()) events_.push_back({Event::leave, b});
      if (!buffer.is_open() && !buffer.stale()) continue;
      if (!buffer.is_open()) events_.push_back({Event::again, b});
    }
    for (std::uint32_t i = 0; i < count_; ++i) {
      const Submitted& s = submitted_[i];
      if (!s.ended && !s.orphaned && !s.told) {
        events_.push_back({Event::orphan, i});
        break;  // the oldest
      }
    }
    if (resets_ < 1) events_.push_back({Event::reset});
    const std::uint32_t taken = choose(static_cast<std::uint32_t>(events_.size()), "then",
                                       [&](std::uint32_t i) { return name_of(events_[i]); });
    return happen(events_[taken]);
  }

  std::string name_of(const Event& event) const {
    const std::string of(1, static_cast<char>('A' + event.argument));
    switch (event.kind) {
      case Event::device: return "the device " + device_.name_of(event.argument);
      case Event::reap: return "reap";
      case Event::finish: return "the end";
      case Event::read: return "read into " + of;
      case Event::read_list: return "read three pages into " + of;
      case Event::read_told: return "read into " + of + ", told to a list";
      case Event::stale: return "hold " + of + " by a stale reference";
      case Event::close: return "close " + of;
      case Event::leave: return "close " + of + " when idle";
      case Event::again: return "register " + of + " again";
      case Event::orphan: return "let go of request " + std::to_string(event.argument);
      case Event::reset: return "reset";
    }
    return "?";
  }

  bool happen(const Event& event) {
    switch (event.kind) {
      case Event::device: {
        const std::size_t before = device_.posted();
        device_.act(event.argument);
        posted_ += device_.posted() - before;
        return true;
      }
      case Event::reap:
        pair_->reap();
        posted_ = 0;
        return true;
      case Event::finish: return false;
      case Event::read: return submit(event.argument, 1, false);
      case Event::read_list: return submit(event.argument, 3, false);
      case Event::read_told: return submit(event.argument, 1, true);
      case Event::stale: {
        const memory::Reference& stale = buffers_[event.argument]->stale();
        const std::uint64_t before = registry().in_flight(stale);
        require(memory::hold(pair_->ledger(), stale) == memory::Hold::stale, kStale, "it held");
        require(registry().in_flight(stale) == before, kCounts, "a hold that failed was counted");
        return true;
      }
      case Event::close: buffers_[event.argument]->close(&device_); return true;
      case Event::leave: buffers_[event.argument]->close_when_idle(); return true;
      case Event::again: buffers_[event.argument]->add(); return true;
      case Event::orphan:
        submitted_[event.argument].orphaned = true;
        pair_->orphan(submitted_[event.argument].request);
        return true;
      case Event::reset:
        ++resets_;
        restart();
        return true;
    }
    return true;
  }

  bool submit(unsigned b, std::size_t pages, bool told) {
    Buffer& buffer = *buffers_[b];
    const memory::Hold hold = memory::hold(pair_->ledger(), buffer.reference());
    if (hold != memory::Hold::held) {
      require(buffer.leaving() && hold == memory::Hold::stale, kHeld, "an open registration was not held");
      return true;
    }
    Submitted& s = submitted_[count_];
    s.buffer = b;
    s.pages = pages;
    s.first = pages == 3 ? 3 : count_ % 3;
    s.lba = count_ * 4;
    s.told = told;
    s.request.on_idle = told ? queue::OnIdle::tell : queue::OnIdle::done;
    s.request.list = &finished_;
    ++count_;
    buffer.spoil(s.first, pages);
    const auto index = buffer.reference().registration->index();
    const auto* addresses = buffer.reference().registration->pages(number_);
    pair_->next() = nvme::block_command(nvme::Opcode::read, 1, Lba(s.lba), static_cast<std::uint32_t>(pages));
    pair_->stage_data(s.request, false, index, {addresses, s.first * 4096}, 0,
                      static_cast<std::uint32_t>(pages * 4096));
    pair_->ring();
    return true;
  }

  void restart() {
    require(bringup_.disable(), "a reset works", "the controller did not stop");
    pair_->restart(kStopped, bringup_.submission_doorbell(1), bringup_.completion_doorbell(1));
    posted_ = 0;
    bringup_.enable();
    pair_->restart(kStopped, bringup_.submission_doorbell(1), bringup_.completion_doorbell(1));
    bringup_.create(*pair_, {});
  }

  void check() {
    device_.check();
    require(!pair_->distrusted() || !device_.keeps_rules(), "a controller that keeps the rules is trusted",
            "it was taken for a liar");
    std::uint64_t ended_to_list = 0, in_flight = 0;
    for (std::size_t i = 0; i < count_; ++i) {
      Submitted& s = submitted_[i];
      const queue::Request& r = s.request;
      const bool over = s.orphaned ? false : r.in_flight == 0;
      in_flight += r.in_flight;
      if (s.told) {
        ended_to_list += over;
      } else {
        require((r.done.load() != 0) == over, kOnce, "its done word and its commands do not agree");
      }
      require(!s.ended || over, kOnce, "a request that had ended began anew");
      if (over && !s.ended) {
        s.ended = true;
        require(!device_.touches(buffers_[s.buffer]->page(s.first), s.pages * 4096), kOnce,
                "it was told of before its command had ended");
        if (!r.failed()) buffers_[s.buffer]->expect(device_, s.first, s.lba, s.pages);
      }
    }
    require(finished_.count() == ended_to_list, kOnce, "another number of requests was told to the list than ended");
    for (const auto& buffer : buffers_) {
      if (buffer->is_open() && buffer->is_gone()) {
        require(buffer->leaving(), kHeld, "a registration was closed by nobody");
        require(!buffer->in_use(device_), kHeld, "it was closed when idle, and was not idle");
        buffer->forget();
      }
      if (!buffer->is_open())
        require(!buffer->in_use(device_), kHeld, "a command of a closed registration is executed");
      if (buffer->is_open() && buffer->in_use(device_))
        require(registry().in_flight(buffer->reference()) != 0, kHeld, "a command that is executed is not counted");
    }
  }

  void end() {
    require(pair_->reap() == 0, kOnce, "completions are found where none were posted");
    check();
    if (pair_->distrusted()) restart();  // as its users do
    require(pair_->load() == 0, kCounts, "commands stay in flight though all have ended");
    for (auto& buffer : buffers_) {
      const memory::Reference& last = buffer->is_open() ? buffer->reference() : buffer->stale();
      require(registry().in_flight(last) == 0, kCounts, "a registration stays counted though all commands have ended");
      if (buffer->is_open()) require(buffer->close(&device_) != EBUSY, kNotRefused, "nothing is in flight");
    }
    require(bringup_.disable(), "a reset works", "the controller did not stop");
    registry().detach(number_, false);
    registry().remove_ledger(pair_->ledger());
    require(registry().open_registrations() == 0, kReleased, "a registration is left");
    pair_.reset();
  }

  Controller device_;
  engine::Bringup bringup_;
  std::uint32_t number_ = 0;
  std::unique_ptr<queue::QueuePair> pair_;
  std::unique_ptr<Buffer> buffers_[2];
  queue::Finished finished_;
  Submitted submitted_[kMostRequests];
  std::size_t count_ = 0, posted_ = 0;
  std::uint32_t resets_ = 0;
  std::vector<Event> events_;
};

}  // namespace

TEST_CASE("a queue pair and its registrations under every sequence of events") {
  explore::explore({"queue pair, a controller that keeps the rules", 7}, [] { Rig({.errors = 0}).run(); });
}

TEST_CASE("a queue pair and its registrations under every sequence of events and lies") {
  explore::explore({"queue pair, a controller that posts what it should not", 6},
                   [] { Rig({.errors = 1, .duplicates = 1, .unknown = 1, .bad_heads = 1}).run(); });
}
