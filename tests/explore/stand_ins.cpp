// SPDX-License-Identifier: Apache-2.0
//
// What stands for parts of the core that an exploration has no use for: transports, and memory with a descriptor
// behind it, which asks the system how much there is; and ledgers, whose memory costs more than an execution. And for
// the log.
#include "stand_ins.hpp"

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/error.hpp"
#include "base/event_log.hpp"
#include "choices.hpp"
#include "device/device.hpp"
#include "memory/host.hpp"
#include "memory/ledger.hpp"

namespace ugds::explore {
std::unique_ptr<device::Device> next_device;
}

namespace ugds {

// Nobody is told of events.
const char* level_name(Level) { return ""; }
void set_detail(Event&, const char*, ...) {}
void EventSource::set_device(const char*) {}
bool EventSource::admit() { return false; }
void EventSource::tell(Event) noexcept {}
void EventSource::tell_rest() noexcept {}
EventLog& EventLog::instance() {
  static EventLog log;
  return log;
}
void EventLog::prepare() {}
void EventLog::set_callback(Callback, void*) {}
void EventLog::set_observer(Observer) {}
void EventLog::add(const Event&) noexcept {}
void EventLog::keep_trace(std::string) noexcept {}
bool EventLog::flush(std::uint64_t) { return true; }

}  // namespace ugds

namespace ugds::device {

const char* transport_name(Transport) { return "explored"; }
Mapping Device::map_descriptor(const DescriptorRange&, Access, std::uint64_t*) { fail(EOPNOTSUPP, "map", "not here"); }
Mapping Device::map_nvidia(std::uint64_t, Bytes, Access, std::uint64_t*) { fail(EOPNOTSUPP, "map", "not here"); }
Mapping Device::map_foreign(const ForeignRange&, Access, std::uint64_t*) { fail(EOPNOTSUPP, "map", "not here"); }
void Device::require_vectors(std::size_t) const {}
void Device::set_interrupts(std::span<const int>) {}
bool is_file(const Uri&) { return false; }
std::unique_ptr<Device> open(const std::string&, const Uri&) { return std::move(explore::next_device); }

}  // namespace ugds::device

namespace ugds::memory {

HostMemory::HostMemory(std::uint64_t size) : size_(size), mapped_(size), born_(0) {
  data_ = static_cast<std::byte*>(std::aligned_alloc(4096, size));
}
HostMemory::~HostMemory() { std::free(data_); }

namespace {
/// Counts that are all zero, from ledgers that are no more.
std::vector<std::atomic<std::uint32_t>*> at_rest;
/// Registrations of one execution, and the count that nobody sums.
constexpr std::uint32_t kUsed = 16;
}  // namespace

Ledger::Ledger(std::string whose) : whose_(std::move(whose)) {
  if (at_rest.empty()) {
    counts_ = static_cast<std::atomic<std::uint32_t>*>(std::calloc(kMaxRegistrations + 1, sizeof counts_[0]));
    return;
  }
  counts_ = at_rest.back();
  at_rest.pop_back();
}

Ledger::~Ledger() {
  for (std::uint32_t i = 0; i < kUsed; ++i) {
    explore::require(counts_[i].load() == 0, "counts return to zero", "a queue ends with a registration held");
  }
  counts_[kNone].store(0);
  at_rest.push_back(counts_);
}

}  // namespace ugds::memory

/// What a controller that nothing stops may still use is leaked on purpose.
extern "C" const char* __lsan_default_suppressions() { return "leak:ugds::engine::Handle\nleak:ugds::memory::Reg"; }
