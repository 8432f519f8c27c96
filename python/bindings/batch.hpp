// SPDX-License-Identifier: Apache-2.0
//
// Batch as its Python type holds it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "common.hpp"
#include "engine/batch.hpp"
#include "results.hpp"

namespace ugds::python {

struct PyBatch {
  nb::object device;  ///< stays open
  engine::HandleId handle = 0;
  engine::BatchId id;
  std::uint32_t depth = 0;
  std::string uri;

  std::atomic<bool> closed{false};
  std::atomic<std::uint64_t> next_cookie{0};
  std::atomic<std::uint64_t> taken{0}, told{0};  ///< requests: by the engine, and to whoever collected
  std::atomic<std::uint64_t> looked{0};          ///< when a poll last gave the engine time to look at the device
  std::shared_ptr<Unseen> unseen = std::make_shared<Unseen>();

  PyBatch() = default;
  ~PyBatch();

  /// How a collection of results ended.
  enum class Ended : std::uint8_t { enough, nothing_left, timed_out, interrupted, closed };
  /// Collects until `least` results are in `out`, or nothing more can come; `most` at most. With the interpreter lock,
  /// which it lets go of where the wait is longer than some microseconds.
  Ended collect(engine::Handle& in, engine::Batch& batch, Results& out, std::size_t least, std::size_t most,
                std::uint64_t limit_ns);
  /// Gives back what was collected and not handed out.
  void put_back(Results& results);
  /// Moves results out of the engine, to wait here, unless it is interrupted first. False: the batch is closed. Without
  /// the interpreter lock; `portion` is for its use, with room for as many as there shall be at most.
  bool make_room(engine::Batch& batch, Results& portion, std::size_t most, const engine::Interrupt& interrupt);
  /// Moves what waits here to `out`.
  void take_waiting(Results& out, std::size_t most);
  /// Frees it later: requests of it are in flight.
  void retire();
  /// Results that are here.
  std::size_t waiting() const { return waiting_.load(std::memory_order_relaxed); }

 private:
  bool nothing_comes();

  std::mutex lock_;
  Results ready_;  ///< results that were collected to make room, of which the first have been taken
  std::size_t ready_taken_ = 0;
  std::atomic<std::size_t> waiting_{0};
  std::atomic<std::uint32_t> moving_{0};  ///< calls that have results in their hands
};

/// Raises ugds.Error (EBADF): the device is closed.
[[noreturn]] void raise_stale(const PyBatch& self, const char* operation);
/// The same: the batch is.
[[noreturn]] void raise_closed(const char* operation);

/// The batch in its device. Raises ugds.Error (EBADF).
inline engine::Batch& batch_of(const PyBatch& self, const engine::Table::Use& handle, const char* operation) {
  if (!handle) [[unlikely]]
    raise_stale(self, operation);
  if (self.closed.load(std::memory_order_relaxed)) [[unlikely]]
    raise_closed(operation);
  engine::Batch* const batch = handle->batch(self.id.slot);
  if (batch == nullptr) __builtin_unreachable();  // it was opened
  return *batch;
}

PyBatch& batch_self(PyObject* self);

/// The methods that submit, of the C API.
PyObject* batch_read(PyObject* self, PyObject* const* args, Py_ssize_t positional, PyObject* keywords);
PyObject* batch_write(PyObject* self, PyObject* const* args, Py_ssize_t positional, PyObject* keywords);
void define_submission();

/// Device.batch().
PyBatch* open_batch(nb::object device, std::uint32_t depth, nb::handle priority);
/// Frees batches that were dropped while requests were in flight, where those have ended.
void collect_retired_batches();
void define_batch(nb::module_& m);

}  // namespace ugds::python
