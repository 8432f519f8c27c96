// SPDX-License-Identifier: Apache-2.0
#include "emulator/controller.hpp"

#include <algorithm>
#include <cerrno>

#include "base/error.hpp"
#include "base/steps.hpp"
#include "base/units.hpp"
#include "emulator/impl.hpp"

namespace ugds::emulator {

namespace {

const Options& checked(const Options& options) {
  check_options(options);
  setup_step("emulator: controller");
  return options;
}

std::uint64_t capabilities(const Options& o) {
  return nvme::Capabilities::make({.max_queue_entries = o.depth,
                                   .contiguous_queues_required = o.contiguous,
                                   .ready_timeout_units = o.timeout,
                                   .doorbell_stride_power = o.stride,
                                   .min_page_power = o.mpsmin,
                                   .max_page_power = o.mpsmax})
      .raw;
}

}  // namespace

Controller::Impl::Impl(const Options& wanted)
    : options(checked(wanted)),
      cap(capabilities(wanted)),
      clock(wanted.virtual_clock),
      timing(wanted),
      random(wanted.seed),
      mover(wanted.copiers),
      subsystem(wanted),
      doorbells(2 * (std::uint64_t{wanted.queues} + 1) * (std::uint64_t{4} << wanted.stride), true),
      vectors(wanted.vector_count()),
      free_slots(wanted.slots == 0 ? ~std::uint32_t{0} : wanted.slots) {
  for (const Fault& fault : faults_at_open()) faults.add(fault);
  return_to_initial_state(true);
  counters = {};
  doorbells_were_lost = false;
  setup_step("emulator: attach");
  identifier = subsystem->attach(this);
  try {
    setup_step("emulator: thread");
    if (!options.pump_by_caller)
      thread = quiet_thread([](void* impl, std::uint32_t) { static_cast<Impl*>(impl)->run(); }, this, 0,
                            "use pump=caller, or raise ulimit -u");
  } catch (...) {
    subsystem->detach(this);
    throw;
  }
  subsystem.keep();
}

Controller::Impl::~Impl() {
  subsystem->detach(this);
  quit.store(true, std::memory_order_seq_cst);
  wake();
  if (thread.joinable()) thread.join();
}

bool Controller::Impl::turn_safely() noexcept {
  try {
    return turn();
  } catch (...) {
    // Only memory can be lacking. The controller stops, as a real one does that has met something it cannot handle.
    fail_fatally();
    return true;
  }
}

Controller::Controller(const Options& options) : impl_(std::make_unique<Impl>(options)) {}
Controller::~Controller() = default;

std::uint64_t Controller::read(std::uint32_t offset, std::uint32_t width) { return impl_->read(offset, width); }
void Controller::write(std::uint32_t offset, std::uint64_t value, std::uint32_t width) {
  impl_->write(offset, value, width);
}

std::uint32_t* Controller::doorbell(std::uint32_t offset) {
  if (impl_->options.trapped) return nullptr;
  HostGuard guard(*impl_);
  return impl_->is_shadowed(offset) ? nullptr : impl_->doorbell_word(offset);
}

void Controller::set_interrupt(std::uint16_t vector, int eventfd) {
  HostGuard guard(*impl_);
  impl_->set_interrupt(vector, eventfd);
}

int Controller::share_doorbells() {
  Reservation fresh = Reservation::shared(impl_->doorbells.bytes(), nvme::kDoorbellBase);
  const int descriptor = fresh.descriptor();
  {
    HostGuard guard(*impl_);
    impl_->drop_everything();
    std::swap(impl_->doorbells, fresh);
    for (std::uint32_t i = 0; i < 2; ++i)
      impl_->admin_words[i] = reinterpret_cast<std::uint32_t*>(impl_->doorbells.data() + i * impl_->stride());
    impl_->return_to_initial_state(true);
    impl_->removed.store(false, std::memory_order_release);
  }
  impl_->wake();
  return descriptor;
}

std::uint64_t Controller::doorbell_bytes() const { return impl_->doorbells.bytes(); }

bool Controller::function_reset() {
  {
    HostGuard guard(*impl_);
    if (impl_->faults.take(Fault::Kind::reset_fails)) return false;
    impl_->return_to_initial_state(false);
  }
  impl_->wake();
  return true;
}

[[gnu::noinline]] void Controller::turn(void* controller) {
  Impl& impl = *static_cast<Controller*>(controller)->impl_;
  if (!impl.lock.try_lock()) return;
  impl.turn_safely();
  impl.lock.unlock();
}

bool Controller::pumped_by_caller() const { return impl_->options.pump_by_caller; }

std::uint64_t Controller::map(void* address, std::uint64_t length, bool writable) {
  const std::uint64_t start = reinterpret_cast<std::uintptr_t>(address);
  if (length == 0 || !is_aligned(start | length, AddressSpace::kPage))
    fail(EINVAL, "map", "the address and the length must be multiples of 4096, and the length not 0");
  AddressSpace::require_memory(address, length, writable);
  HostGuard guard(*impl_);
  return impl_->memory.add(address, length, writable);
}

std::uint64_t Controller::map(const ForeignRange& range, bool writable) {
  const std::uint64_t length = range.length.value;
  if (length == 0 || !is_aligned(range.address | length, AddressSpace::kPage))
    fail(EINVAL, "map", "the address and the length must be multiples of 4096, and the length not 0");
  if (range.copier == nullptr) fail(EINVAL, "map", "memory of another kind needs a copier", "map it by its address");
  HostGuard guard(*impl_);
  impl_->mover.make_buffers();
  void* address = reinterpret_cast<void*>(static_cast<std::uintptr_t>(range.address));
  return impl_->memory.add(address, length, writable, range.copier);
}

void Controller::map_at(std::uint64_t iova, void* address, std::uint64_t length, bool writable) {
  if (length == 0 || !is_aligned(iova | reinterpret_cast<std::uintptr_t>(address) | length, AddressSpace::kPage))
    fail(EINVAL, "map", "the IOVA, the address and the length must be multiples of 4096, and the length not 0");
  if (length > AddressSpace::kFirst || iova > AddressSpace::kFirst - length)
    fail(EINVAL, "map", "the IOVAs reach beyond 2^48");
  HostGuard guard(*impl_);
  if (!impl_->memory.add_at(iova, address, length, writable))
    fail(EEXIST, "map", "something is mapped at these IOVAs", "unmap it first");
}

void Controller::unmap(std::uint64_t iova) noexcept {
  HostGuard guard(*impl_);
  impl_->unmap(iova);
}

const Options& Controller::options() const { return impl_->options; }
std::vector<Violation> Controller::violations() const { return impl_->violations.all(); }
void Controller::clear_violations() { impl_->violations.clear(); }

Counters Controller::counters() const {
  HostGuard guard(*impl_);
  Counters counters = impl_->counters;
  counters.wakeups = impl_->wakeups.load(std::memory_order_relaxed);
  counters.mapped_bytes = impl_->memory.mapped_bytes();
  counters.mapped_ranges = impl_->memory.mapped_ranges();
  return counters;
}

void Controller::inject(const Fault& fault) {
  HostGuard guard(*impl_);
  impl_->faults.add(fault);
}

void Controller::clear_faults() {
  HostGuard guard(*impl_);
  impl_->faults.clear();
}

void Controller::remove() {
  HostGuard guard(*impl_);
  impl_->removed.store(true, std::memory_order_release);
  impl_->drop_everything();
  impl_->state = State::disabled;
}

void Controller::plug() {
  {
    HostGuard guard(*impl_);
    impl_->return_to_initial_state(true);
    impl_->removed.store(false, std::memory_order_release);
  }
  impl_->wake();
}

void Controller::power_cut(double survive, std::uint64_t seed) { impl_->subsystem->power_cut(survive, seed); }

void Controller::peek(std::uint32_t nsid, std::uint64_t offset, void* out, std::uint64_t length) const {
  impl_->subsystem->peek(nsid, offset, out, length);
}
void Controller::poke(std::uint32_t nsid, std::uint64_t offset, const void* data, std::uint64_t length) {
  impl_->subsystem->poke(nsid, offset, data, length);
}
std::uint64_t Controller::stored_bytes() const { return impl_->subsystem->stored_bytes(); }

const std::atomic<std::uint64_t>* Controller::virtual_clock() const { return impl_->clock.word(); }
std::uint64_t Controller::virtual_now_ns() const { return impl_->clock.now(); }

void Controller::hold_time_at(std::uint64_t ns) {
  HostGuard guard(*impl_);
  impl_->held_at = ns;
}

void Controller::advance_ns(std::uint64_t ns) {
  {
    HostGuard guard(*impl_);
    if (impl_->clock.is_virtual()) impl_->clock.advance(ns);
  }
  impl_->wake();
}

}  // namespace ugds::emulator
