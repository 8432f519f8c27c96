// SPDX-License-Identifier: Apache-2.0
//
// Interrupts: who is told that completions were posted. Each vector has an eventfd of the host's, or none.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.hpp"
#include "base/fence.hpp"
#include "emulator/impl.hpp"

namespace ugds::emulator {

void Controller::Impl::set_interrupt(std::uint16_t vector, int eventfd) {
  if (vector >= vectors.size())
    fail(EINVAL, "set_interrupt", "there is no interrupt vector " + std::to_string(vector),
         "the controller has " + std::to_string(vectors.size()) + " (vectors=)");
  // Another process may leave its counter full, and its flags are its own.
  const bool may_block = eventfd >= 0 && (fcntl(eventfd, F_GETFL) & O_NONBLOCK) == 0;
  vectors[vector].eventfd = eventfd;
  vectors[vector].may_block = may_block;
}

/// For the entry at `place`, which the host can see by now. `adaptive` looks at whether it was the first.
void Controller::Impl::raise(CompletionQueue& queue, std::uint32_t place) {
  if (options.interrupts == Interrupts::adaptive) {
    // The entry before the look at the head: a host rings its head, and then looks at the entry.
    full_fence();
    observe(queue);
    if (queue.head != place) return;
  }
  Vector& vector = vectors[queue.vector];
  if (vector.raised) return;
  vector.raised = true;
  raised.push_back(queue.vector);
}

void Controller::Impl::deliver() noexcept {
  for (const std::uint16_t id : raised) {
    Vector& vector = vectors[id];
    vector.raised = false;
    if (vector.eventfd < 0 || removed.load(std::memory_order_relaxed)) continue;
    if (vector.may_block) {
      pollfd look{vector.eventfd, POLLOUT, 0};
      if (poll(&look, 1, 0) != 1 || (look.revents & POLLOUT) == 0) continue;
    }
    const std::uint64_t one = 1;
    // A counter that is full has somebody's attention already.
    if (::write(vector.eventfd, &one, sizeof one) == sizeof one) ++counters.interrupts;
  }
  raised.clear();
}

}  // namespace ugds::emulator
