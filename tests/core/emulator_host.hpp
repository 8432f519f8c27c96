// SPDX-License-Identifier: Apache-2.0
//
// The smallest host that can drive a controller: rings, commands, completions. It shares no code with the engine.
#pragma once

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/steps.hpp"
#include "base/text.hpp"
#include "emulator/controller.hpp"
#include "nvme/commands.hpp"
#include "nvme/entries.hpp"
#include "nvme/prp.hpp"
#include "nvme/registers.hpp"
#include "nvme/status.hpp"

namespace emulator_test {

using namespace ugds;
using emulator::Controller;
using emulator::Fault;
using emulator::Options;
using nvme::CompletionEntry;
using nvme::CompletionWord;
using nvme::Register;
using nvme::SubmissionEntry;

/// Zeroed pages of this process.
class Pages {
 public:
  explicit Pages(std::uint64_t bytes) : bytes_(bytes) {
    data_ = static_cast<std::byte*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(static_cast<void*>(data_) != MAP_FAILED);
  }
  ~Pages() { munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::byte* data() const { return data_; }
  std::uint64_t size() const { return bytes_; }
  void fill(int byte) { std::memset(data_, byte, bytes_); }

 private:
  std::byte* data_;
  std::uint64_t bytes_;
};

/// Pages that a controller can reach.
struct Dma {
  Dma(Controller& controller, std::uint64_t bytes, bool writable = true)
      : pages(bytes), device(controller), iova(controller.map(pages.data(), bytes, writable)) {}
  ~Dma() {
    if (iova != 0) device.unmap(iova);
  }
  Dma(const Dma&) = delete;
  Dma& operator=(const Dma&) = delete;
  std::byte* data() const { return pages.data(); }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(pages.data());
  }
  void unmap() {
    device.unmap(iova);
    iova = 0;
  }

  Pages pages;
  Controller& device;
  std::uint64_t iova;
};

inline Options parse(const std::string& uri) {
  const Uri parsed = parse_uri("emulated:" + uri);
  return emulator::parse_options(parsed.place, parsed.query);
}

struct Completion {
  std::uint16_t cid, status, sq_head, sq_id;
  std::uint32_t result;
};

struct Queue {
  std::uint16_t id = 0;
  std::uint32_t depth = 0, cq_depth = 0;
  std::uint32_t tail = 0, head = 0;
  bool phase = true;
  std::uint32_t rung_tail = 0, rung_head = 0;
  std::unique_ptr<Dma> sq, cq;
};

class Host {
 public:
  explicit Host(const Options& options) : c(options), stride(4u << options.stride) {}
  explicit Host(const std::string& uri) : Host(parse(uri)) {}

  std::uint32_t reg32(Register r) { return static_cast<std::uint32_t>(c.read(static_cast<std::uint32_t>(r), 4)); }
  std::uint64_t reg64(Register r) { return c.read(static_cast<std::uint32_t>(r), 8); }
  void set32(Register r, std::uint32_t v) { c.write(static_cast<std::uint32_t>(r), v, 4); }
  void set64(Register r, std::uint64_t v) { c.write(static_cast<std::uint32_t>(r), v, 8); }
  nvme::ControllerStatus csts() { return {reg32(Register::csts)}; }

  void turn() {
    if (c.pumped_by_caller()) Controller::turn(&c);
  }
  void turns(int n) {
    while (n-- > 0) turn();
  }

  bool wait_ready(bool on, std::uint64_t limit_ns = 2'000'000'000) {
    const std::uint64_t end = monotonic_ns() + limit_ns;
    while (csts().ready() != on && !csts().fatal()) {
      if (monotonic_ns() > end) return false;
      std::this_thread::yield();
    }
    return csts().ready() == on;
  }

