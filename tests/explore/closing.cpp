// SPDX-License-Identifier: Apache-2.0
//
// Batches and handles that are closed while something is in flight, in every order in which the device and the threads
// can act.
#include <doctest/doctest.h>

#include <cerrno>
#include <vector>

#include "engine/table.hpp"
#include "handle.hpp"

using namespace ugds;
using namespace ugds::explore;

namespace {

using engine::Batch;
using engine::Done;

/// Reads of a page each into A, as a batch takes them.
class Reads {
 public:
  static constexpr bool kOffsetsTell = false;
  explicit Reads(const memory::Reference& memory) : memory_(&memory) {}
  const memory::Reference& begin_run(std::size_t) { return *memory_; }
  const memory::Reference& buffer() const { return *memory_; }
  bool same_buffer(std::size_t) const { return true; }
  engine::Wanted operator()(std::size_t i) const {
    return {.offset = i * 4 * Controller::kBlock, .size = 4096, .buffer_offset = i * 4096, .cookie = i};
  }

 private:
  const memory::Reference* memory_;
};

/// A batch of reads into A, of which each is told of once or dropped by its closing.
class Reading {
 public:
  Reading(Opened& open, std::size_t count)
      : open_(open),
        told_(count),
        id_(open.handle().open_batch(8, engine::Priority::unsaid)),
        memory_(open.a().reference()) {
    open.a().spoil(0, count);
  }
  Batch& batch() { return *open_.handle().batch(id_.slot); }

  void submit() {
    submitted_ = batch().submit(id_.generation, told_.size(), false, Reads(memory_), [](std::size_t) { return false; });
    require(submitted_ == static_cast<std::int64_t>(told_.size()) || submitted_ == Batch::kClosed, kOnce,
            "a submission that has room was not taken");
  }
  void collect(std::size_t least, std::uint64_t limit_ns) {
    batch().collect(id_.generation, least, told_.size(), limit_ns, {}, [this](const Done& done) {
      require(!told_[done.cookie], kOnce, "a request of a batch was told of twice");
      told_[done.cookie] = true;
      if (done.result >= 0) open_.a().expect(open_.device(), done.cookie, done.cookie * 4, 1);
      require(
          open_.handle().state() == engine::State::wedged || !open_.device().touches(open_.a().page(done.cookie), 4096),
          kOnce, "a request of a batch was told of before its command had ended");
    });
  }
  void cancel() { batch().cancel(id_.generation); }
  void close() {
    require(open_.handle().close_batch(id_), "every execution ends", "a batch was not closed");
    closed_ = true;
    require(open_.handle().state() == engine::State::wedged ||
                !open_.device().touches(open_.a().page(0), told_.size() * 4096),
            kOnce, "a batch was closed before its commands had ended");
  }
  /// All that was submitted was told of, unless the batch was closed before.
  void expect_all() const {
    for (const bool told : told_)
      require(told || closed_ || submitted_ == Batch::kClosed, kOnce, "a request of a batch was never told of");
  }
  bool closed() const { return closed_; }

 private:
  Opened& open_;
  std::vector<bool> told_;
  engine::BatchId id_;
  memory::Reference memory_;
  std::int64_t submitted_ = 0;
  bool closed_ = false;
};

}  // namespace

TEST_CASE("a batch beyond its queue's depth, and its buffer's end") {
  explore::explore({"a batch, closing its buffer", 8}, [] {
    Opened open({.errors = 1, .unknown = 1, .fatal = 1, .stuck = true});
    Reading reading(open, 3);
    open.run({{"submitter",
               [&] {
                 begin("submit three reads");
                 reading.submit();
                 begin("collect all");
                 reading.collect(3, ~std::uint64_t{0} >> 1);
                 reading.expect_all();
               }},
              {"closer", [&] {
                 begin("close A");
                 open.a().close(&open.device());
               }}});
  });
}

TEST_CASE("a batch that is cancelled and closed while another thread collects") {
  explore::explore({"closing a batch", 9}, [] {
    Opened open({.errors = 0, .fatal = 1, .removals = 1, .stuck = true});
    Reading reading(open, 3);
    open.run({{"submitter",
               [&] {
                 begin("submit three reads");
                 reading.submit();
                 begin("collect one");
                 reading.collect(1, 100'000'000);
               }},
              {"closer", [&] {
                 begin("cancel");
                 reading.cancel();
                 begin("close the batch");
                 reading.close();
                 begin("close A");
                 open.a().close(&open.device());
               }}});
  });
}

