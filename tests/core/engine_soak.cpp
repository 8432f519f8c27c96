// SPDX-License-Identifier: Apache-2.0
//
// Random work on a device of every queue depth: batches and synchronous requests, small and large, by every mode, in
// every order of completion, with faults. Each request is told of once; what is told is what a model of the device's
// bytes says.
#include <cerrno>

#include "engine_batch_host.hpp"

using namespace engine_test;

namespace {

constexpr std::uint64_t kBlock = 4096, kPiece = 18 * kBlock, kPieces = 16;

/// A part of the device that has one request at a time, and what is known of its bytes.
struct Piece {
  unsigned version = 0;  ///< of what was written; 0: zeros
  bool known = true;
  bool busy = false;
};

void paint(std::byte* at, std::uint64_t blocks, std::size_t piece, unsigned version, std::uint64_t first) {
  for (std::uint64_t b = 0; b < blocks; ++b) {
    const std::uint64_t word = version == 0 ? 0 : (piece << 40 | std::uint64_t{version} << 20 | (first + b));
    for (std::uint64_t i = 0; i < kBlock; i += 1024) std::memcpy(at + b * kBlock + i, &word, sizeof word);
  }
}

bool is_painted(const std::byte* at, std::uint64_t blocks, std::size_t piece, unsigned version) {
  for (std::uint64_t b = 0; b < blocks; ++b) {
    const std::uint64_t word = version == 0 ? 0 : (piece << 40 | std::uint64_t{version} << 20 | b);
    for (std::uint64_t i = 0; i < kBlock; i += 1024) {
      if (std::memcmp(at + b * kBlock + i, &word, sizeof word) != 0) return false;
    }
  }
  return true;
}

class Work {
 public:
  Work(Open& open, unsigned seed) : open_(open), random_(seed), buffer_(kPieces * kPiece) {}

  void run(unsigned requests) {
    const auto capacity = [&](unsigned most) { return 1 + static_cast<std::uint32_t>(random_() % most); };
    OpenBatch one(open_.handle, capacity(20)), two(open_.handle, capacity(40), engine::Priority::background);
    for (unsigned sent = 0; sent < requests;) {
      if (random_() % 4 == 0) {
        sent += synchronous();
      } else {
        sent += submit(random_() % 3 == 0 ? two : one);
      }
      if (random_() % 2 == 0) collect(random_() % 2 == 0 ? one : two, random_() % 4);
    }
    collect(one, ~std::size_t{0});
    collect(two, ~std::size_t{0});
    CHECK(pending_.empty());
    CHECK(open_.handle.in_flight() == 0);
    CHECK(memory::Registry::instance().in_flight(buffer_.reference()) == 0);
  }

  unsigned failed = 0;

 private:
  struct Pending {
    std::size_t piece;
    std::uint64_t blocks;
    bool write;
    unsigned version;
  };

  /// Small ones mostly. All of the piece is written, or its beginning read.
  bool choose(Pending& p) {
    p.piece = random_() % kPieces;
    if (pieces_[p.piece].busy) return false;
    p.write = random_() % 2 == 0;
    const std::uint64_t sizes[] = {1, 1, 1, 2, 3, 4, 5, 18};
    p.blocks = sizes[random_() % 8];
    p.version = pieces_[p.piece].version + 1;
    if (p.write) {
      p.blocks = random_() % 3 == 0 ? 18 : 1 + random_() % 2;
      paint(memory(p.piece), p.blocks, p.piece, p.version, 0);
    } else {
      std::memset(memory(p.piece), 0xee, p.blocks * kBlock);
    }
    return true;
  }
  std::byte* memory(std::size_t piece) { return buffer_.data() + piece * kPiece; }

