// SPDX-License-Identifier: Apache-2.0
#include "handle.hpp"

#include <cerrno>
#include <cstring>

namespace ugds::explore {

using nvme::Opcode;

namespace {

/// Where requests live one after the other. What is left of one that has ended is a pattern, and stays one.
class Graves {
 public:
  static constexpr std::size_t kSize = 1024;
  std::byte* take() {
    require(used_ < kSlots, "an execution is short", "it makes too many requests");
    return slots_[used_++];
  }
  static void bury(std::byte* slot) {
    flush_stores();
    std::memset(slot, 0xa5, kSize);
  }
  void check() {
    for (std::size_t i = 0; i < used_; ++i) {
      for (std::size_t j = 0; j < kSize; ++j)
        require(slots_[i][j] == std::byte{0xa5}, kOnce, "a request was written to after its end was told");
    }
    used_ = 0;
  }

 private:
  static constexpr std::size_t kSlots = 16;
  alignas(64) std::byte slots_[kSlots][kSize];
  std::size_t used_ = 0;
};
Graves graves;

}  // namespace

Opened::Opened(const Traits& traits, std::uint32_t depth) {
  next_device = std::make_unique<Controller>(traits);
  engine::Policy policy;
  policy.queues = traits.queues;
  policy.depth = depth;
  policy.deadline_ns = 1'000'000'000;
  handle_ = std::make_unique<engine::Handle>("explored:", policy);
  for (unsigned i = 0; i < 2; ++i) buffers_[i] = std::make_unique<Buffer>(i);
}

Opened::~Opened() = default;

std::int64_t Opened::run_transfer(Way way, const engine::Transfer& t, const engine::Interrupt& interrupt) {
  using engine::OneCommand;
  using engine::Operation;
  static_assert(sizeof(Operation) <= Graves::kSize && sizeof(OneCommand) <= Graves::kSize);
  if (way == Way::short_way) {
    std::byte* const slot = graves.take();
    auto* const one = new (slot) OneCommand;
    if (one->start(*handle_, engine::caller_number(), t.opcode, t.buffer, t.offset, t.size, t.buffer_offset)) {
      bool done = false;
      for (unsigned turn = 0; turn < engine::kPatience && !done; ++turn) done = one->turn(handle_->turn());
      const std::int64_t result =
          done && !one->failed() ? static_cast<std::int64_t>(t.size) : one->resume(*handle_, t, interrupt);
      one->~OneCommand();
      Graves::bury(slot);
      return result;
    }
    one->~OneCommand();
    Graves::bury(slot);
  }
  std::byte* const slot = graves.take();
  auto* const operation = new (slot) Operation(*handle_, t);
  const std::int64_t result = finish(*operation, interrupt);
  operation->~Operation();
  Graves::bury(slot);
  return result;
}

std::int64_t Opened::read(Way way, memory::Reference memory, Buffer& buffer, std::size_t first, std::uint64_t lba,
                          std::size_t pages, const engine::Interrupt& interrupt) {
  buffer.spoil(first, pages);
  const engine::Transfer transfer{.opcode = Opcode::read,
                                  .buffer = memory,
                                  .offset = lba * Controller::kBlock,
                                  .size = pages * Controller::kBlock,
                                  .buffer_offset = first * 4096};
  const std::int64_t result = run_transfer(way, transfer, interrupt);
  if (result >= 0) {
    require(result == static_cast<std::int64_t>(transfer.size), kBytes, "a read that succeeded was of another size");
    buffer.expect(device(), first, lba, pages);
  }
  const bool given_up = result == -EINTR || handle_->state() == engine::State::wedged;
  require(given_up || !device().touches(buffer.page(first), pages * 4096), kOnce,
          "a request was told of before its commands had ended");
  return result;
}

std::int64_t Opened::write(Way way, Buffer& buffer, std::size_t first, std::uint64_t lba) {
  const std::uint64_t value = 0xdada'0000 + lba;
  std::memcpy(buffer.page(first), &value, sizeof value);
  const engine::Transfer transfer{.opcode = Opcode::write,
                                  .buffer = buffer.reference(),
                                  .offset = lba * Controller::kBlock,
                                  .size = Controller::kBlock,
                                  .buffer_offset = first * 4096};
  const std::int64_t result = run_transfer(way, transfer, {});
  if (result >= 0) require(device().word(lba) == value, kBytes, "a write that succeeded is not there");
  return result;
}

void Opened::check() {
  if (Controller::living == nullptr) return;
  device().check();
  for (const auto& buffer : buffers_) {
    if (buffer == nullptr) continue;
    if (buffer->is_open() && buffer->is_gone() && buffer->leaving()) buffer->forget();
    if (!buffer->in_use(device())) continue;
    require(buffer->is_open(), kHeld, "a command of a closed registration may still be executed");
    // Counts are summed under a lock, which a thread that was interrupted may have.
    require(fine || memory::Registry::instance().in_flight(buffer->reference()) != 0, kHeld,
            "a command that may still be executed is not counted");
  }
}

void Opened::run(const std::vector<Body>& bodies, Fineness fineness) {
  run_threads(*this, bodies, fineness);
  quiet_ = true;
  run_threads(*this, {{"the end", [this] { end(); }}});
  graves.check();
}

void Opened::end() {
  using engine::State;
  auto& registry = memory::Registry::instance();
  handle_->check_controller();  // what happened last may have been seen by nobody
  if (device().has_left_the_bus()) {
    require(handle_->state() == State::lost, "a device that has left the bus is lost, and holds nothing",
            engine::state_name(handle_->state()));
  }
  require(handle_->state() != State::recovering, "every execution ends", "recovery never came to an end");
  if (handle_->state() == State::wedged) {
    for (auto& buffer : buffers_) {
      if (buffer->is_open() && buffer->in_use(device()))
        require(buffer->close(&device()) == EBUSY, kQuarantine, "a quarantined registration was closed");
    }
    device().mend();
    require(handle_->force_stop(), kQuarantine, "a reset that worked did not end the quarantine");
    require(handle_->in_flight() == 0, kQuarantine, "something stays quarantined though the controller has stopped");
  }
  device().mend();
  require(handle_->drain(60'000'000'000), "every execution ends", "draining did not end");
  for (auto& buffer : buffers_) {
    if (buffer->is_open()) {
      const int code = buffer->close(&device());
      require(code != EBUSY, kCounts, "a registration stays in use though nothing is in flight");
    }
    require(registry.in_flight(buffer->stale()) == 0, kCounts, "a registration stays counted");
  }
  if (handle_->state() == State::ready) {
    a().add();
    require(read(Way::short_way, a().reference(), a(), 5, 60) == 4096, "the handle works after recovery",
            "a read failed");
    require(a().close(&device()) == 0, kCounts, "a registration stays in use after a read");
  }
  handle_.reset();
  require(Controller::living == nullptr, kReleased, "the device is not closed");
  require(registry.open_registrations() == 0, kReleased, "a registration is left");
}

}  // namespace ugds::explore
