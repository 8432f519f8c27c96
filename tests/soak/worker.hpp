// SPDX-License-Identifier: Apache-2.0
//
// One thread's random work: requests one by one, in batches and on a GPU's stream, among everything else that a
// program may do at the same time. Every request is judged once, against the model of the thread's own blocks.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "blocks.hpp"
#include "devices.hpp"
#include "engine_batch_host.hpp"

namespace soak_test {

class Worker {
 public:
  Worker(Devices& devices, Figures& figures, unsigned number, std::uint64_t seed)
      : devices_(devices), figures_(figures), number_(number), random_(seed) {
    for (unsigned i = 0; i < Devices::kCount; ++i) places_.push_back(std::make_unique<Place>(number, i));
  }

  /// Until all threads together have done so many requests. `stream` is the thread's own.
  void run(std::uint64_t operations, CUstream stream) {
    stream_ = stream;
    direct_.emplace(Demand::direct);
    staged_.emplace(Demand::staged);
    while (figures_.operations.load(std::memory_order_relaxed) < operations) step();
    for (auto* memory : {&direct_, &staged_}) {
      settle([&] { return engine::close_registration((*memory)->reference); });
      memory->reset();
    }
  }
  /// When nothing else goes on: everything once more.
  void check() {
    for (auto& place : places_) {
      const Table::Use use(Table::instance(), devices_.current(place->number));
      REQUIRE(use);
      REQUIRE(use->state() == State::ready);
      look(*place);
      const Ask all{.first = 0, .count = kBlocks, .cuts = place->cuts};
      Blocks::poison(place->buffer->data(), kBlocks);
      judge(*place, all, one(*place, *use, all), place->buffer->data());
    }
  }

 private:
  /// A device as this thread sees it: its blocks there, and the memory for them.
  struct Place {
    Place(unsigned thread, unsigned device)
        : number(device),
          offset(thread * kBlocks * kBlock),
          blocks(thread, device),
          buffer(std::in_place, kBlocks * kBlock) {}
    unsigned number;
    std::uint64_t offset;
    Blocks blocks;
    std::optional<Buffer> buffer;
    std::uint64_t cuts = 0;
  };
  /// GPU memory of the thread's, for any device.
  struct OnGpu {
    explicit OnGpu(Demand which) : demand(which) {
      OK(cuMemAlloc_v2(&base, kBlocks * kBlock));
      register_again();
    }
    ~OnGpu() { CHECK(cuMemFree_v2(base) == CUDA_SUCCESS); }
    OnGpu(const OnGpu&) = delete;
    void register_again() {
      const auto found = runtime().find(base);
      reference = memory::Registry::instance().add_gpu(
          base, kBlocks * kBlock, false, std::make_unique<memory::GpuBuffer>(runtime(), *found, base), demand);
    }
    Demand demand;
    CUdeviceptr base = 0;
    memory::Reference reference{};
  };
  struct Ask {
    unsigned first = 0, count = 0;
    bool write = false, durable = false;
    std::uint64_t cuts = 0;  ///< of its device's power, when it was made
  };
  struct Result {
    std::int64_t value = 0;
    std::uint64_t completed = 0;
  };

  bool chance(unsigned one_in) { return random_() % one_in == 0; }

  void step() {
    Place& place = *places_[random_() % places_.size()];
    if (chance(700)) {
      devices_.reopen(place.number);
      return;
    }
    {
      const Table::Use use(Table::instance(), devices_.current(place.number));
      if (!use) {
        std::this_thread::yield();
        return;
      }
      look(place);
      const auto what = random_() % 1000;
      if (what < 1) {
        devices_.cut_power(place.number, *use, random_());
      } else if (what < 2 && chance(4)) {
        devices_.wedge(place.number, *use, [&] { synchronous(place, *use); });
      } else if (what < 40) {
        abandoned(place, *use);
      } else if (what < 80) {
        streamed(place, *use, chance(2) ? *direct_ : *staged_);
      } else if (what < 110) {
        stale(place, *use);
      } else if (what < 500) {
        batch(place, *use);
      } else if (what < 530) {
        flush(place, *use);
      } else {
        synchronous(place, *use);
      }
      look(place);
      broken_ = use->state() != State::ready && use->state() != State::recovering;
    }
    if (broken_) devices_.reopen(place.number);
    if (let_go_ || chance(60)) register_again(place);
    if (OnGpu* const memory = std::exchange(gpu_let_go_, nullptr)) {
      settle([&] { return engine::close_registration(memory->reference); });
      memory->register_again();
    }
  }

