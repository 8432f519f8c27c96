// SPDX-License-Identifier: Apache-2.0
//
// A whole handle on a made-up controller: from the registers as they are found, over Identify and the queues, to
// requests and recovery. Whatever the controller does, it opens or says why not; every request ends, once, and not with
// success unless the controller has posted all of it; nothing but mapped memory is named; and nothing is left.
#include <array>
#include <memory>
#include <vector>

#include "base/error.hpp"
#include "base/text.hpp"
#include "controller.hpp"
#include "engine/batch.hpp"
#include "engine/handle.hpp"
#include "engine/operation.hpp"
#include "memory/registry.hpp"

namespace ugds::fuzz {

namespace {

/// What the next opening gets, by the linker's --wrap, in the place of what a URI names.
std::unique_ptr<device::Device> waiting;

constexpr std::uint64_t kGuard = 4096, kSize = 64_KiB;
alignas(4096) std::array<std::uint8_t, kGuard + kSize + kGuard> memory;

memory::Reference buffer() {
  static const memory::Reference made =
      memory::Registry::instance().add(memory.data() + kGuard, kSize, memory::Kind::host, false);
  return made;
}

bool is_intact(const std::uint8_t* guard) {
  return std::all_of(guard, guard + kGuard, [](std::uint8_t byte) { return byte == 0xa5; });
}

struct Wish {
  nvme::Opcode opcode;
  std::uint64_t offset, size, place;
};

Wish wish(Input& input) {
  constexpr nvme::Opcode kinds[] = {nvme::Opcode::read, nvme::Opcode::write, nvme::Opcode::flush};
  Wish made{};
  made.opcode = kinds[input.below(3)];
  made.size = (1 + input.below(64)) * Controller::kBlock;
  made.offset = input.below(192) * Controller::kBlock;
  made.place = input.below(60) * 512;
  return made;
}

/// For Batch::submit.
struct Requests {
  static constexpr bool kOffsetsTell = false;
  const std::vector<Wish>* wishes;
  memory::Reference begin_run(std::size_t) const { return fuzz::buffer(); }
  memory::Reference buffer() const { return fuzz::buffer(); }
  bool same_buffer(std::size_t) const { return true; }
  engine::Wanted operator()(std::size_t i) const {
    const Wish& one = (*wishes)[i];
    return {.offset = one.offset,
            .size = one.size,
            .buffer_offset = one.place,
            .cookie = i,
            .write = one.opcode == nvme::Opcode::write};
  }
};

class Run {
 public:
  explicit Run(Input& input) {
    engine::Policy policy;
    policy.queues = 1 + (input.byte() + 1) % 3;
    policy.depth = input.byte() % 8 == 0 ? 0 : 2 + input.below(40);
    policy.namespace_id = input.byte() % 4;
    policy.deadline_ns = 50'000;
    wishes_.resize(1 + input.below(5));
    for (Wish& one : wishes_) one = wish(input);
    std::vector<Deviation> deviations;
    while (!input.empty() && deviations.size() < 12) deviations.push_back(Deviation::read(input));
    auto device = std::make_unique<Controller>(std::move(deviations));
    controller_ = device.get();
    waiting = std::move(device);
    handle_ = std::make_unique<engine::Handle>("fuzz:controller", policy);
  }

