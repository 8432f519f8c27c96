// SPDX-License-Identifier: Apache-2.0
#include "engine/transfer.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/fork.hpp"
#include "device/bytewise.hpp"
#include "nvme/status.hpp"

namespace ugds::engine {

using nvme::Opcode;

namespace {

unsigned long long number(std::uint64_t n) { return static_cast<unsigned long long>(n); }

constexpr const char* kReopen = "close the device and open it again";
constexpr const char* kWriteAgain = "write again what was written since the last flush that succeeded, then flush";
constexpr const char* kClose =
    "its buffers stay held: close the device, which resets its function once more (in C uGDSHandleDeregisterEx() with "
    "-2); where that is in vain, reset or unplug it from outside and close it again";

void set_gone(Error& error, Handle& handle, State state) {
  error.code = state == State::lost ? ENODEV : EIO;
  set_cause(error, "%s", handle.why().c_str());
  set_hint(error, "%s", state == State::lost ? handle.device().gone().hint : state == State::wedged ? kClose : kReopen);
}

/// Its caller has let go of it while it was in flight.
void set_interrupted(Error& error, Handle& handle, bool expired) {
  if (handle.state() == State::wedged) {
    error.code = expired ? ETIMEDOUT : EIO;
    set_cause(error, "%s", handle.why().c_str());
    set_hint(error, "%s", kClose);
  } else {
    error.code = ECANCELED;
    set_cause(error, "interrupted while the device was at work; the buffer is held until the command retires");
  }
}

/// What a request that a recovery ended has left behind, and what to do about it.
struct Aftermath {
  const char* left;
  const char* remedy;
};

Aftermath aftermath(Opcode opcode, bool stopped) {
  switch (opcode) {
    case Opcode::read: return {"nothing more is written to the buffer", "repeat the request"};
    case Opcode::write:
      return {"it writes no more, and each block of what is not completed is as before or as written",
              "write it again"};
    case Opcode::flush:
      if (!stopped) return {"what was written before may not be durable", "flush again"};
      return {"what was written before and not flushed may be lost", kWriteAgain};
    default:
      return {"each block of the range is as before or deallocated", "discard again only what was not written since"};
  }
}

/// A command of it came to an end by a recovery.
void set_recovered(Error& error, Handle& handle, const Transfer& t, const queue::Request& request, unsigned retries) {
  const State state = handle.state();
  if (state == State::lost && !request.expired) return set_gone(error, handle, state);
  const Aftermath after = aftermath(t.opcode, request.stopped);
  char attempts[48] = "";
  if (retries != 0) std::snprintf(attempts, sizeof attempts, ", and so were %u attempts before", retries);
  if (request.expired) {
    error.code = ETIMEDOUT;
    set_cause(error, "a command was not completed within %.3f s; it was %s%s; %s",
              static_cast<double>(handle.policy().deadline_ns) * 1e-9,
              request.stopped ? "ended by a reset of the controller" : "aborted", attempts, after.left);
  } else {
    error.code = ECANCELED;
    set_cause(error, "the controller was reset while the request was in flight%s; %s", attempts, after.left);
  }
  switch (state) {
    case State::wedged: return set_hint(error, "%s", kClose);
    case State::failed: return set_hint(error, "%s: %s", handle.why().c_str(), kReopen);
    case State::lost: return set_hint(error, "%s", handle.device().gone().hint);
    default: break;
  }
  set_hint(error, request.expired ? "%s; raise the deadline if the device is merely slow" : "%s", after.remedy);
}

/// What the operating system answered to a request on a file.
void set_system_error(Error& error, Handle& handle, const Transfer& t, const queue::Request& request) {
  error.code = static_cast<int>(request.detail);
  const device::Place place = handle.device().place_of(t.offset);
  const std::uint64_t mask = handle.device().limits().position_mask;
  if (error.code == ENOSPC && place.is_fixed && t.opcode == Opcode::write && t.offset + t.size > place.end) {
    set_cause(error, "the device ends at byte %llu", number(place.end & mask));
    return set_hint(error, "stay within it: a block device does not grow");
  }
  const char* hint = "the kernel's log may say more";
  switch (error.code) {
    case EBADF:
      if (place.why_one_way.empty()) {
        set_cause(error, "the file is closed");
        return set_hint(error, "open it again");
      }
      set_cause(error, "the file is not open for this: %s", place.why_one_way.c_str());
      return set_hint(error, "open it for reading and writing");
    case ENOSPC:
    case EDQUOT: hint = "free some space, and write the rest again"; break;
    case EFBIG: hint = "stay below the largest file that the file system or the process (ulimit -f) may have"; break;
    case EFAULT: hint = "the buffer's memory was unmapped while it was registered"; break;
    case EINVAL: hint = "the file system may have no such operation, or not at this range"; break;
    case EOPNOTSUPP: hint = "this file system cannot do it"; break;
    default: break;
  }
  set_cause(error, "the operating system says at byte %llu: %s", number(error.offset + request.failed_at),
            std::strerror(error.code));
  set_hint(error, "%s", hint);
}

void set_memory_refusal(Error& error, const Transfer& t, Refusal refusal, std::uint32_t device) {
  const memory::Reference& b = t.buffer;
  error.code = EINVAL;
  switch (refusal) {
    case Refusal::buffer_offset:
      set_cause(error, "the offset in the buffer, %llu, lies beyond it: it has %llu bytes", number(t.buffer_offset),
                number(b.size));
      return set_hint(error, "use an offset within the buffer, or register more memory");
    case Refusal::beyond_buffer:
      set_cause(error, "[%llu, +%llu) reaches beyond the registered buffer, which has %llu bytes",
                number(t.buffer_offset), number(t.size), number(b.size));
      return set_hint(error, "ask for less, or register more memory");
    case Refusal::memory_unaligned:
      set_cause(error, "the memory does not begin at a multiple of 4 bytes");
      return set_hint(error, "the controller addresses memory in dwords; align the buffer or its offset");
    case Refusal::readonly:
      error.code = EACCES;
      set_cause(error, "a read would write to a buffer that is registered read-only");
      return set_hint(error, "register memory that can be written");
    case Refusal::stale:
      error.code = ESTALE;
      set_cause(error, "the registration is closed");
      return set_hint(error, "register the buffer again");
    case Refusal::staged:
      error.code = EOPNOTSUPP;
      set_cause(error, "the device does not reach this memory (route=staged), and batches are not staged");
      return set_hint(error, "use read, write, or a group on a stream; or a device whose route is direct");
    case Refusal::unmapped:
      if (b.registration->is_staged(device)) return set_memory_refusal(error, t, Refusal::staged, device);
      if (b.registration->is_revoked(device)) {
        error.code = ESTALE;
        set_cause(error, "the memory was taken back by its exporter, and no device reaches it any more");
        return set_hint(error, "close the registration, and register what the exporter gives now");
      }
      error.code = ENXIO;
      set_cause(error, "the buffer is not mapped to this device");
      return set_hint(error,
                      "register it for this device too, or use ugds.empty() (in C uGDSHostAlloc()), whose memory every "
                      "transport can reach");
    default:
      set_cause(error, "%s",
                fork_generation() != 0 ? "the buffer is not registered in this process, a child of a fork"
                                       : "the buffer is not registered");
      return set_hint(error, "register it once, before the first I/O");
  }
}

}  // namespace

const char* operation_name(Opcode opcode) { return nvme::opcode_name(opcode); }

Refusal check_transfer(const Handle::Geometry& g, const Transfer& t) {
  // First: without a size given, the rest of the buffer has wrapped.
  if (t.buffer && t.buffer_offset > t.buffer.size) return Refusal::buffer_offset;
  if (const Refusal refusal = check_range(g, t.offset, t.size); refusal != Refusal::none) return refusal;
  if (!has_data(t.opcode)) return Refusal::none;
  if (t.opcode == Opcode::write && ((t.offset | t.size) & g.write_mask) != 0) return Refusal::whole_blocks;
  if (t.segments.empty()) return check_memory(t.buffer, t.buffer_offset, t.size, t.opcode, g.memory_mask);
  for (const Segment& segment : t.segments) {
    if ((segment.size & g.block_mask) != 0) return Refusal::unaligned;
    const Refusal refusal = check_memory(segment.buffer, segment.buffer_offset, segment.size, t.opcode, g.memory_mask);
    if (refusal != Refusal::none) return refusal;
  }
  return Refusal::none;
}

void set_transfer(Error& error, Handle& handle, const Transfer& t) {
  error.operation = operation_name(t.opcode);
  set_device(error, handle.uri().c_str());
  error.offset = t.offset & handle.device().limits().position_mask;
  error.length = t.size;
}

std::optional<std::uint64_t> end_of_file(const Handle& handle, const queue::Request& request, Refusal refusal) {
  if (!handle.geometry().bytewise || refusal != Refusal::none || request.stopped || request.expired ||
      request.status != device::kEndOfFile)
    return {};
  return request.failed_at + request.detail;
}

void set_freed(Error& error) {
  error.code = ESTALE;
  set_cause(error, "the GPU memory was freed while it was registered");
  set_hint(error, "close the registration before the memory is freed, and register what is there now");
}

void set_refusal(Error& error, Handle& handle, const Transfer& t, Refusal refusal) {
  switch (refusal) {
    case Refusal::unaligned:
      error.code = EINVAL;
      set_cause(error, "offset and size must be multiples of the block size, %u bytes", handle.identity().block_size);
      return set_hint(error, "use whole blocks; in Python read() takes any range, and write() with unaligned=True");
    case Refusal::whole_blocks:
      error.code = EINVAL;
      set_cause(error, "a write to this file must be of whole blocks of %u bytes, and nothing was written: %s",
                handle.geometry().write_mask + 1, handle.device().medium().why_whole.c_str());
      return set_hint(error,
                      "open it where it may be opened by its path, pass a descriptor without O_DIRECT, or write "
                      "whole blocks");
    case Refusal::beyond_device:
      error.code = ERANGE;
      set_cause(error, "the range ends beyond the device, which has %llu bytes", number(handle.geometry().capacity));
      return set_hint(error, "stay within its capacity");
    case Refusal::no_room: error.code = ETIMEDOUT; return set_cause(error, "no queue had room within the deadline");
    case Refusal::cancelled:
      error.code = ECANCELED;
      set_cause(error, "the request was cancelled before all of it was given to the device");
      return set_hint(error, "submit it again where it is still wanted");
    case Refusal::in_doubt:
      error.code = EIO;
      set_cause(error,
                "the controller was reset after writes had completed that no flush had followed: they may be lost, as "
                "the device has a volatile write cache");
      return set_hint(error, "%s; a reset is told of once", kWriteAgain);
    case Refusal::not_ready: return set_gone(error, handle, handle.state());
    case Refusal::interrupted: return set_interrupted(error, handle, false);
    default: return set_memory_refusal(error, t, refusal, handle.geometry().number);
  }
}

Error describe(Handle& handle, const Transfer& t, const queue::Request& request, Refusal refusal, unsigned retries) {
  Error error;
  set_transfer(error, handle, t);
  error.completed = request.failed() ? request.failed_at : 0;
  if (refusal == Refusal::interrupted) {
    set_interrupted(error, handle, request.expired);
  } else if (refusal != Refusal::none) {
    set_refusal(error, handle, t, refusal);
  } else if (request.stopped || (request.expired && nvme::status_errno(request.status) == ECANCELED)) {
    // Where what was overdue came in the end, the device's answer to it, or to another, is what there is to tell.
    set_recovered(error, handle, t, request, retries);
  } else if (handle.geometry().bytewise && request.status == device::kSystemError) {
    set_system_error(error, handle, t, request);
  } else {
    error.code = nvme::status_errno(request.status);
    if (request.status == nvme::status::data_transfer_error && t.buffer &&
        memory::Registry::instance().was_freed(t.buffer)) {
      set_freed(error);
      return error;
    }
    error.status = request.status;
    std::snprintf(error.status_words, sizeof error.status_words, "%s", nvme::status_words(request.status));
    if (request.detail != 0) {
      set_cause(error, "the device failed a command of %u bytes at byte %llu", request.detail,
                number(t.offset + request.failed_at));
    } else {
      set_cause(error, "the device failed it");
    }
    set_hint(error, "%s", nvme::status_hint(request.status));
  }
  return error;
}

}  // namespace ugds::engine