  /// What a power cut has undone.
  void look(Place& place) {
    const std::uint64_t cuts = devices_.power_cuts(place.number);
    if (cuts == place.cuts) return;
    place.cuts = cuts;
    for (Block& block : place.blocks) block.lost_power();
  }

  std::optional<Ask> choose(Place& place, std::byte* memory) {
    const unsigned sizes[] = {1, 1, 1, 1, 2, 3, 8, 18};
    Ask ask;
    ask.cuts = place.cuts;
    ask.count = sizes[random_() % 8];
    ask.first = static_cast<unsigned>(random_() % (kBlocks - ask.count + 1));
    if (!place.blocks.is_free(ask.first, ask.count)) return {};
    ask.write = chance(2);
    ask.durable = ask.write && chance(5);
    std::byte* const at = memory + ask.first * kBlock;
    if (ask.write) {
      place.blocks.paint(at, ask.first, ask.count);
    } else {
      Blocks::poison(at, ask.count);
    }
    return ask;
  }
  void perhaps_fault(engine::Handle& handle) {
    if (chance(100)) inject_any(controller_of(handle), random_, figures_);
  }

  Transfer transfer(Place& place, const Ask& ask) {
    return {.opcode = ask.write ? Opcode::write : Opcode::read,
            .buffer = place.buffer->reference(),
            .offset = place.offset + ask.first * kBlock,
            .size = ask.count * kBlock,
            .buffer_offset = ask.first * kBlock,
            .durable = ask.durable};
  }
  Result one(Place& place, engine::Handle& handle, const Ask& ask) {
    const std::int64_t result = engine::run(handle, transfer(place, ask));
    return {result, result < 0 ? last_error().completed : 0};
  }

  /// Against the model; `memory` is where block 0 of the thread lies.
  void judge(Place& place, const Ask& ask, const Result& result, const std::byte* memory) {
    ++figures_.operations;
    look(place);
    if (result.value < 0) {
      const auto code = static_cast<std::size_t>(-result.value);
      ++figures_.errors[code % figures_.errors.size()];
      if (code == EIO || code == EINTR || code == ETIMEDOUT) let_go_ = true;
      const bool expected = code == EIO || code == ETIMEDOUT || code == ECANCELED || code == ENODEV || code == EINTR ||
                            (code == ESTALE && may_be_stale_);
      if (!expected) FAIL_CHECK("a request gave " << code << ": " << last_error().message());
    } else if (static_cast<std::uint64_t>(result.value) != ask.count * kBlock) {
      FAIL_CHECK("a request of " << ask.count << " blocks gave " << result.value << " bytes");
    }
    const std::uint64_t right =
        (result.value < 0 ? result.completed : static_cast<std::uint64_t>(result.value)) / kBlock;
    for (unsigned i = 0; i < ask.count; ++i) {
      Block& block = place.blocks[ask.first + i];
      if (ask.write) {
        i < right ? block.wrote(ask.durable) : block.perhaps_wrote();
        if (ask.cuts != place.cuts) block.lost_power();  // it was before the cut, or after
        continue;
      }
      if (i >= right) break;
      const std::string wrong = place.blocks.check(memory + (ask.first + i) * kBlock, ask.first + i);
      if (!wrong.empty()) FAIL_CHECK(wrong);
      if (ask.cuts != place.cuts) block.lost_power();  // it may have been read before that
    }
  }

  void synchronous(Place& place, engine::Handle& handle) {
    const auto ask = choose(place, place.buffer->data());
    if (!ask) return;
    perhaps_fault(handle);
    const Result result = one(place, handle, *ask);
    judge(place, *ask, result, place.buffer->data());
  }

  void flush(Place& place, engine::Handle& handle) {
    perhaps_fault(handle);
    const std::int64_t result = engine::run(handle, {.opcode = Opcode::flush});
    ++figures_.operations;
    look(place);  // what the power took before, the Flush has not brought back
    if (result < 0) {
      ++figures_.errors[static_cast<std::size_t>(-result) % figures_.errors.size()];
      return;
    }
    for (Block& block : place.blocks) block.flushed();
  }

