// SPDX-License-Identifier: Apache-2.0
#include "engine/table.hpp"

#include <cerrno>
#include <ctime>
#include <utility>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/steps.hpp"

namespace ugds::engine {

constinit Immortal<Table> table;

namespace {

constexpr std::uint64_t kAbandonLimit = 5'000'000'000;

void rest() {
  const timespec wait{0, 50'000};
  nanosleep(&wait, nullptr);
}

}  // namespace

void Table::prepare_for_fork() {
  static const bool hooked = [] {
    on_fork(ForkOrder::handles, {[] { instance().lock_.lock(); }, [] { instance().lock_.unlock(); },
                                 [] {
                                   Table& self = instance();
                                   for (Slot& slot : self.slots_) {
                                     slot.id.store(self.nobody(slot));
                                     slot.handle = nullptr;
                                     slot.reserved = false;
                                     slot.closing = 0;
                                     for (auto& stripe : slot.users) stripe.count.store(0);
                                   }
                                   self.forked_below_ = self.next_;
                                   self.lock_.unlock();
                                 }});
    return true;
  }();
  static_cast<void>(hooked);
}

HandleId Table::open(const std::string& uri, const Policy& policy) {
  Slot* slot = nullptr;
  HandleId id = 0;
  prepare_for_fork();
  {
    std::lock_guard guard(lock_);
    for (std::uint32_t i = 0; i < kSlots && slot == nullptr; ++i) {
      Slot& candidate = slots_[(next_ + i) % kSlots];
      if (candidate.reserved || candidate.handle != nullptr) continue;
      next_ += i;
      slot = &candidate;
    }
    if (slot == nullptr) {
      fail(EMFILE, "open", "64 devices are open in this process, which is the most", "close one that is not needed");
    }
    id = next_++;
    slot->reserved = true;
    slot->id.store(nobody(*slot));
  }
  std::unique_ptr<Handle> handle;
  try {
    setup_step("open: handle");
    handle = std::make_unique<Handle>(uri, policy);
  } catch (...) {
    std::lock_guard guard(lock_);
    slot->reserved = false;
    throw;
  }
  std::lock_guard guard(lock_);
  slot->reserved = false;
  slot->handle = handle.release();
  slot->id.store(id, std::memory_order_seq_cst);
  return id;
}

std::uint64_t Table::users(const Slot& slot) const {
  std::uint64_t total = 0;
  for (const auto& stripe : slot.users) total += stripe.count.load(std::memory_order_seq_cst);
  return total;
}

Table::Slot* Table::reserve(HandleId id) {
  std::lock_guard guard(lock_);
  Slot& slot = slots_[id % kSlots];
  if (slot.handle == nullptr || slot.reserved || slot.id.load(std::memory_order_relaxed) != id) return nullptr;
  slot.reserved = true;
  slot.closing = id;
  return &slot;
}

bool Table::is_closing(HandleId id) {
  std::lock_guard guard(lock_);
  return id != 0 && slots_[id % kSlots].closing == id;
}

/// What keeps the handle of a slot that is being closed.
std::string Table::holders(const Slot& slot) const {
  std::string words = slot.handle->holders();
  if (const std::uint64_t inside = users(slot); inside != 0) {
    words = std::to_string(inside) + (inside == 1 ? " call is running" : " calls are running") +
            (words.empty() ? "" : "; ") + words;
  }
  return words.empty() ? "what was in flight has ended just now" : words;
}

int Table::close(HandleId id, Mode mode, std::uint64_t limit_ns, std::string* held, Lost* lost) {
  const std::uint64_t start = monotonic_ns();
  const auto left = [&]() -> std::uint64_t {
    if (mode == Mode::check) return 0;
    if (mode == Mode::wait) return ~std::uint64_t{0} >> 1;
    const std::uint64_t spent = monotonic_ns() - start;
    return spent < limit_ns ? limit_ns - spent : 0;
  };
  Slot* slot = reserve(id);
  while (slot == nullptr && is_closing(id)) {
    if (left() == 0) {
      if (held != nullptr) *held = "another thread is closing it";
      return EBUSY;
    }
    rest();
    slot = reserve(id);
  }
  if (slot == nullptr) return ESTALE;
  // Nobody new comes in from here on. Once the counts were seen at 0 nobody is inside: what is counted later is a
  // caller with a stale identifier, on its way out.
  slot->id.store(nobody(*slot), std::memory_order_seq_cst);
  // What is pending on streams is in use too, unless it is released by force.
  const auto is_idle = [&] {
    return users(*slot) == 0 && (mode == Mode::force || slot->handle->stream_operations() == 0);
  };
  bool idle = is_idle();
  while (!idle && left() != 0) {
    rest();
    idle = is_idle();
  }
  if (idle && mode == Mode::force)
    idle = slot->handle->force_stop() && (slot->handle->drain(limit_ns), true);
  else if (idle)
    idle = slot->handle->state() != State::wedged && slot->handle->drain(left());
  if (!idle) {
    if (held != nullptr) *held = holders(*slot);
    reopen(*slot, id);
    return EBUSY;
  }
  release(*slot, lost);
  return 0;
}

void Table::abandon(HandleId id) {
  Slot* slot = reserve(id);
  if (slot == nullptr) return;
  slot->id.store(nobody(*slot), std::memory_order_seq_cst);
  slot->handle->give_up();
  const std::uint64_t start = monotonic_ns();
  while (users(*slot) != 0) {
    if (monotonic_ns() - start > kAbandonLimit) return;  // never deleted under a thread that is inside
    rest();
  }
  release(*slot);
}

void Table::reopen(Slot& slot, HandleId id) {
  std::lock_guard guard(lock_);
  slot.id.store(id, std::memory_order_seq_cst);
  slot.reserved = false;
  slot.closing = 0;
}

/// Stops the controller, or leaks what it may still use.
void Table::release(Slot& slot, Lost* lost) {
  Lost here;
  here.count = slot.handle->lost_results(here.first);
  if (here.count != 0) {
    Event event;
    event.name = "uncollected";
    event.operation = here.first.operation;
    event.action = "the device is closed, and their results are gone";
    event.remedy = "collect the results of a batch before its device is closed";
    set_detail(event, "requests of batches that failed, whose results nobody has collected: %llu; the first: %s",
               static_cast<unsigned long long>(here.count), here.first.cause);
    slot.handle->events().tell(event);
  }
  if (lost != nullptr) *lost = here;
  delete slot.handle;
  std::lock_guard guard(lock_);
  slot.handle = nullptr;
  slot.reserved = false;
  slot.closing = 0;
}

HandleId Table::nth(std::uint32_t n) {
  std::lock_guard guard(lock_);
  for (const Slot& slot : slots_) {
    if (is_open(slot) && n-- == 0) return slot.id.load(std::memory_order_relaxed);
  }
  return 0;
}

std::int64_t Table::explain_stale(HandleId id, const char* operation) const {
  Error& error = last_error() = Error{};
  error.code = EBADF;
  error.operation = operation;
  if (id != 0 && id < forked_below_) {
    set_cause(error, "the device was opened before a fork, and only the parent can use it");
    set_hint(error, "open it again in the child, or start children by spawn");
  } else {
    set_cause(
        error, "%s",
        id == 0 ? "the handle is none: no device was ever opened under it" : "the device is closed, or being closed");
    set_hint(error, "%s", id == 0 ? "open the device first" : "open it again");
  }
  return -error.code;
}

}  // namespace ugds::engine
