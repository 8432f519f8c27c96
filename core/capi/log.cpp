// SPDX-License-Identifier: Apache-2.0
//
// Where the library's events go, for programs in C.
#include "base/event_log.hpp"
#include "ugds.h"

extern "C" {

void uGDSSetLogCallback(uGDSLogCallback_t callback, void* context) {
  try {
    ugds::EventLog::instance().set_callback(callback, context);
  } catch (...) {
    // No memory for a log: nothing is told.
  }
}

}  // extern "C"