  /// One that its caller does not wait for, as after Ctrl-C.
  void abandoned(Place& place, engine::Handle& handle) {
    const auto ask = choose(place, place.buffer->data());
    if (!ask) return;
    perhaps_fault(handle);
    const Transfer wanted = transfer(place, *ask);
    Result result;
    {
      engine::Operation operation(handle, wanted);
      for (auto turns = random_() % 12; turns != 0 && !operation.turn(); --turns) {
      }
      if (!operation.done()) {
        operation.abandon();
        ++figures_.abandoned;
        let_go_ = true;
      }
      result.value = operation.result();
      // What was not staged is cancelled, and what was staged runs on.
      if (result.value < 0) result.completed = last_error().completed;
    }
    judge(place, *ask, result, place.buffer->data());
  }

  /// By a registration that was closed, although another is at its address.
  void stale(Place& place, engine::Handle& handle) {
    const auto ask = choose(place, place.buffer->data());
    if (!ask) return;
    const Transfer wanted = transfer(place, *ask);
    if (!register_again(place)) return judge(place, *ask, one(place, handle, *ask), place.buffer->data());
    may_be_stale_ = true;
    const std::int64_t result = engine::run(handle, wanted);
    if (result >= 0) FAIL_CHECK("a registration that was closed could be used");
    judge(place, *ask, {result, last_error().completed}, place.buffer->data());
    may_be_stale_ = false;
  }

  void batch(Place& place, engine::Handle& handle) {
    engine_test::OpenBatch batch(handle, 1 + static_cast<std::uint32_t>(random_() % 40),
                                 chance(4) ? engine::Priority::background : engine::Priority::unsaid);
    std::map<std::uint64_t, Ask> pending;
    const bool closes = chance(12);
    for (auto rounds = 1 + random_() % 4; rounds != 0; --rounds) {
      submit(place, handle, batch, pending);
      if (chance(12)) {
        const std::int64_t cancelled = batch.batch().cancel(batch.id.generation);
        if (cancelled < 0) FAIL_CHECK("cancelling gave " << cancelled);
        figures_.cancels += static_cast<std::uint64_t>(cancelled);
      }
      // Under the batch: refused, or what was not given to the device fails.
      if (closes && chance(2)) close_under(place);
      collect(place, batch, pending, random_() % 8);
      if (chance(4)) synchronous(place, handle);
    }
    if (chance(10)) {
      figures_.uncollected += pending.size();
      handle.close_batch(batch.id);
      for (const auto& [cookie, ask] : pending) {
        // Told by nobody: it was done, or it was not.
        for (unsigned i = ask.first; ask.write && i < ask.first + ask.count; ++i) place.blocks[i].perhaps_wrote();
        place.blocks.set_busy(ask.first, ask.count, false);
      }
      if (!pending.empty()) let_go_ = true;
    } else {
      collect(place, batch, pending, ~std::size_t{0});
      if (!pending.empty()) FAIL_CHECK(pending.size() << " results of a batch did not come");
    }
    if (may_be_stale_) let_go_ = true;
    may_be_stale_ = false;
  }

  void submit(Place& place, engine::Handle& handle, engine_test::OpenBatch& batch,
              std::map<std::uint64_t, Ask>& pending) {
    std::vector<engine_test::Request> list;
    std::vector<Ask> asks;
    for (auto wanted = 1 + random_() % 24; wanted != 0; --wanted) {
      const auto ask = choose(place, place.buffer->data());
      if (!ask) continue;
      place.blocks.set_busy(ask->first, ask->count, true);
      perhaps_fault(handle);
      const auto make = ask->write ? engine_test::writing : engine_test::reading;
      const std::uint64_t offset = place.offset + ask->first * kBlock;
      list.push_back(make(*place.buffer, offset, ask->count * kBlock, ask->first * kBlock, ++cookie_));
      list.back().wanted.durable = ask->durable;
      asks.push_back(*ask);
    }
    const std::int64_t taken = batch.submit(list);
    if (taken < 0) FAIL_CHECK("submitting gave " << taken);
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (static_cast<std::int64_t>(i) < taken) {
        pending[list[i].wanted.cookie] = asks[i];
      } else {
        place.blocks.set_busy(asks[i].first, asks[i].count, false);
      }
    }
  }

  void collect(Place& place, engine_test::OpenBatch& batch, std::map<std::uint64_t, Ask>& pending, std::size_t least) {
    std::map<std::uint64_t, engine_test::Told> told;
    batch.collect(told, least);
    for (const auto& [cookie, what] : told) {
      const auto found = pending.find(cookie);
      if (found == pending.end()) {
        FAIL_CHECK("a result came twice, or of nothing");
        continue;
      }
      judge(place, found->second, {what.result, what.completed}, place.buffer->data());
      place.blocks.set_busy(found->second.first, found->second.count, false);
      pending.erase(found);
    }
  }

