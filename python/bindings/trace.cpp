// SPDX-License-Identifier: Apache-2.0
//
// What `ugds.trace` needs to read records: their layout, and statuses in words.
#include "queue/trace.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <string>
#include <tuple>
#include <vector>

#include "common.hpp"
#include "memory/registry.hpp"
#include "nvme/status.hpp"

namespace ugds::python {

namespace {

using queue::TraceRecord;

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
  m.def("trace_layout", &trace_layout);
  m.def("trace_flags", &trace_flags);
  m.def(
      "status_words", [](std::uint16_t status) { return std::string(nvme::status_words(status)); }, nb::arg("status"),
      "An NVMe status (type in bits 10:8, code in 7:0) in words. Thread-safe.");
}

}  // namespace ugds::python
