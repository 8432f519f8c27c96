// SPDX-License-Identifier: Apache-2.0
//
// Events of the core (base/event_log.hpp) for Python's logging. They are added under locks that a thread with the
// interpreter's lock may wait for, so whoever adds one only keeps a copy and asks the interpreter to call back: its
// main thread logs them when it gets to that, and any thread before it raises an error of ours.
#include <nanobind/stl/string.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "base/event_log.hpp"
#include "base/fault_file.hpp"
#include "base/immortal.hpp"
#include "common.hpp"

namespace ugds::python {

namespace {

struct Waiting {
  std::mutex lock;
  std::array<Event, 128> ring{};
  std::uint64_t added = 0, taken = 0, lost = 0;
  bool listens = false;  ///< the interpreter is there
  std::atomic<bool> any{false}, asked{false}, logs{false};
};
constinit Immortal<Waiting> the_waiting;
Waiting& waiting() { return the_waiting.value; }

int call_back(void*) {
  waiting().asked.store(false);
  log_events();
  return 0;
}

void observe(const Event& event) {
  Waiting& w = waiting();
  const std::lock_guard guard(w.lock);
  if (!w.listens) return;
  if (w.added - w.taken == w.ring.size()) {
    w.lost += 1 + event.left_out;
    return;
  }
  w.ring[w.added++ % w.ring.size()] = event;
  w.any.store(true);
  if (!w.asked.exchange(true) && Py_AddPendingCall(call_back, nullptr) != 0) w.asked.store(false);
}

/// The oldest one, as a line; "" where there is none.
std::string take() {
  Waiting& w = waiting();
  Event event;
  {
    const std::lock_guard guard(w.lock);
    if (w.taken == w.added) {
      w.any.store(false);
      return "";
    }
    event = w.ring[w.taken++ % w.ring.size()];
    event.left_out += std::exchange(w.lost, 0);
  }
  return line_of(event);
}

void log_all() noexcept {
  try {
    nb::object emit;
    for (std::string line = take(); !line.empty(); line = take()) {
      if (!emit.is_valid()) emit = nb::module_::import_("ugds._log").attr("emit");
      // What callers have in their URIs need not be text.
      const nb::object text =
          nb::steal(PyUnicode_DecodeUTF8(line.data(), static_cast<Py_ssize_t>(line.size()), "replace"));
      if (!text.is_valid()) throw nb::python_error();
      emit(text);
    }
  } catch (nb::python_error& error) {
    if (error.matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();  // for whoever the interpreter runs next
    error.discard_as_unraisable("while an event of ugds was logged");
  } catch (...) {
    // No memory: there is no way to say more.
  }
}

void listen(bool yes) {
  {
    const std::lock_guard guard(waiting().lock);
    waiting().listens = yes;
  }
  EventLog::instance().set_observer(yes ? observe : nullptr);
}

}  // namespace

void log_events() noexcept {
  // One at a time, for their order: while one is logged, the interpreter may call back, and others may fail.
  Waiting& w = waiting();
  while (w.any.load() && !w.logs.exchange(true)) {
    const nb::error_scope scope;
    log_all();
    w.logs.store(false);
  }
}

void stop_logging() noexcept {
  listen(false);
  log_events();
}

void define_log(nb::module_& m) {
  EventLog::prepare();
  on_fork(ForkOrder::observed_events, {[] { waiting().lock.lock(); }, [] { waiting().lock.unlock(); },
                                       [] {
                                         waiting().taken = waiting().added;  // the parent's
                                         waiting().any.store(false);
                                         waiting().asked.store(false);
                                         waiting().logs.store(false);
                                         waiting().lock.unlock();
                                       }});
  listen(true);
  m.def("state_folder", [] { return nb::steal(PyUnicode_DecodeFSDefault(state_folder().c_str())); });
  m.def("flush_events", [](double seconds) {
    log_events();
    return without_lock([&] { return EventLog::instance().flush(static_cast<std::uint64_t>(seconds * 1e9)); });
  });
}

}  // namespace ugds::python
