// SPDX-License-Identifier: Apache-2.0
//
// A real queue pair whose completion ring is filled from the input, by a controller that may write anything anywhere in
// it at any time. Whatever comes: no request is told twice, none succeeds for which the controller has not posted a
// success of each of its commands, each command's registration is held exactly while it is in flight, and after a
// restart nothing is in flight.
#include <array>
#include <memory>
#include <vector>

#include "fuzz.hpp"
#include "memory/ledger.hpp"
#include "queue/queue_pair.hpp"

namespace ugds::fuzz {

namespace {

using queue::QueuePair;

/// A controller that does nothing by itself. IOVAs are addresses.
class Nothing final : public device::Device {
 public:
  const std::string& uri() const override { return uri_; }
  device::Transport transport() const override { return device::Transport::emulated; }
  device::Limits limits() const override { return {}; }
  std::uint32_t read32(std::uint32_t) override { return 0; }
  std::uint64_t read64(std::uint32_t) override { return 0; }
  void write32(std::uint32_t, std::uint32_t) override { ++rings; }
  void write64(std::uint32_t, std::uint64_t) override {}
  std::uint32_t* doorbell(std::uint32_t) override { return nullptr; }
  device::Mapping map(void* address, Bytes length, device::Access, std::uint64_t* pages) override {
    const auto first = reinterpret_cast<std::uintptr_t>(address);
    for (std::uint64_t at = 0; at < length.value; at += nvme::kPageSize) *pages++ = first + at;
    ++mapped;
    return {first, length};
  }
  void unmap(const device::Mapping&) noexcept override { --mapped; }
  bool reset() noexcept override { return true; }
  int mapped = 0;
  std::uint64_t rings = 0;

 private:
  std::string uri_ = "fuzz:completions";
};

constexpr std::uint32_t kRegistration = 7;

struct Asked : queue::ToldRequest {
  std::uint32_t told = 0;
  bool gone = false;        ///< orphaned
  std::uint32_t wrong = 0;  ///< commands whose only posted completions were failures
};

struct InFlight {
  std::uint16_t cid = 0;
  std::uint64_t staged = 0;  ///< as the queue pair knows it, in made-up ticks that no two commands share
  Asked* request = nullptr;
  bool posted = false;   ///< some completion that names it was posted since it was staged, or lay there before
  bool success = false;  ///< one that says success
};

class Run {
 public:
  explicit Run(Input& input) : input_(input), depth_(2 + input.below(31)), extra_(input.below(40)) {
    const queue::Shape shape{.id = 1, .depth = depth_, .completion_depth = depth_ + extra_, .list_pages = 4};
    pair_ =
        std::make_unique<QueuePair>(device_, shape, queue::Doorbell(device_, 0x1008), queue::Doorbell(device_, 0x100c));
    ring_ = reinterpret_cast<nvme::CompletionEntry*>(pair_->completion_ring().value);
  }
  ~Run() {
    pair_.reset();
    demand(device_.mapped == 0, "what a queue pair mapped is unmapped with it");
  }

  void go() {
    for (unsigned i = 0; i < 400 && !input_.empty(); ++i) step();
    restart();
    for (const auto& request : requests_) {
      demand(request->in_flight == 0, "nothing is in flight after a restart");
      const bool is_told = request->on_idle == queue::OnIdle::tell && request->list == &finished_;
      demand(request->gone || (is_told ? request->told == 1 : request->done.load() == 1),
             "each request is told of once");
    }
  }

 private:
  void step() {
    switch (input_.below(8)) {
      case 0: return ask();
      case 1: return pair_->ring();
      case 2:
      case 3: return post();
      case 4: pair_->reap(); break;
      case 5:
        if (!requests_.empty())
          pair_->reap_until(*requests_[input_.below(static_cast<std::uint32_t>(requests_.size()))]);
        break;
      case 6: return orphan();
      default:
        if (input_.byte() % 4 == 0) return restart();
        if (input_.byte() % 16 == 1) pair_->disbelieve();
        return;
    }
    settle();
  }

  /// A request of some commands, a waiter's or a list's.
  void ask() {
    const bool tells = (input_.byte() & 1) != 0;
    const std::uint32_t commands = 1 + input_.below(4);
    auto request = std::make_unique<Asked>();
    request->list = &finished_;
    request->on_idle = tells ? queue::OnIdle::wait_to_tell : queue::OnIdle::wait;
    std::uint64_t offset = 0;
    for (std::uint32_t i = 0; i < commands; ++i) {
      const std::uint32_t bytes = 4096 * (1 + input_.below(4)) - 512 * input_.below(4);
      if (!pair_->has_room(nvme::list_pages_needed(bytes / 4096 + 2, 4096))) break;
      nvme::SubmissionEntry& entry = pair_->next();
      entry = nvme::block_command(nvme::Opcode::read, 1, Lba(0), 1);
      pair_->ledger().add(kRegistration);
      now_ += 0x9e37'79b9'7f4a'7c15;
      pair_->stage_data(*request, false, kRegistration, {pages_.data(), 4096 - 512}, offset, bytes, 0, now_);
      offset += bytes;
      demand(find(entry.cid) == nullptr, "no identifier is used twice at once");
      const bool there = lies_there(entry.cid);
      in_flight_.push_back({entry.cid, now_, request.get(), there, there});
    }
    if (request->in_flight == 0) return;
    request->on_idle = queue::ending(request->on_idle);
    requests_.push_back(std::move(request));
  }

