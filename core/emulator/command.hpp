// SPDX-License-Identifier: Apache-2.0
//
// A command between its fetch and its completion.
#pragma once

#include <cstdint>
#include <vector>

#include "emulator/faults.hpp"
#include "nvme/entries.hpp"

namespace ugds::emulator {

/// The memory that a command names, by PRPs or by a contiguous pointer.
struct Transfer {
  struct Piece {
    std::uint64_t iova, bytes;
  };
  std::vector<Piece> data;
  std::vector<Piece> lists;            ///< the entries that were read of each list page
  std::vector<std::uint64_t> entries;  ///< what stood there, in order
  Piece metadata{0, 0};

  void clear() {
    data.clear();
    lists.clear();
    entries.clear();
    metadata = {0, 0};
  }
};

inline bool overlap(const Transfer::Piece& a, const Transfer::Piece& b) {
  return a.iova < b.iova + b.bytes && b.iova < a.iova + a.bytes;
}

enum class Direction : std::uint8_t { none, to_host, from_host };

struct Command {
  enum class Stage : std::uint8_t { free, waiting, held };

  nvme::SubmissionEntry entry;
  Stage stage = Stage::free;
  Direction direction = Direction::none;
  std::uint16_t sq = 0;
  std::uint16_t status = 0;  ///< decided when it was fetched; not 0: it will not be executed
  bool has_fault = false;
  bool is_event_request = false;
  Fault fault;
  std::uint32_t live_at = 0;   ///< its place in the list of live commands
  std::uint64_t sequence = 0;  ///< 0: none
  std::uint64_t due = 0;
  std::uint64_t length = 0;  ///< bytes of data
  std::uint64_t lba = 0, blocks = 0;
  Transfer transfer;

  bool admin() const { return sq == 0; }
};

}  // namespace ugds::emulator