  /// Resets, sets the admin queues and enables.
  void bring_up(std::uint32_t admin_depth = 32, std::uint64_t page = 4096) {
    set32(Register::cc, 0);
    REQUIRE(wait_ready(false));
    queues.clear();
    shadow.reset();
    events.reset();
    queues.resize(1);
    mps = page;
    Queue& admin = queues[0];
    admin.depth = admin.cq_depth = admin_depth;
    admin.sq = std::make_unique<Dma>(c, 65536);
    admin.cq = std::make_unique<Dma>(c, 65536);
    set32(Register::aqa, nvme::AdminQueueAttributes::make(admin_depth, admin_depth).raw);
    set64(Register::asq, aligned(*admin.sq));
    set64(Register::acq, aligned(*admin.cq));
    set32(Register::cc, nvme::Configuration::make(page).with_enabled(true).raw);
    REQUIRE(wait_ready(true));
  }

  void disable() {
    set32(Register::cc, 0);
    REQUIRE(wait_ready(false));
  }

  /// The IOVA of a Dma at the controller's page size: mappings are congruent to 64 KiB only as their pointers are.
  std::uint64_t aligned(const Dma& dma) const {
    REQUIRE(dma.iova % mps == 0);
    return dma.iova;
  }

  /// Gives the status of the first of the two commands that fails.
  std::uint16_t create_queue(std::uint16_t id, std::uint32_t depth, std::uint32_t cq_depth = 0) {
    if (cq_depth == 0) cq_depth = depth;
    if (queues.size() <= id) queues.resize(id + 1u);
    Queue q;
    q.id = id;
    q.depth = depth;
    q.cq_depth = cq_depth;
    q.sq = std::make_unique<Dma>(c, align_up(std::uint64_t{depth} * 64, 65536));
    q.cq = std::make_unique<Dma>(c, align_up(std::uint64_t{cq_depth} * 16, 65536));
    Completion done = admin(nvme::create_completion_queue(id, cq_depth, Iova(q.cq->iova), false, 0));
    if (done.status != 0) return done.status;
    done = admin(nvme::create_submission_queue(id, depth, Iova(q.sq->iova), id));
    queues[id] = std::move(q);
    return done.status;
  }

  void configure_shadow() {
    shadow = std::make_unique<Dma>(c, mps);
    events = std::make_unique<Dma>(c, mps);
    REQUIRE(admin(nvme::doorbell_buffer_config(Iova(shadow->iova), Iova(events->iova))).status == 0);
  }

  /// Stores a doorbell in whatever way it takes; rings the register only where the event index asks.
  void doorbell(std::uint16_t id, bool completion, std::uint32_t value, std::uint32_t old) {
    const std::uint32_t offset =
        completion ? nvme::completion_doorbell(id, stride) : nvme::submission_doorbell(id, stride);
    if (shadow && id != 0 && offset - nvme::kDoorbellBase + 4 <= mps) {
      const std::uint32_t at = (offset - nvme::kDoorbellBase) / 4;
      std::atomic_ref<std::uint32_t>(shadow->as<std::uint32_t>()[at]).store(value, std::memory_order_seq_cst);
      const std::uint32_t event =
          std::atomic_ref<std::uint32_t>(events->as<std::uint32_t>()[at]).load(std::memory_order_seq_cst);
      if (static_cast<std::uint16_t>(value - event - 1) < static_cast<std::uint16_t>(value - old)) {
        ++rings;
        c.write(offset, value, 4);
      }
      return;
    }
    if (std::uint32_t* word = c.doorbell(offset)) {
      std::atomic_ref<std::uint32_t>(*word).store(value, std::memory_order_release);
    } else {
      c.write(offset, value, 4);
    }
  }

  void place(std::uint16_t id, SubmissionEntry entry, std::uint16_t cid) {
    Queue& q = queues[id];
    entry.cid = cid;
    q.sq->as<SubmissionEntry>()[q.tail] = entry;
    if (++q.tail == q.depth) q.tail = 0;
  }
  void ring(std::uint16_t id) {
    Queue& q = queues[id];
    doorbell(id, false, q.tail, q.rung_tail);
    q.rung_tail = q.tail;
  }
  void submit(std::uint16_t id, const SubmissionEntry& entry, std::uint16_t cid) {
    place(id, entry, cid);
    ring(id);
  }

