// SPDX-License-Identifier: Apache-2.0
//
// Who waits for room in a queue pair, in the order in which they came: only the first may stage, and newcomers stand
// behind. Under the ownership of the queue pair.
#pragma once

#include <cstdint>

namespace ugds::queue {

class Line {
 public:
  struct Place {
    Place* next = nullptr;
    bool taken = false;             ///< written by its own thread alone
    std::uint64_t first_since = 0;  ///< ticks, while it is the first and does not come: see pass()
  };

  bool empty() const { return first_ == nullptr; }
  /// Whether a request may stage now: nobody waits, or it is the first of those who do.
  bool admits(const Place& place) const { return first_ == nullptr || first_ == &place; }

  void join(Place& place) {
    if (place.taken) return;
    place.taken = true;
    append(place);
  }
  void leave(Place& place) {
    if (!place.taken) return;
    place.taken = false;
    take_out(place);
  }
  /// For who waits behind and sees room that the first has not used: a first that has not come for `patience` goes to
  /// the end. Its thread may have lost its processor.
  void pass(std::uint64_t now, std::uint64_t patience) {
    if (first_ == nullptr) return;
    Place& place = *first_;
    if (place.first_since == 0) {
      place.first_since = now;
    } else if (now - place.first_since > patience) {
      take_out(place);
      append(place);
    }
  }

 private:
  void append(Place& place) {
    place.next = nullptr;
    place.first_since = 0;
    *last_ = &place;
    last_ = &place.next;
  }
  void take_out(Place& place) {
    Place** link = &first_;
    while (*link != &place) link = &(*link)->next;
    *link = place.next;
    if (last_ == &place.next) last_ = link;
  }

  Place* first_ = nullptr;
  Place** last_ = &first_;
};

}  // namespace ugds::queue