  void go() {
    const auto& identity = handle_->identity();
    demand(identity.block_size >= 512 && identity.block_size <= 65536, "a block size that can be");
    demand(identity.max_transfer >= identity.block_size && identity.max_transfer <= engine::kMaxChunk, "a transfer");
    demand(identity.blocks != 0 && identity.blocks <= (std::uint64_t{1} << 62) / identity.block_size, "a capacity");
    for (const Wish& one : wishes_) alone(one);
    together();
    demand(handle_->drain(2'000'000'000) || handle_->state() == engine::State::wedged, "what is in flight ends");
  }

 private:
  void alone(const Wish& one) {
    std::fill(memory.begin(), memory.end(), std::uint8_t{0xa5});
    controller_->account = {};
    const engine::Transfer transfer{.opcode = one.opcode,
                                    .buffer = one.opcode == nvme::Opcode::flush ? memory::Reference{} : buffer(),
                                    .offset = one.offset,
                                    .size = one.opcode == nvme::Opcode::flush ? 0 : one.size,
                                    .buffer_offset = one.place};
    const std::int64_t result = engine::run(*handle_, transfer);
    demand(is_intact(memory.data()) && is_intact(memory.data() + kGuard + kSize), "memory beside the buffer is left");
    if (result < 0) return demand(last_error().code == -result, "an error has its words");
    demand(result == static_cast<std::int64_t>(transfer.size), "all of a request, or an error");
    // The controller counts in blocks of its own, whatever it has stated.
    if (handle_->identity().block_size != Controller::kBlock) return;
    demand(controller_->account.posted >= std::max<std::uint64_t>(one.opcode == nvme::Opcode::flush, transfer.size),
           "no success of what the controller has not posted");
    if (one.opcode != nvme::Opcode::read || controller_->account.deviated) return;
    for (std::uint64_t i = 0; i < one.size; ++i) {
      const std::uint64_t at = one.offset + i;
      demand(memory[kGuard + one.place + i] == Controller::content(at / Controller::kBlock, at % Controller::kBlock),
             "the data of a read");
    }
  }

  void together() {
    const engine::BatchId id = handle_->open_batch(8, engine::Priority::unsaid);
    engine::Batch& batch = *handle_->batch(id.slot);
    controller_->account = {};
    const std::int64_t taken =
        batch.submit(id.generation, wishes_.size(), false, Requests{&wishes_}, [](std::size_t) { return false; });
    demand(taken == static_cast<std::int64_t>(wishes_.size()), "a batch with room takes all");
    std::array<unsigned, 8> told{};
    std::uint64_t right = 0;
    const auto sink = [&](const engine::Done& done) {
      demand(done.cookie < wishes_.size(), "what is told was asked");
      ++told[done.cookie];
      if (done.result >= 0) right += static_cast<std::uint64_t>(done.result);
      demand(done.result < 0 || done.result == static_cast<std::int64_t>(wishes_[done.cookie].size),
             "all, or an error");
    };
    batch.collect(id.generation, wishes_.size(), 8, 3'600'000'000'000, {}, sink);
    for (std::size_t i = 0; i < wishes_.size(); ++i) demand(told[i] == 1, "each request of a batch is told of once");
    demand(handle_->identity().block_size != Controller::kBlock || controller_->account.posted >= right,
           "no success in a batch of what the controller has not posted");
    demand(handle_->close_batch(id), "a batch is closed");
  }

  Controller* controller_ = nullptr;
  std::unique_ptr<engine::Handle> handle_;
  std::vector<Wish> wishes_;
};

void run(Input& input) {
  static_cast<void>(buffer());
  const QuickTime quick;
  try {
    Run(input).go();
  } catch (const Failure& failure) {
    demand(failure.error().code > 0 && failure.error().cause[0] != '\0', "a refusal has a code and a cause");
  }
  waiting.reset();
  demand(memory::Registry::instance().in_flight(buffer()) == 0, "nothing holds the buffer when the device is closed");
}

const Target target("bring_up", run);

}  // namespace

std::unique_ptr<device::Device> open_real(const std::string& text, const Uri& uri) __asm__(
    "__real__ZN4ugds6device4openERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKNS_3UriE");
std::unique_ptr<device::Device> open_made_up(const std::string& text, const Uri& uri) __asm__(
    "__wrap__ZN4ugds6device4openERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKNS_3UriE");
std::unique_ptr<device::Device> open_made_up(const std::string& text, const Uri& uri) {
  return waiting ? std::move(waiting) : open_real(text, uri);
}

}  // namespace ugds::fuzz