  unsigned submit(OpenBatch& batch) {
    std::vector<Request> list;
    std::vector<Pending> chosen;
    const unsigned wanted = 1 + static_cast<unsigned>(random_() % 12);
    for (unsigned i = 0; i < wanted; ++i) {
      Pending p;
      if (!choose(p)) continue;
      pieces_[p.piece].busy = true;
      const auto make = p.write ? writing : reading;
      list.push_back(make(buffer_, p.piece * kPiece, p.blocks * kBlock, p.piece * kPiece, ++cookie_));
      chosen.push_back(p);
    }
    const std::int64_t taken = batch.submit(list);
    REQUIRE(taken >= 0);
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (i < static_cast<std::size_t>(taken)) {
        pending_[list[i].wanted.cookie] = chosen[i];
      } else {
        pieces_[chosen[i].piece].busy = false;
      }
    }
    return static_cast<unsigned>(taken);
  }

  void collect(OpenBatch& batch, std::size_t least) {
    std::map<std::uint64_t, Told> told;
    batch.collect(told, least);
    for (const auto& [cookie, what] : told) {
      const auto found = pending_.find(cookie);
      REQUIRE(found != pending_.end());  // neither doubled nor never asked for
      judge(found->second, what.result, what.completed);
      pieces_[found->second.piece].busy = false;
      pending_.erase(found);
    }
  }

  unsigned synchronous() {
    Pending p;
    if (!choose(p)) return 0;
    const std::int64_t result = engine::run(open_.handle, {.opcode = p.write ? Opcode::write : Opcode::read,
                                                           .buffer = buffer_.reference(),
                                                           .offset = p.piece * kPiece,
                                                           .size = p.blocks * kBlock,
                                                           .buffer_offset = p.piece * kPiece});
    judge(p, result, result < 0 ? last_error().completed : 0);
    return 1;
  }

  void judge(const Pending& p, std::int64_t result, std::uint64_t completed) {
    Piece& piece = pieces_[p.piece];
    const std::uint64_t right = (result < 0 ? completed : static_cast<std::uint64_t>(result)) / kBlock;
    failed += result < 0;
    if (result >= 0) CHECK(right == p.blocks);
    if (!p.write) {
      if (piece.known) CHECK(is_painted(memory(p.piece), std::min(right, known_[p.piece]), p.piece, piece.version));
      return;
    }
    piece.known = result >= 0;
    piece.version = p.version;
    known_[p.piece] = p.blocks;
  }

  Open& open_;
  std::mt19937 random_;
  Buffer buffer_;
  Piece pieces_[kPieces];
  std::vector<std::uint64_t> known_ = std::vector<std::uint64_t>(kPieces, 18);  ///< blocks, from the piece's first
  std::map<std::uint64_t, Pending> pending_;
  std::uint64_t cookie_ = 0;
};

}  // namespace

TEST_CASE("random work on every queue depth from 2 to 1024, in every order, by every mode, with faults") {
  const char* orders[] = {"fifo", "reverse", "random"};
  const char* modes[] = {"latency", "throughput", "priority", "adaptive"};
  unsigned failed = 0;
  for (unsigned depth = 2; depth <= 1024; ++depth) {
    CAPTURE(depth);
    const std::string uri = "emulated:2MiB?mdts=2&depth=" + std::to_string(depth) + "&order=" + orders[depth % 3] +
                            "&seed=" + std::to_string(depth) + "&queues=" + std::to_string(1 + depth / 3 % 3) +
                            (depth % 8 == 7 ? "" : "&pump=caller") + (depth % 5 == 0 ? "&slots=3&burst=2" : "");
    Policy policy;
    policy.mode = modes[depth / 12 % 4];
    policy.depth = depth;
    Open open(uri, policy);
    std::mt19937 random(depth);
    for (int i = 0; i < 3; ++i) {  // of some 200
      emulator::Fault fault;
      fault.status = random() % 2 == 0 ? nvme::status::unrecovered_read_error : nvme::status::write_fault;
      fault.opcode = fault.status == nvme::status::write_fault ? 1 : 2;
      fault.skip = random() % 40;
      open.controller().inject(fault);
    }
    Work work(open, depth);
    work.run(70);
    failed += work.failed;
  }
  CHECK(failed > 1000);
}
