// SPDX-License-Identifier: Apache-2.0
//
// What is asked for, whether it can be, and the words for what became of it. Every way in uses these.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "base/error.hpp"
#include "engine/handle.hpp"
#include "engine/policy.hpp"
#include "memory/registry.hpp"
#include "nvme/commands.hpp"
#include "queue/request.hpp"

namespace ugds::engine {

/// One piece of memory of a vectored request. Bytes.
struct Segment {
  memory::Reference buffer{};
  std::uint64_t buffer_offset = 0;
  std::uint64_t size = 0;
};

/// What is asked for. Offsets and sizes in bytes; offset and size are multiples of the block size, and the memory
/// begins at a multiple of 4 bytes (the controller's dword).
struct Transfer {
  nvme::Opcode opcode = nvme::Opcode::read;  ///< read, write, flush or dataset_management (deallocate)
  memory::Reference buffer{};                ///< for read and write
  std::uint64_t offset = 0;
  std::uint64_t size = 0;
  std::uint64_t buffer_offset = 0;
  bool durable = false;  ///< a write that has reached the medium when it returns (FUA)
  Priority priority = Priority::unsaid;
  std::span<const Segment> segments{};  ///< memory instead of `buffer`, of `size` bytes together, each whole blocks
};

/// Why a request, or the rest of it, was not given to the device.
enum class Refusal : std::uint8_t {
  none,
  buffer_offset,
  unaligned,
  beyond_device,
  unregistered,
  beyond_buffer,
  memory_unaligned,
  readonly,
  stale,
  unmapped,
  no_room,
  not_ready,     ///< the handle is not, for good
  cancelled,     ///< by its caller, before it was staged
  interrupted,   ///< its caller went away while it was in flight
  in_doubt,      ///< a flush, after a reset that may have lost what was written before
  whole_blocks,  ///< a write of a part of a block, to a file that takes whole ones alone
  staged,        ///< its registration is staged for this device, which its way in does not do
};

constexpr bool has_data(nvme::Opcode o) { return o == nvme::Opcode::read || o == nvme::Opcode::write; }

/// The first rule that a read or write breaks, or none. The rules of memory are those of one segment of `size` bytes.
inline Refusal check_memory(const memory::Reference& b, std::uint64_t buffer_offset, std::uint64_t size,
                            nvme::Opcode opcode, std::uint32_t mask) {
  if (b.size - buffer_offset < size || buffer_offset > b.size || ((b.address + buffer_offset) & mask) != 0 ||
      (opcode == nvme::Opcode::read && b.readonly) || !b) [[unlikely]] {
    if (!b) return Refusal::unregistered;
    if (buffer_offset > b.size) return Refusal::buffer_offset;
    if (size > b.size - buffer_offset) return Refusal::beyond_buffer;
    return ((b.address + buffer_offset) & mask) != 0 ? Refusal::memory_unaligned : Refusal::readonly;
  }
  return Refusal::none;
}
inline Refusal check_range(const Handle::Geometry& g, std::uint64_t offset, std::uint64_t size) {
  if (((offset | size) & g.block_mask) != 0) return Refusal::unaligned;
  return offset > g.capacity || size > g.capacity - offset ? Refusal::beyond_device : Refusal::none;
}
/// All of them, for any transfer.
Refusal check_transfer(const Handle::Geometry& geometry, const Transfer& transfer);

/// "read", "write", "flush", "discard".
const char* operation_name(nvme::Opcode opcode);

/// Which request an error is of: operation, device and range.
void set_transfer(Error& error, Handle& handle, const Transfer& transfer);
/// Why the device is left alone, in words, with the errno.
void set_refusal(Error& error, Handle& handle, const Transfer& transfer, Refusal refusal);
/// The bytes of a read that met the end of its file, where that is all that a request failed by.
std::optional<std::uint64_t> end_of_file(const Handle& handle, const queue::Request& request, Refusal refusal);
/// GPU memory was freed while it was registered.
void set_freed(Error& error);
/// The error of a request that failed: by its refusal, or by what the device or a recovery did to a command of it.
/// `retries`: how often it was submitted again.
Error describe(Handle& handle, const Transfer& transfer, const queue::Request& request, Refusal refusal,
               unsigned retries = 0);

}  // namespace ugds::engine