  /// One completion if there is one. The doorbell is rung at once unless `ring_head` is false.
  std::optional<Completion> poll(std::uint16_t id, bool ring_head = true) {
    Queue& q = queues[id];
    CompletionEntry& e = q.cq->as<CompletionEntry>()[q.head];
    const CompletionWord word{std::atomic_ref<std::uint32_t>(e.last).load(std::memory_order_acquire)};
    if (word.phase() != q.phase) {
      turn();
      return std::nullopt;
    }
    const Completion done{word.cid(), word.status(), e.sq_head, e.sq_id, e.result};
    if (++q.head == q.cq_depth) {
      q.head = 0;
      q.phase = !q.phase;
    }
    if (ring_head) {
      doorbell(id, true, q.head, q.rung_head);
      q.rung_head = q.head;
    }
    return done;
  }
  std::optional<Completion> poll_for(std::uint16_t id, std::uint64_t limit_ns) {
    const std::uint64_t end = monotonic_ns() + limit_ns;
    for (unsigned n = 0;; ++n) {
      if (auto done = poll(id)) return done;
      if (monotonic_ns() > end) return std::nullopt;
      if (n % 64 == 63) std::this_thread::yield();
    }
  }
  Completion wait(std::uint16_t id) {
    auto done = poll_for(id, 20'000'000'000);
    REQUIRE(done.has_value());
    return *done;
  }
  /// Polls `n` turns and sees nothing.
  bool quiet(std::uint16_t id, int n = 50) {
    while (n-- > 0)
      if (poll(id)) return false;
    return true;
  }

  Completion admin(const SubmissionEntry& entry) { return run(0, entry); }
  Completion run(std::uint16_t id, const SubmissionEntry& entry) {
    const std::uint16_t cid = next_cid++;
    submit(id, entry, cid);
    const Completion done = wait(id);
    CHECK(done.cid == cid);
    return done;
  }

  /// A block command whose PRPs describe `dma` from `offset` on.
  SubmissionEntry transfer(nvme::Opcode opcode, std::uint32_t nsid, std::uint64_t lba, std::uint32_t blocks,
                           const Dma& dma, std::uint64_t offset, std::uint64_t bytes, Dma* lists = nullptr,
                           std::uint32_t control = 0) {
    SubmissionEntry e = nvme::block_command(opcode, nsid, Lba(lba), blocks, control);
    std::vector<std::uint64_t> pages;
    for (std::uint64_t at = 0; at < dma.pages.size(); at += 4096) pages.push_back(dma.iova + at);
    nvme::build_prps(e, {pages.data(), offset}, bytes, mps, [&](std::uint32_t i) {
      REQUIRE(lists != nullptr);
      REQUIRE((i + 1) * mps <= lists->pages.size());
      return nvme::ListPage{reinterpret_cast<std::uint64_t*>(lists->data() + i * mps), lists->iova + i * mps};
    });
    return e;
  }

  bool violated(const std::string& rule) const {
    for (const auto& v : c.violations())
      if (v.rule == rule) return true;
    return false;
  }
  std::size_t violation_count() const { return c.violations().size(); }

  Controller c;
  std::uint32_t stride;
  std::uint64_t mps = 4096;
  std::vector<Queue> queues;
  std::unique_ptr<Dma> shadow, events;
  std::atomic<std::uint64_t> rings{0};
  std::uint16_t next_cid = 0;
};

/// Ready, with one I/O queue pair.
inline std::unique_ptr<Host> ready_host(const std::string& uri, std::uint32_t depth = 64) {
  auto host = std::make_unique<Host>(uri);
  host->bring_up();
  REQUIRE(host->create_queue(1, depth) == 0);
  return host;
}

/// Bytes that differ from each other by position and by `seed`.
inline void pattern(std::byte* at, std::uint64_t bytes, std::uint64_t seed) {
  for (std::uint64_t i = 0; i < bytes; ++i)
    at[i] = static_cast<std::byte>((i * 2654435761u + (i >> 9) + seed * 40503u) >> 3);
}

inline std::string cause_of(const Failure& f) { return f.error().message(); }

}  // namespace emulator_test
