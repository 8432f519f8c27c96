// SPDX-License-Identifier: Apache-2.0
#include "engine/wedge_trace.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "base/clock.hpp"
#include "base/text.hpp"
#include "nvme/commands.hpp"
#include "nvme/status.hpp"

namespace ugds::engine {

namespace {

/// Of python/ugds/trace.py.
constexpr int kFormat = 1;

/// Nanoseconds from the origin, or null.
std::string time_text(std::uint64_t ticks, std::uint64_t origin) {
  return ticks == 0 ? "null" : std::to_string(ticks_as_ns(ticks) - origin);
}

void append_event(std::string& out, char phase, const queue::TraceRecord& r, std::size_t number, std::uint64_t ns) {
  char text[160];
  std::snprintf(text, sizeof text,
                R"({"name":"%s","ph":"%c","cat":"command","id":"%#zx","pid":1,"tid":%u,"ts":%llu.%03u)",
                nvme::opcode_name(static_cast<nvme::Opcode>(r.opcode)), phase, number, r.queue,
                static_cast<unsigned long long>(ns / 1000), static_cast<unsigned>(ns % 1000));
  out += text;
}

}  // namespace

std::string trace_text(std::span<const queue::TraceRecord> records, std::string_view device,
                       std::string_view transport) {
  const std::uint64_t now = ticks_as_ns(ticks());
  std::uint64_t origin = now;
  for (const queue::TraceRecord& r : records) {
    if (r.staged != 0) origin = std::min(origin, ticks_as_ns(r.staged));
  }
  std::string out = R"({"displayTimeUnit": "ns",
"otherData": {"program": "ugds", "format": )";
  out += std::to_string(kFormat) + R"(, "origin_ns": )" + std::to_string(origin) +
         R"(, "devices": [{"pid": 1, "device": )";
  out +=
      json_text(device) + R"(, "transport": )" + json_text(transport) + R"(, "memory": "", "route": "", "records": )";
  out += std::to_string(records.size()) + R"(, "dropped": 0}]},
"traceEvents": [
)";
  std::size_t number = 0;
  for (const queue::TraceRecord& r : records) {
    const bool in_flight = r.completed == 0 && r.status == nvme::status::aborted_by_host;
    const std::uint64_t begin = r.staged != 0 ? ticks_as_ns(r.staged) - origin : 0;
    if (number++ != 0) out += ",\n";
    append_event(out, 'b', r, number, begin);
    out += ",\"args\":{\"cid\":" + std::to_string(r.cid) + ",\"offset\":" + std::to_string(r.offset) +
           ",\"bytes\":" + std::to_string(r.bytes) +
           ",\"status\":" + json_text(in_flight ? "in flight when the device wedged" : nvme::status_words(r.status)) +
           ",\"status_code\":" + std::to_string(r.status) + ",\"opcode\":" + std::to_string(r.opcode) +
           ",\"flags\":" + std::to_string(r.flags) + ",\"queue\":" + std::to_string(r.queue) + ",\"times_ns\":[" +
           time_text(r.submitted, origin) + ',' + time_text(r.staged, origin) + ',' + time_text(r.rung, origin) + ',' +
           time_text(r.completed, origin) + "]}},\n";
    append_event(out, 'e', r, number, in_flight ? now - origin : begin);
    out += '}';
  }
  return out += "\n]}\n";
}

}  // namespace ugds::engine
