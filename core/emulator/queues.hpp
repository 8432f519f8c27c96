// SPDX-License-Identifier: Apache-2.0
//
// The controller's side of submission and completion queues: rings in the host's memory, and the two words of each
// queue by which host and controller tell each other how far they are.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "nvme/entries.hpp"

namespace ugds::emulator {

/// Where a ring's entries are: one contiguous range, or pages of their own.
struct Ring {
  std::uint64_t base = 0;
  std::uint64_t page_size = 0;
  std::vector<std::uint64_t> pages;  ///< empty: contiguous

  std::uint64_t at(std::uint64_t byte) const {
    return pages.empty() ? base + byte : pages[byte / page_size] + byte % page_size;
  }
};

/// The word that the host moves, and what the host is told about ringing.
struct Doorbell {
  std::uint32_t* word = nullptr;   ///< a register's, or its shadow
  std::uint32_t* event = nullptr;  ///< the event index; nullptr where there is no shadow
  std::uint32_t seen = 0;          ///< the last value read, legal or not
};

struct SubmissionQueue {
  std::uint16_t id = 0;
  std::uint16_t completion_queue = 0;
  std::uint32_t depth = 0;
  std::uint32_t head = 0, tail = 0;
  std::uint32_t reported_head = 0;  ///< as the last posted completion says; the host knows of no later one
  bool head_known = true;           ///< false once a fault has told the host a wrong head
  Doorbell doorbell;
  Ring ring;
  std::vector<std::uint64_t> in_flight;  ///< a bit for each command identifier

  std::uint32_t after(std::uint32_t place) const { return place + 1 == depth ? 0 : place + 1; }
  bool is_in_flight(std::uint16_t cid) const { return (in_flight[cid / 64] >> cid % 64 & 1) != 0; }
  void set_in_flight(std::uint16_t cid) { in_flight[cid / 64] |= std::uint64_t{1} << cid % 64; }
  void clear_in_flight(std::uint16_t cid) { in_flight[cid / 64] &= ~(std::uint64_t{1} << cid % 64); }
};

/// A completion that is ready to be posted, or waits for room.
struct Posting {
  std::uint32_t result = 0;
  std::uint16_t sq = 0, cid = 0, status = 0;
  bool wrong_head = false;
  bool silent = false;   ///< no interrupt is sent for it
  bool doubled = false;  ///< or two are
  bool wrong_phase = false;
  bool extra = false;  ///< made up by a fault: the host could not make room for it
  bool frees_cid = true;
  std::uint64_t rest_due = 0;  ///< when all but its last dword is written; 0: before that
};

struct CompletionQueue {
  std::uint16_t id = 0;
  std::uint32_t depth = 0;
  std::uint32_t head = 0, tail = 0;
  bool phase = true;
  bool extras = false;  ///< a fault has put more into it than the host asked for
  bool interrupts = false;
  std::uint16_t vector = 0;
  std::uint32_t submission_queues = 0;
  Doorbell doorbell;
  Ring ring;
  std::deque<Posting> held;

  std::uint32_t posted() const { return (tail + depth - head) % depth; }
  bool full() const { return posted() == depth - 1; }
};

}  // namespace ugds::emulator
