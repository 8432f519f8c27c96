// SPDX-License-Identifier: Apache-2.0
#include "gpu/visible.hpp"

#include <cerrno>
#include <charconv>
#include <string>
#include <string_view>

#include "base/environment.hpp"
#include "base/error.hpp"

namespace ugds::gpu {

bool is_visible(int device) {
  const char* text = environment("UGDS_GPUS");
  if (text == nullptr) return true;
  for (std::string_view left = text; !left.empty();) {
    const std::size_t comma = left.find(',');
    const std::string_view one = left.substr(0, comma);
    left = comma == std::string_view::npos ? "" : left.substr(comma + 1);
    int number = -1;
    std::from_chars(one.data(), one.data() + one.size(), number);
    if (number == device) return true;
  }
  return false;
}

void require_visible(int device) {
  if (is_visible(device)) return;
  fail(ENODEV, "gpu", "GPU " + std::to_string(device) + " is not among those of UGDS_GPUS=" + environment("UGDS_GPUS"),
       "add it there, or leave UGDS_GPUS unset");
}

}  // namespace ugds::gpu
