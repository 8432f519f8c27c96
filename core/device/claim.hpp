// SPDX-License-Identifier: Apache-2.0
//
// A PCI function that this process has open. The kernel does not always refuse a second opening: a VFIO group can be
// asked for a device more than once, and a descriptor of a node can be given to us twice. The second controller would
// be reset under the first.
#pragma once

#include <string>

namespace ugds::device {

class Claim {
 public:
  /// Throws Failure(EBUSY) where this process has the function open.
  explicit Claim(std::string address);
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

 private:
  std::string address_;
};

[[noreturn]] void fail_in_use(const std::string& address);

}  // namespace ugds::device
