// SPDX-License-Identifier: Apache-2.0
#include "engine/unaligned.hpp"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "engine/staged.hpp"

namespace ugds::engine {

using nvme::Opcode;

namespace {

/// How often a wait for our buffer asks whether it was interrupted.
constexpr std::chrono::milliseconds kAsk{20};

}  // namespace

Bounce::Bounce(Handle& handle) : memory_(std::make_unique<memory::HostMemory>(kSize)) {
  const std::uint32_t device[] = {handle.geometry().number};
  auto& registry = memory::Registry::instance();
  registry.add_ledger(ledger_);
  try {
    reference_ = registry.add(memory_->data(), kSize, memory::Kind::host, false, device);
  } catch (...) {
    registry.remove_ledger(ledger_);
    throw;
  }
}

/// Its taker may wait for as long as a device hangs.
bool Bounce::take(const Interrupt& interrupt) {
  std::unique_lock guard(lock_);
  while (!given_.wait_for(guard, kAsk, [&] { return !taken_; })) {
    guard.unlock();  // asking takes locks of the caller's
    if (interrupt.asked != nullptr && interrupt.asked(interrupt.context)) return false;
    guard.lock();
  }
  return taken_ = true;
}

void Bounce::give() {
  {
    const std::lock_guard guard(lock_);
    taken_ = false;
  }
  given_.notify_one();
}

Bounce::~Bounce() {
  memory::Registry::instance().remove_ledger(ledger_);
  // Never given back while the controller may write to it.
  if (memory::Registry::instance().close(reference_) == EBUSY) static_cast<void>(memory_.release());  // NOLINT
}

namespace {

std::int64_t run_whole(Handle& handle, const Transfer& t, const Interrupt& interrupt) {
  return is_staged_transfer(handle, t) ? run_staged(handle, t, interrupt) : run(handle, t, interrupt);
}

/// One walk over an unaligned transfer. `done` bytes of it are finished.
class Walk {
 public:
  Walk(Handle& handle, const Transfer& transfer, const Interrupt& interrupt)
      : handle_(handle),
        bounce_(handle.bounce()),
        t_(transfer),
        interrupt_(interrupt),
        block_(handle.identity().block_size) {}

  std::int64_t run() {
    while (done_ < t_.size) {
      const std::int64_t result = can_go_direct() ? direct() : bounced();
      if (result < 0) return explain(result);
    }
    return static_cast<std::int64_t>(t_.size);
  }

 private:
  std::uint64_t position() const { return t_.offset + done_; }
  std::uint64_t address() const { return t_.buffer.address + t_.buffer_offset + done_; }

  bool can_go_direct() const {
    return is_aligned(position(), block_) && is_aligned(address(), 4) && t_.size - done_ >= block_;
  }

  std::int64_t direct() {
    Transfer whole = t_;
    whole.offset = position();
    whole.buffer_offset = t_.buffer_offset + done_;
    whole.size = align_down(t_.size - done_, block_);
    const std::int64_t result = run_whole(handle_, whole, interrupt_);
    // A failed part counts as far as it is right; the walk ends there.
    done_ += result < 0 ? last_error().completed : whole.size;
    return result;
  }

  std::int64_t bounced() {
    const std::uint64_t begin = align_down(position(), block_);
    std::uint64_t end = std::min(align_up(t_.offset + t_.size, block_), begin + align_down(Bounce::kSize, block_));
    // An odd head may be all that keeps the rest from going direct.
    if (begin != position() && is_aligned(address() + (begin + block_ - position()), 4)) end = begin + block_;
    const std::uint64_t skip = position() - begin;
    const std::uint64_t bytes = std::min(end - begin - skip, t_.size - done_);
    auto* mine = bounce_.data() + skip;

    Transfer blocks{.opcode = Opcode::read, .buffer = bounce_.reference(), .offset = begin, .size = end - begin};
    const bool partial = skip != 0 || bytes != end - begin;
    if (t_.opcode == Opcode::read || partial) {
      if (const std::int64_t result = engine::run(handle_, blocks, interrupt_); result < 0) return result;
    }
    if (t_.opcode == Opcode::read) {
      if (const std::int64_t result = copy_out(mine, bytes); result < 0) return result;
    } else {
      if (const std::int64_t result = copy_in(mine, bytes); result < 0) return result;
      blocks.opcode = Opcode::write;
      blocks.durable = t_.durable;
      if (const std::int64_t result = engine::run(handle_, blocks, interrupt_); result < 0) return result;
    }
    done_ += bytes;
    return static_cast<std::int64_t>(bytes);
  }

  /// Between our buffer and the caller's memory, which is held.
  std::int64_t copy_out(const std::byte* from, std::uint64_t bytes) {
    memory::GpuBuffer* const gpu = t_.buffer.registration->gpu();
    if (gpu != nullptr) return told(gpu->copy_in(address(), from, bytes));
    std::memcpy(reinterpret_cast<std::byte*>(address()), from, bytes);
    return 0;
  }
  std::int64_t copy_in(std::byte* to, std::uint64_t bytes) {
    memory::GpuBuffer* const gpu = t_.buffer.registration->gpu();
    if (gpu != nullptr) return told(gpu->copy_out(to, address(), bytes));
    std::memcpy(to, reinterpret_cast<const std::byte*>(address()), bytes);
    return 0;
  }
  std::int64_t told(int code) {
    if (code == 0) return 0;
    Error& error = last_error() = Error{};
    set_device(error, handle_.uri().c_str());
    if (code == ESTALE) {
      set_freed(error);
    } else {
      error.code = code;
      set_cause(error, "the GPU did not copy partial blocks");
      set_hint(error, "a kernel of the program may have faulted");
    }
    return -code;
  }

