// SPDX-License-Identifier: Apache-2.0
#include "device/claim.hpp"

#include <cerrno>
#include <mutex>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "base/fork.hpp"

namespace ugds::device {

namespace {

struct Claimed {
  std::mutex lock;
  std::set<std::string> addresses;
};
Claimed& claimed() {
  // NOLINTNEXTLINE: devices may be closed after static destruction
  static auto* const all = [] {
    auto* const made = new Claimed;
    // A child of a fork has none of its parent's devices.
    on_fork(ForkOrder::claimed_functions, {[] { claimed().lock.lock(); }, [] { claimed().lock.unlock(); },
                                           [] {
                                             claimed().addresses.clear();
                                             claimed().lock.unlock();
                                           }});
    return made;
  }();
  return *all;
}

}  // namespace

Claim::Claim(std::string address) : address_(std::move(address)) {
  Claimed& all = claimed();
  std::lock_guard guard(all.lock);
  if (!all.addresses.insert(address_).second) fail_in_use(address_);
}

Claim::~Claim() {
  std::lock_guard guard(claimed().lock);
  claimed().addresses.erase(address_);
}

void fail_in_use(const std::string& address) {
  fail(EBUSY, "open", address + " is in use: somebody else has it open",
       "end that process, or use the device that is open");
}

}  // namespace ugds::device
