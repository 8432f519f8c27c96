// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "device/device.hpp"

namespace ugds::explore {

/// What the next opening of any URI gives.
extern std::unique_ptr<device::Device> next_device;

}  // namespace ugds::explore
