// SPDX-License-Identifier: Apache-2.0
//
// Loops of requests without Python, for benchmarks: what is measured is the library and the device.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "common.hpp"
#include "engine/batch.hpp"
#include "engine/one_command.hpp"

namespace ugds::python {

namespace {

using engine::Batch;
using engine::BatchId;
using engine::Table;
using nvme::Opcode;

void require(const Table::Use& handle, const PyDevice& device, const char* operation) {
  if (handle) return;
  Table::instance().explain_stale(device.id, operation);
  raise_last();
}

/// Nanoseconds for `count` reads of 4 KiB at offset 0, one after the other.
std::uint64_t time_reads(const PyDevice& device, const PyRegistration& registration, std::uint64_t count) {
  const Table::Use handle(Table::instance(), device.id);
  require(handle, device, "read");
  const std::uint64_t start = monotonic_ns();
  for (std::uint64_t i = 0; i < count; ++i) {
    engine::OneCommand command;
    const bool started = command.start(*handle, handle.caller(), Opcode::read, registration.reference, 0, 4096, 0);
    if (!started) raise_new(EAGAIN, "read", "the queue is in use", "time a device that nobody else uses");
    while (!command.turn(handle->turn())) {
    }
  }
  return monotonic_ns() - start;
}

/// Reads of `size` bytes by so many threads for a time. Returns how many, and the nanoseconds that it took.
std::pair<std::uint64_t, std::uint64_t> time_threads(const PyDevice& device, const PyRegistration& registration,
                                                     unsigned threads, std::uint64_t size, double seconds) {
  const Table::Use handle(Table::instance(), device.id);
  require(handle, device, "read");
  const std::uint64_t places = std::min(handle->identity().capacity(), registration.reference.size) / size;
  if (size == 0 || places < threads)
    raise_new(EINVAL, "read", "a buffer that is too small", "give each thread a request");
  std::atomic<std::uint64_t> total{0}, failed{0};
  std::atomic<bool> stop{false};
  std::uint64_t taken = 0;
  without_lock([&] {
    std::vector<std::thread> running;
    const std::uint64_t start = monotonic_ns();
    for (unsigned t = 0; t < threads; ++t) {
      running.emplace_back([&, t] {
        std::uint64_t done = 0;
        for (std::uint64_t i = t; !stop.load(std::memory_order_relaxed); i += threads, ++done) {
          const std::uint64_t at = i % places * size;
          const engine::Transfer transfer{
              .buffer = registration.reference, .offset = at, .size = size, .buffer_offset = at};
          engine::OneCommand command;
          std::int64_t result = 0;
          if (command.start(*handle, engine::caller_number(), Opcode::read, transfer.buffer, at, size, at)) {
            unsigned turns = 0;
            while (turns < engine::kPatience && !command.turn(handle->turn())) ++turns;
            result = command.resume(*handle, transfer);
          } else {
            result = engine::run(*handle, transfer);
          }
          if (result != static_cast<std::int64_t>(size)) failed.fetch_add(1);
        }
        total.fetch_add(done);
      });
    }
    while (monotonic_ns() - start < static_cast<std::uint64_t>(seconds * 1e9)) {
      const timespec wait{0, 1'000'000};
      nanosleep(&wait, nullptr);
    }
    stop.store(true);
    for (auto& thread : running) thread.join();
    taken = monotonic_ns() - start;
  });
  if (failed.load() != 0) raise_new(EIO, "read", "reads failed while they were timed", "read once to see why");
  return {total.load(), taken};
}

/// The requests of one batch: neighbours on the device and in memory.
struct InOrder {
  static constexpr bool kOffsetsTell = false;
  const memory::Reference& reference;
  std::uint64_t size, places;
  const memory::Reference& begin_run(std::size_t) { return reference; }
  const memory::Reference& buffer() const { return reference; }
  bool same_buffer(std::size_t) const { return true; }
  engine::Wanted operator()(std::size_t i) const {
    return {.offset = i % places * size, .size = size, .buffer_offset = i % places * size, .cookie = i};
  }
};

/// Batches of `depth` reads of `size` bytes, each submitted and collected by one call. Returns the nanoseconds of each.
std::vector<std::uint64_t> time_batches(const PyDevice& device, const PyRegistration& registration, std::uint32_t depth,
                                        std::uint64_t size, std::uint64_t count) {
  const Table::Use handle(Table::instance(), device.id);
  require(handle, device, "batch");
  const std::uint64_t places =
      size == 0 ? 0 : std::min(handle->identity().capacity(), registration.reference.size) / size;
  if (places == 0) raise_new(EINVAL, "batch", "a buffer that is too small", "give it room for a request");
  std::vector<std::uint64_t> times(count);
  bool failed = false;
  without_lock([&] {
    const BatchId id = handle->open_batch(depth, engine::Priority::unsaid);
    Batch& batch = *handle->batch(id.slot);
    for (std::uint64_t& time : times) {
      const std::uint64_t start = monotonic_ns();
      batch.submit(id.generation, depth, true, InOrder{registration.reference, size, places},
                   [](std::size_t) { return false; });
      batch.collect(id.generation, depth, depth, ~std::uint64_t{0} >> 1, {},
                    [&](const engine::Done& done) { failed = failed || done.result < 0; });
      time = monotonic_ns() - start;
    }
    handle->close_batch(id);
  });
  if (failed) raise_new(EIO, "batch", "reads failed while they were timed", "read once to see why");
  return times;
}

}  // namespace

void define_measure(nb::module_& m) {
  m.def("time_reads", &time_reads, nb::arg("device"), nb::arg("registration"), nb::arg("count"));
  m.def("time_threads", &time_threads, nb::arg("device"), nb::arg("registration"), nb::arg("threads"), nb::arg("size"),
        nb::arg("seconds"));
  m.def("time_batches", &time_batches, nb::arg("device"), nb::arg("registration"), nb::arg("depth"), nb::arg("size"),
        nb::arg("count"));
}

}  // namespace ugds::python