  void close_under(Place& place) {
    may_be_stale_ = true;
    if (chance(2)) {
      memory::Registry::instance().close_when_idle(place.buffer->reference());
      ++figures_.deregistrations;
    } else {
      const int code = memory::Registry::instance().close(place.buffer->reference());
      ++(code == EBUSY ? figures_.deregistrations_refused : figures_.deregistrations);
      if (code != 0 && code != EBUSY && code != ESTALE) FAIL_CHECK("closing a registration gave " << code);
    }
  }

  /// In the order of a stream: through the device, and through the GPU's memory.
  void streamed(Place& place, engine::Handle& handle, OnGpu& memory) {
    std::vector<std::byte> bytes(kBlocks * kBlock);
    const auto ask = choose(place, bytes.data());
    if (!ask) return;
    const std::uint64_t at = memory.base + ask->first * kBlock, size = ask->count * kBlock;
    if (fake_cuda_poke(at, bytes.data() + ask->first * kBlock, size) != 0) FAIL_CHECK("the GPU's memory is not there");
    perhaps_fault(handle);
    std::int64_t told = 1;
    engine::StreamResult* const answer = engine::StreamResult::make();
    Transfer wanted = transfer(place, *ask);
    wanted.buffer = memory.reference;
    StreamCall call;
    call.requests = {&wanted, 1};
    call.result = answer;
    call.told = &told;
    Result result{stream_of(stream_).submit(handle, call, {}), 0};
    if (result.value == 0) {
      if (!comes_true([&] { return answer->done() && cuStreamQuery(stream_) == CUDA_SUCCESS; }))
        FAIL_CHECK("a stream is held");
      answer->look();
      // Of one that is staged it is not said what a failure left in the GPU's memory.
      result = {answer->result(), 0};
      if (told != result.value) FAIL_CHECK("a stream's request gave " << result.value << ", and told " << told);
    }
    answer->release();
    ++figures_.streams;
    if (fake_cuda_peek(bytes.data() + ask->first * kBlock, at, size) != 0) FAIL_CHECK("the GPU's memory has gone");
    const bool let_go = let_go_;
    judge(place, *ask, result, bytes.data());
    let_go_ = let_go;
    if (result.value < 0) gpu_let_go_ = &memory;
  }

  /// Closes the buffer's registration and makes a new one of the same memory. What was let go of has ended then. False:
  /// not yet.
  bool register_again(Place& place) {
    if (let_go_ || may_be_stale_) {
      settle([&] { return memory::Registry::instance().close(place.buffer->reference()); });
    } else if (const int code = memory::Registry::instance().close(place.buffer->reference()); code != 0) {
      FAIL_CHECK("a registration on which nothing is in flight was not closed: " << code);
      return false;
    }
    ++figures_.deregistrations;
    let_go_ = false;
    place.buffer->register_again();
    return true;
  }

  /// Until a registration is closed: what is in flight on it ends, if need be by resets.
  template <class Close>
  void settle(Close&& close) {
    const std::uint64_t start = monotonic_ns();
    for (int code = close(); code != 0 && code != ESTALE; code = close()) {
      if (code == EBUSY) ++figures_.deregistrations_refused;
      for (unsigned i = 0; i < Devices::kCount; ++i) {
        bool broken = false;
        {
          const Table::Use use(Table::instance(), devices_.current(i));
          if (!use) continue;
          use->reap_all();
          use->check_controller();
          broken = use->state() != State::ready && use->state() != State::recovering;
        }
        if (broken) devices_.reopen(i);
      }
      if (monotonic_ns() - start > 60'000'000'000) {
        FAIL_CHECK("a registration stays held: " << code);
        return;
      }
      std::this_thread::yield();
    }
  }

  Devices& devices_;
  Figures& figures_;
  unsigned number_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Place>> places_;
  std::optional<OnGpu> direct_, staged_;
  OnGpu* gpu_let_go_ = nullptr;  ///< what a request failed on, or was let go of
  CUstream stream_ = nullptr;
  std::uint64_t cookie_ = 0;
  bool broken_ = false, let_go_ = false, may_be_stale_ = false;
};

}  // namespace soak_test
