// SPDX-License-Identifier: Apache-2.0
//
// A model of the bytes that one thread wrote to its own part of a device: for each block, which of the writes that were
// ever made to it may lie there. Faults, power cuts and requests that were let go of leave more than one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace soak_test {

constexpr std::uint64_t kBlock = 4096;
constexpr unsigned kBlocks = 64;  ///< of one thread on one device

/// Writes to a block are numbered from 1; 0 is what the device had before.
struct Block {
  std::uint32_t latest = 0;        ///< the last that was made, or is being made
  std::uint32_t from = 0, to = 0;  ///< one of these is there
  std::uint32_t durable = 0;       ///< a power cut brings nothing older back
  bool busy = false;               ///< it has a request

  void wrote(bool durably) {
    from = to = latest;
    if (durably) durable = latest;
  }
  void perhaps_wrote() { to = latest; }
  void flushed() { durable = from; }
  void lost_power() { from = durable; }
};

class Blocks {
 public:
  Blocks(unsigned thread, unsigned device) : blocks_(kBlocks), tag_(std::uint64_t{thread + 1} << 56 | device) {}

  Block& operator[](unsigned number) { return blocks_[number]; }
  std::vector<Block>::iterator begin() { return blocks_.begin(); }
  std::vector<Block>::iterator end() { return blocks_.end(); }

  bool is_free(unsigned first, unsigned count) const {
    for (unsigned i = first; i < first + count; ++i) {
      if (blocks_[i].busy) return false;
    }
    return true;
  }
  void set_busy(unsigned first, unsigned count, bool busy) {
    for (unsigned i = first; i < first + count; ++i) blocks_[i].busy = busy;
  }

  /// Makes the next write of some blocks, at `at`.
  void paint(std::byte* at, unsigned first, unsigned count) {
    for (unsigned i = first; i < first + count; ++i, at += kBlock) {
      const std::uint64_t word = word_of(i, ++blocks_[i].latest);
      for (std::uint64_t part = 0; part < kBlock; part += kPart) std::memcpy(at + part, &word, sizeof word);
    }
  }
  /// Before a read: what it has to replace.
  static void poison(std::byte* at, unsigned count) {
    for (std::uint64_t part = 0; part < count * kBlock; part += kPart) std::memset(at + part, 0xee, 8);
  }
  /// Whether what was read of a block may be there; from then on it is known to be. Else why not.
  std::string check(const std::byte* at, unsigned number) {
    std::uint64_t word = 0;
    std::memcpy(&word, at, sizeof word);
    for (std::uint64_t part = kPart; part < kBlock; part += kPart) {
      if (std::memcmp(at + part, &word, sizeof word) != 0) return "block " + std::to_string(number) + " is torn";
    }
    Block& block = blocks_[number];
    const auto version = static_cast<std::uint32_t>(word >> 24);
    if (word != word_of(number, version) || version < block.from || version > block.to) {
      return "block " + std::to_string(number) + " of " + std::to_string(tag_ >> 56) + " on " +
             std::to_string(tag_ & 0xff) + " holds " + std::to_string(word) + " (write " + std::to_string(version) +
             "), and not one of the writes " + std::to_string(block.from) + " to " + std::to_string(block.to) +
             ", the last durable one being " + std::to_string(block.durable);
    }
    block.from = block.to = version;
    return {};
  }

 private:
  static constexpr std::uint64_t kPart = 1024;
  /// What a write leaves in a block; 0 for the device's own.
  std::uint64_t word_of(unsigned number, std::uint32_t version) const {
    return version == 0 ? 0 : tag_ | std::uint64_t{version} << 24 | std::uint64_t{number} << 8;
  }

  std::vector<Block> blocks_;
  std::uint64_t tag_;
};

}  // namespace soak_test
