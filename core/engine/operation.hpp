// SPDX-License-Identifier: Apache-2.0
//
// A request on its way through one queue pair: cut into commands, staged as there is room, waited for. It lives on its
// caller's stack. This is where every way in comes together.
//
//   Operation operation(handle, transfer);
//   while (!operation.turn()) {}
//   return operation.result();
#pragma once

#include <cstdint>

#include "engine/handle.hpp"
#include "engine/idle.hpp"
#include "memory/registry.hpp"
#include "nvme/commands.hpp"
#include "queue/request.hpp"

namespace ugds::engine {

/// What is asked for. Offsets and sizes in bytes; offset and size are multiples of the block size, and the memory begins
/// at a multiple of 4 bytes (the controller's dword).
struct Transfer {
  nvme::Opcode opcode = nvme::Opcode::read;  ///< read, write, flush or dataset_management (deallocate)
  memory::Reference buffer{};                ///< for read and write
  std::uint64_t offset = 0;
  std::uint64_t size = 0;
  std::uint64_t buffer_offset = 0;
  bool durable = false;                      ///< a write that has reached the medium when it returns (FUA)
};

/// "read", "write", "flush", "discard".
const char* operation_name(nvme::Opcode opcode);

/// A small number for the calling thread, for spreading threads over queue pairs.
std::uint32_t caller_number();

class Operation {
 public:
  /// Checks the arguments; on a bad one the operation is done at once.
  Operation(Handle& handle, const Transfer& transfer);
  /// Abandons what is still in flight.
  ~Operation() {
    if (!done()) abandon();
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  bool done() const { return request_.done.load(std::memory_order_acquire) != 0; }
  /// One poll turn: stages what there is room for, or reaps for everyone, or idles. True: done.
  bool turn();
  /// Bytes transferred, or -errno with last_error() filled. Only when done.
  std::int64_t result();
  /// Lets go of the request: its commands run on and keep their memory held until they retire. Then it is done.
  void abandon();

  const Transfer& transfer() const { return transfer_; }

 private:
  bool check();
  bool stage();
  bool stage_piece(queue::QueuePair& pair);
  void stage_ranges(queue::QueuePair& pair);
  bool idle();
  bool attend();
  void refuse(int code, const char* cause_format, ...) __attribute__((format(printf, 3, 4)));
  void stop_here(int code);
  std::int64_t explain();

  Handle& handle_;
  queue::QueuePair* pair_ = nullptr;  ///< fixed once a command is in flight
  std::uint64_t staged_ = 0;          ///< bytes
  Transfer transfer_;
  queue::Request request_;
  Idle idle_;
  std::uint64_t begun_ = 0;           ///< ticks at the first look at the clock
  std::uint64_t looked_ = 0;
  int refused_ = 0;                   ///< an errno of ours; the cause is in last_error()
  bool expired_ = false;              ///< a command of this request was overdue
};

/// Asked now and then by a long wait, in the waiting thread; true ends the wait and abandons the request.
struct Interrupt {
  bool (*asked)(void* context) = nullptr;
  void* context = nullptr;
};

/// Runs a transfer to its end, in the calling thread. Bytes, or -errno with last_error() filled; -EINTR where
/// `interrupt` ended it. Thread-safe.
std::int64_t run(Handle& handle, const Transfer& transfer, const Interrupt& interrupt = {});
/// Goes on with an operation until it is done.
std::int64_t finish(Operation& operation, const Interrupt& interrupt);

/// Deallocates blocks: they read as zeros afterwards where the device promises that, and need not be kept. Of any size.
std::int64_t discard(Handle& handle, std::uint64_t offset, std::uint64_t size, const Interrupt& interrupt = {});

}  // namespace ugds::engine