  /// The error of a part, told of the whole.
  std::int64_t explain(std::int64_t result) const {
    Error& error = last_error();
    error.operation = operation_name(t_.opcode);
    error.offset = t_.offset;
    error.length = t_.size;
    error.completed = done_;
    return result;
  }

  Handle& handle_;
  Bounce& bounce_;
  const Transfer& t_;
  const Interrupt& interrupt_;
  const std::uint64_t block_;
  std::uint64_t done_ = 0;
};

std::int64_t refuse(Handle& handle, const Transfer& t, int code, const char* cause, const char* hint) {
  Error& error = last_error() = Error{};
  error.code = code;
  set_transfer(error, handle, t);
  set_cause(error, "%s", cause);
  set_hint(error, "%s", hint);
  return -code;
}

/// An abandoned request may still have the buffer. 0, or what is to be told.
std::int64_t wait_for_abandoned(Handle& handle, const Transfer& t, const Interrupt& interrupt) {
  const auto begun = std::chrono::steady_clock::now();
  const auto limit = begun + std::chrono::nanoseconds(handle.policy().deadline_ns);
  auto asked = begun;
  while (memory::Registry::instance().in_flight(handle.bounce().reference()) != 0) {
    handle.drain(0);  // others may go on for ever
    const auto now = std::chrono::steady_clock::now();
    if (now > limit || handle.state() == State::wedged)
      return refuse(handle, t, EBUSY, "an interrupted unaligned request is still in flight", "try again later");
    if (interrupt.asked == nullptr || now - asked < kAsk) continue;
    asked = now;
    if (interrupt.asked(interrupt.context))
      return refuse(handle, t, EINTR, "interrupted while another unaligned request was at work", "repeat the request");
  }
  return 0;
}

/// By who has our buffer.
std::int64_t run_bounced(Handle& handle, const Transfer& t, const Interrupt& interrupt) {
  Bounce& bounce = handle.bounce();
  if (const std::int64_t refused = wait_for_abandoned(handle, t, interrupt); refused != 0) return refused;
  // The copies are ours and not the controller's, so the caller's buffer is held for all of it.
  memory::Hold hold;
  while ((hold = memory::hold(bounce.ledger(), t.buffer)) == memory::Hold::closing) sched_yield();
  if (hold == memory::Hold::stale) {
    return refuse(handle, t, ESTALE, "the registration is closed", "register the buffer again");
  }
  const bool reachable = t.buffer.registration->kind() != memory::Kind::peer;
  const std::int64_t result =
      reachable
          ? Walk(handle, t, interrupt).run()
          : refuse(handle, t, EINVAL, "partial blocks cannot be copied to memory that the processor does not reach",
                   "use whole blocks, and memory at a multiple of 4 bytes");
  bounce.ledger().remove(t.buffer.registration->index());
  return result;
}

}  // namespace

bool is_aligned_transfer(const Handle& handle, const Transfer& t) {
  const std::uint64_t mask = handle.identity().block_size - 1;
  return (((t.offset | t.size) & mask) | ((t.buffer.address + t.buffer_offset) & 3)) == 0;
}

std::int64_t run_any(Handle& handle, const Transfer& t, bool read_modify_write, const Interrupt& interrupt) {
  if (handle.geometry().bytewise) return run_whole(handle, t, interrupt);
  const std::uint64_t capacity = handle.identity().capacity();
  const bool in_range = t.buffer && t.offset <= capacity && t.size <= capacity - t.offset &&
                        t.buffer_offset <= t.buffer.size && t.size <= t.buffer.size - t.buffer_offset &&
                        !(t.buffer.readonly && t.opcode == Opcode::read);
  if (is_aligned_transfer(handle, t)) return run_whole(handle, t, interrupt);
  if (!in_range) {
    if (t.buffer && (t.buffer_offset > t.buffer.size || t.size > t.buffer.size - t.buffer_offset)) {
      return refuse(handle, t, EINVAL, "the range reaches beyond the registered buffer", "give a smaller size");
    }
    if (t.buffer.readonly && t.opcode == Opcode::read) {
      return refuse(handle, t, EACCES, "a read would write to a buffer that is registered read-only",
                    "register memory that can be written");
    }
    if (!t.buffer)
      return refuse(handle, t, EINVAL, "the buffer is not registered", "register it once, before the first I/O");
    return refuse(handle, t, ERANGE, "the range ends beyond the device", "compare it with the device's capacity");
  }
  if (t.size == 0) return 0;
  // Also where all of it would go through our own buffer: a request that needs the mapping in its middle would fail
  // there, half done.
  if (t.buffer.registration->pages(handle.geometry().number) == nullptr && !is_staged_transfer(handle, t) &&
      t.buffer.registration->generation() == t.buffer.generation) {
    set_transfer(last_error() = Error{}, handle, t);
    set_refusal(last_error(), handle, t, Refusal::unmapped);
    return -last_error().code;
  }
  if (t.opcode == Opcode::write && !read_modify_write) {
    return refuse(handle, t, EINVAL,
                  "an unaligned write must read and rewrite the blocks at its edges, which was not allowed",
                  "use whole blocks and memory at a multiple of 4 bytes, or allow it with unaligned=True");
  }
  if (t.buffer.registration->generation() != t.buffer.generation) {
    return refuse(handle, t, ESTALE, "the registration is closed", "register the buffer again");
  }
  Bounce& bounce = handle.bounce();
  if (!bounce.take(interrupt))
    return refuse(handle, t, EINTR, "interrupted while another unaligned request was at work", "repeat the request");
  const std::unique_ptr<Bounce, void (*)(Bounce*)> taken(&bounce, [](Bounce* mine) { mine->give(); });
  return run_bounced(handle, t, interrupt);
}

}  // namespace ugds::engine