namespace {

/// The same world for a handle that the table has.
class Tabled : public World {
 public:
  explicit Tabled(const Traits& traits) {
    next_device = std::make_unique<Controller>(traits);
    id_ = table().open("explored:", {.queues = 1, .depth = 3, .deadline_ns = 1'000'000'000});
    a_ = std::make_unique<Buffer>(0);
  }
  static engine::Table& table() { return engine::Table::instance(); }
  Buffer& a() { return *a_; }

  void read(std::size_t first, std::uint64_t lba) {
    const engine::Table::Use use(table(), id_);
    if (!use) return;
    a_->spoil(first, 1);
    const auto result = engine::run(*use, {nvme::Opcode::read, a_->reference(), lba * 4096, 4096, first * 4096});
    if (result >= 0) a_->expect(*Controller::living, first, lba, 1);
  }
  void close(engine::Table::Mode mode, std::uint64_t limit_ns = 0) {
    if (table().close(id_, mode, limit_ns) != 0) return;
    require(Controller::living == nullptr || Controller::living->may_run(), kReleased,
            "the handle is closed, its controller has stopped, and its device is open");
  }
  void abandon() { table().abandon(id_); }
  void run(const std::vector<Body>& bodies) {
    run_threads(*this, bodies);
    quiet_ = true;
    run_threads(*this, {{"the end", [this] { end(); }}});
    if (Controller::living != nullptr) start_anew();
  }

  std::uint32_t device_actions() override { return Controller::living != nullptr ? Controller::living->actions() : 0; }
  bool device_has_work() override { return Controller::living != nullptr && Controller::living->has_work(); }
  void act(std::uint32_t action) override { Controller::living->act(action); }
  std::string name_of(std::uint32_t action) override { return Controller::living->name_of(action); }
  bool quiet() override { return quiet_; }
  void check() override {
    if (Controller::living == nullptr) return;
    Controller::living->check();
    require(a_->is_open() || !a_->in_use(*Controller::living), kHeld, "a command of a closed registration is executed");
  }

 private:
  void end() {
    if (Controller::living != nullptr) {
      if (a_->is_open() && a_->in_use(*Controller::living))
        require(a_->close(Controller::living) == EBUSY, kQuarantine, "a quarantined registration was closed");
      Controller::living->mend();
      const int code = table().close(id_, engine::Table::Mode::force, 60'000'000'000);
      if (code == ESTALE) return;  // leaked on purpose
      require(code == 0, kQuarantine, "a handle is not closed though its controller stops");
    }
    require(!a_->is_open() || a_->close(nullptr) != EBUSY, kCounts, "a registration stays in use");
    require(memory::Registry::instance().open_registrations() == 0, kReleased, "a registration is left");
  }
  /// After a controller that nothing stopped, whose memory is held for ever: that does not concern the next execution.
  static void start_anew() {
    Controller::living->forget();
    delete Controller::living;  // NOLINT: its handle has forgotten it
    memory::registry.value.~Registry();
    new (&memory::registry.value) memory::Registry();
  }

  engine::HandleId id_ = 0;
  std::unique_ptr<Buffer> a_;
  bool quiet_ = false;
};

void close_each_way(const Traits& traits) {
  using Mode = engine::Table::Mode;
  Tabled open(traits);
  open.run({{"reader",
             [&] {
               begin("read into A");
               open.read(0, 0);
             }},
            {"closer",
             [&] {
               begin("close the handle if nobody uses it");
               open.close(Mode::check);
               begin("close the handle within a bound");
               open.close(Mode::bounded, 500'000'000);
               begin("close the handle by force");
               open.close(Mode::force, 3'000'000'000);
             }},
            {"owner", [&] {
               begin("close A");
               open.a().close(Controller::living);
             }}});
}

}  // namespace

TEST_CASE("a handle that is closed by each of the four ways") {
  explore::explore({"closing a handle", 9}, [] { close_each_way({.errors = 1, .fatal = 1, .removals = 1}); });
}

TEST_CASE("a handle that is closed while its controller cannot be stopped") {
  explore::explore({"closing a handle that cannot be stopped", 7},
                   [] { close_each_way({.errors = 0, .aborts = false, .stuck = true}); });
}

TEST_CASE("a handle that is abandoned, whatever its controller does") {
  explore::explore({"abandoning a handle", 9}, [] {
    Tabled open({.errors = 0, .aborts = false, .stuck = true});
    open.run({{"reader",
               [&] {
                 begin("read into A");
                 open.read(0, 0);
               }},
              {"closer", [&] {
                 begin("abandon the handle");
                 open.abandon();
                 begin("close A");
                 if (open.a().is_open()) open.a().close(Controller::living);
               }}});
  });
}
