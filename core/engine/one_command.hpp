// SPDX-License-Identifier: Apache-2.0
//
// The short way for a read or write that is one command, as most are: the steps of an Operation in one run of
// instructions. Whatever meets an obstacle (a bad argument, a queue in use, a registration being closed, a handle that
// is not ready) is left untouched for the general way; what is not done after a while is handed over to it as it
// stands.
#pragma once

#include <cstdint>

#include "engine/operation.hpp"

namespace ugds::engine {

class OneCommand {
 public:
  OneCommand() { request_.on_idle = queue::OnIdle::done; }

  /// Stages the command and rings. False: it did not come to that, and nothing has happened.
  bool start(Handle& handle, std::uint32_t caller, nvme::Opcode opcode, const memory::Reference& buffer,
             std::uint64_t offset, std::uint64_t size, std::uint64_t buffer_offset) {
    const Handle::Geometry& g = handle.geometry();
    // A size of 0 wraps to the largest. Where nothing is registered the buffer's size is 0.
    if (((offset | size) & g.block_mask) != 0 || size - 1 >= g.fast[opcode == nvme::Opcode::write] ||
        offset > g.capacity - size || buffer_offset > buffer.size - size || size > buffer.size ||
        ((buffer.address + buffer_offset) & 3) != 0 || (opcode == nvme::Opcode::read && buffer.readonly)) [[unlikely]] {
      return false;
    }
    queue::QueuePair& pair = handle.choose(caller);
    if (!pair.try_acquire()) [[unlikely]]
      return false;
    pair_ = &pair;
    if (handle.state() != State::ready || !pair.has_room(g.lists_for(size)) ||
        stage_command(handle, pair, request_, opcode, buffer, buffer_offset, offset, 0,
                      static_cast<std::uint32_t>(size), 0, 0, ticks()) != Staged::yes) [[unlikely]] {
      pair.release();
      return false;
    }
    pair.ring_staged();
    pair.release();
    return true;
  }

  /// One poll turn, after start(). True: done.
  bool turn(const Turn& turn) {
    if (turn.run != nullptr) {
      turn.run(turn.context);
    } else {
      cpu_pause();
    }
    if (pair_->try_acquire()) [[likely]] {
      pair_->reap_until(request_);
      pair_->release();
    }
    return request_.done.load(std::memory_order_acquire) != 0;
  }

  bool failed() const { return request_.failed(); }
  /// Goes on by the general way: for what is not done, and for what failed. Bytes, or -errno with last_error() filled.
  [[gnu::cold]] std::int64_t resume(Handle& handle, const Transfer& transfer, const Interrupt& interrupt = {});

 private:
  queue::QueuePair* pair_ = nullptr;
  queue::Request request_;
};

/// Turns before a request is handed over: Operation looks at the clock and the device now and then.
inline constexpr unsigned kPatience = 64;

}  // namespace ugds::engine
