// SPDX-License-Identifier: Apache-2.0
//
// Tracing a device, and what `ugds.trace` needs to read records: their layout, and statuses in words.
#include "queue/trace.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstddef>
#include <new>
#include <string>
#include <tuple>
#include <vector>

#include "base/clock.hpp"
#include "common.hpp"
#include "memory/registry.hpp"
#include "nvme/status.hpp"

namespace ugds::python {

namespace {

using engine::Table;
using queue::TraceRecord;

[[noreturn]] void raise_stale(const PyDevice& device) {
  Table::instance().explain_stale(device.id, "trace");
  set_device(last_error(), device.uri.c_str());
  raise_last();
}

void trace_start(const PyDevice& device, std::uint64_t capacity) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 30;
  if (capacity == 0 || capacity > kMost) {
    raise_new(EINVAL, "trace", "room for " + std::to_string(capacity) + " commands", "ask for 1 to 2^30");
  }
  const Table::Use handle(Table::instance(), device.id);
  if (!handle) raise_stale(device);
  bool started = false;
  try {
    started = without_lock([&] { return handle->start_trace(capacity); });
  } catch (const std::bad_alloc&) {
    raise_new(ENOMEM, "trace", "no memory for " + std::to_string(capacity) + " commands on each queue pair",
              "ask for room for fewer");
  }
  if (!started) raise_new(EBUSY, "trace", device.uri + " is being traced already", "end that trace first");
}

nb::bytes trace_take(const PyDevice& device) {
  const Table::Use handle(Table::instance(), device.id);
  if (!handle) raise_stale(device);
  std::vector<TraceRecord> records;
  const bool traced = without_lock([&] {
    if (!handle->take_trace(records)) return false;
    for (TraceRecord& record : records) {
      for (std::uint64_t* time : {&record.submitted, &record.staged, &record.rung, &record.completed}) {
        *time = ticks_as_ns(*time);
      }
    }
    return true;
  });
  if (!traced) raise_new(EINVAL, "trace", device.uri + " is not being traced", "start a trace first");
  return nb::bytes(reinterpret_cast<const char*>(records.data()), records.size() * sizeof(TraceRecord));
}

std::uint64_t trace_stop(const PyDevice& device) {
  const Table::Use handle(Table::instance(), device.id);
  if (!handle) raise_stale(device);
  return without_lock([&] { return handle->stop_trace(); });
}

template <class Function>
void add_method(nb::handle type, const char* name, Function function, const char* text) {
  nb::setattr(type, name, nb::cpp_function(function, nb::scope(type), nb::name(name), nb::is_method(), text));
}

/// (name, offset, bytes) of each field of a record, and what a record takes.
std::tuple<std::vector<std::tuple<std::string, std::size_t, std::size_t>>, std::size_t> trace_layout() {
#define UGDS_FIELD(name) \
  { #name, offsetof(TraceRecord, name), sizeof(TraceRecord::name) }
  return {{UGDS_FIELD(submitted), UGDS_FIELD(staged), UGDS_FIELD(rung), UGDS_FIELD(completed), UGDS_FIELD(offset),
           UGDS_FIELD(bytes), UGDS_FIELD(queue), UGDS_FIELD(cid), UGDS_FIELD(status), UGDS_FIELD(opcode),
           UGDS_FIELD(flags)},
          sizeof(TraceRecord)};
#undef UGDS_FIELD
}

nb::dict trace_flags() {
  nb::dict flags;
  flags["continued"] = queue::kTraceContinued;
  flags["durable"] = queue::kTraceDurable;
  flags["memory_shift"] = queue::kTraceMemoryShift;
  flags["route_shift"] = queue::kTraceRouteShift;
  nb::list memory, route;
  for (const auto kind : {memory::Kind::host, memory::Kind::cuda, memory::Kind::hip, memory::Kind::peer}) {
    memory.append(memory::kind_name(kind));
  }
  for (const auto way : {memory::Route::direct, memory::Route::staged, memory::Route::buffered}) {
    route.append(memory::route_name(way));
  }
  flags["memory"] = memory;
  flags["route"] = route;
  return flags;
}

}  // namespace

void define_trace(nb::module_& m) {
  const nb::object type = m.attr("Device");
  add_method(type, "trace_start", &trace_start,
             "Records every command from now on, with room for so many on each queue pair. Raises `ugds.Error` (EBUSY "
             "where it is\ntraced already, EINVAL, ENOMEM, EBADF). Use `trace()`.");
  add_method(type, "trace_take", &trace_take,
             "The records of commands that are done, as bytes (see `ugds.trace.RECORD`), queue by queue; times in "
             "nanoseconds.");
  add_method(type, "trace_stop", &trace_stop, "Ends the recording. Gives how many commands found no room.");
  m.def("trace_layout", &trace_layout);
  m.def("trace_flags", &trace_flags);
  m.def(
      "status_words", [](std::uint16_t status) { return std::string(nvme::status_words(status)); }, nb::arg("status"),
      "An NVMe status (type in bits 10:8, code in 7:0) in words. Thread-safe.");
}

}  // namespace ugds::python
