// SPDX-License-Identifier: Apache-2.0
//
// Requests in stream order, as methods of Device.
#pragma once

#include "common.hpp"

namespace ugds::python {

/// `read_async`, `write_async`, `group` and `stream_stats`.
void define_stream_methods(nb::handle device_type);

/// Lets go of what operations that have ended kept. With the interpreter lock.
void collect_stream_objects();

}  // namespace ugds::python
