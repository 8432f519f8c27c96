// SPDX-License-Identifier: Apache-2.0
//
// The last commands of a device, in the format of the traces that `ugds.trace` writes and reads: kept when it wedges.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "queue/trace.hpp"

namespace ugds::engine {

/// The records as one file, in ticks as they are. Of some no time is known, of those in flight none of completion.
std::string trace_text(std::span<const queue::TraceRecord> records, std::string_view device,
                       std::string_view transport);

}  // namespace ugds::engine