  /// Whether the ring has an entry of that identifier, from before: taken for this command's it cannot be told apart.
  bool lies_there(std::uint16_t cid) const {
    for (std::uint32_t i = 0; i < depth_ + extra_; ++i)
      if (nvme::CompletionWord{ring_[i].last}.cid() == cid) return true;
    return false;
  }

  void post() {
    const std::uint8_t how = input_.byte();
    const std::uint32_t size = depth_ + extra_;
    std::uint32_t place = tail_;
    bool phase = phase_;
    if ((how & 0x10) != 0) place = input_.below(size);
    if ((how & 0x20) != 0) phase = !phase;
    std::uint16_t cid = pick();
    if ((how & 0x40) != 0) cid = input_.value<std::uint16_t>();
    const std::uint16_t status = (how & 1) != 0 ? input_.value<std::uint16_t>() & 0x7ff : 0;
    nvme::CompletionEntry& entry = ring_[place];
    entry.sq_head = (how & 2) != 0 ? input_.value<std::uint16_t>() : 0;
    entry.result = input_.byte();
    entry.last = nvme::CompletionWord::make(cid, phase, status).raw;
    if (InFlight* named = find(cid); named != nullptr) {
      named->posted = true;
      named->success = named->success || status == 0;
    }
    if ((how & 0x10) == 0 && ++tail_ == size) {
      tail_ = 0;
      phase_ = !phase_;
    }
  }

  InFlight* find(std::uint16_t cid) {
    for (InFlight& one : in_flight_)
      if (one.cid == cid) return &one;
    return nullptr;
  }
  /// An identifier that is in flight, where there is one.
  std::uint16_t pick() {
    const std::uint8_t which = input_.byte();
    return in_flight_.empty() ? std::uint16_t{0} : in_flight_[which % in_flight_.size()].cid;
  }

  /// What the queue pair says has retired is taken out of the model, and must have been posted.
  void settle(bool restarted = false) {
    std::erase_if(in_flight_, [&](InFlight& one) {
      if (pair_->is_in_flight(one.cid, one.staged)) return false;
      demand(one.posted || restarted, "no command retires without a completion that names it");
      if (!one.success) ++one.request->wrong;
      return true;
    });
    const auto left = static_cast<std::uint32_t>(in_flight_.size()), held = left;
    demand(left == pair_->load(), "as many identifiers are taken as commands are in flight");
    demand(pair_->ledger().count(kRegistration) == held, "a registration is held while its commands are in flight");
    while (!finished_.empty()) {
      finished_.take(1, [](queue::ToldRequest& told) { ++static_cast<Asked&>(told).told; });
    }
    for (const auto& request : requests_) check(*request);
  }

  void check(const Asked& request) const {
    demand(request.told <= 1, "no request is told of twice");
    if (request.gone) return demand(request.told == 0 && request.done.load() == 0, "an orphan is told of to nobody");
    const bool ended = request.told == 1 || request.done.load() == 1;
    if (!ended) return;
    demand(request.in_flight == 0, "a request that has ended has nothing in flight");
    demand(request.failed() || request.wrong == 0,
           "no request succeeds whose commands were not all posted as successful");
  }

  void orphan() {
    if (requests_.empty()) return;
    Asked& request = *requests_[input_.below(static_cast<std::uint32_t>(requests_.size()))];
    if (request.gone || request.in_flight == 0) return;
    pair_->orphan(request);
    request.gone = true;
    demand(request.in_flight == 0, "an orphan has nothing in flight");
  }

  void restart() {
    pair_->restart(nvme::CompletionWord::make(0, false, 0x371).status(), queue::Doorbell(device_, 0x1008),
                   queue::Doorbell(device_, 0x100c));
    tail_ = 0;
    phase_ = true;
    settle(true);
    demand(pair_->load() == 0 && !pair_->distrusted(), "a restarted queue pair is as new");
  }

  Input& input_;
  std::uint32_t depth_, extra_;
  Nothing device_;
  std::unique_ptr<QueuePair> pair_;
  nvme::CompletionEntry* ring_ = nullptr;
  queue::Finished finished_;
  std::vector<std::unique_ptr<Asked>> requests_;
  std::vector<InFlight> in_flight_;
  std::uint64_t now_ = 0;
  std::array<std::uint64_t, 8> pages_{4096, 8192, 12288, 16384, 20480, 24576, 28672, 32768};
  std::uint32_t tail_ = 0;
  bool phase_ = true;
};

const Target target("completions", [](Input& input) { Run(input).go(); });

}  // namespace

}  // namespace ugds::fuzz
