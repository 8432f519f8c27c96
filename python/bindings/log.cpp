// SPDX-License-Identifier: Apache-2.0
//
// Events of the core (base/event_log.hpp) for Python's logging. They are added under locks that a thread with the
// interpreter's lock may wait for, so whoever adds one only keeps a copy and asks the interpreter to call back. That is
// in the middle of whatever its main thread does, perhaps under a lock of a handler's, so nothing is logged there: a
// thread of Python's is started, which logs them and ends. Any thread does before it raises an error of ours.
#include <nanobind/stl/string.h>
#include <pthread.h>
#include <signal.h>

#include <array>
#include <atomic>
#include <ctime>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.hpp"
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
  bool has_helper = false;
  std::atomic<bool> any{false}, asked{false}, logs{false};
  std::atomic<unsigned long> own{0};  ///< the thread that was started for them
};
/// The last of the ring is not for what comes in numbers: that a device is wedged is told all the same.
constexpr std::size_t kKept = 32;
/// How long whoever raises an error waits for what is being logged, at most: a handler may wait for them.
constexpr std::uint64_t kPatience = 1'000'000'000;
constinit Immortal<Waiting> the_waiting;
Waiting& waiting() { return the_waiting.value; }

PyObject* start_thread = nullptr;     // _thread.start_new_thread
PyObject* start_arguments = nullptr;  // ugds._log.start, for that
PyObject* emit = nullptr;             // ugds._log.emit

int call_back(void*) {
  waiting().asked.store(false);
  // Whoever raised an error has logged them, or will load what it takes.
  if (!waiting().any.load() || start_arguments == nullptr) return 0;
  PyObject* const started = PyObject_Call(start_thread, start_arguments, nullptr);
  if (started == nullptr) PyErr_Clear();  // there is no thread to be had: the next one to raise an error logs them
  Py_XDECREF(started);
  return 0;
}

/// The interpreter's main thread may be waiting for a lock, or asleep, and not call back for long: then this does.
void* help(void*) {
  Waiting& w = waiting();
  const timespec nap{0, 20'000'000};
  for (;;) {
    nanosleep(&nap, nullptr);
    {
      const std::lock_guard guard(w.lock);
      w.has_helper = w.listens && w.any.load();
      if (!w.has_helper) return nullptr;
    }
    if (w.logs.load()) continue;
    const Locked locked;  // the interpreter's end waits for this thread
    or_stay([] { call_back(nullptr); });
  }
}

/// Under the lock. Where no thread is to be had, the interpreter's main thread is the one.
void start_helper() {
  sigset_t all, before;
  sigfillset(&all);  // they are for the interpreter's threads
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_t thread;
  Waiting& w = waiting();
  w.has_helper = pthread_create(&thread, nullptr, help, nullptr) == 0;
  if (w.has_helper) pthread_detach(thread);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void observe(const Event& event) {
  Waiting& w = waiting();
  const std::lock_guard guard(w.lock);
  if (!w.listens) return;
  if (w.added - w.taken >= w.ring.size() - (event.numerous ? kKept : 0)) {
    w.lost += 1 + event.left_out;
    return;
  }
  w.ring[w.added++ % w.ring.size()] = event;
  w.any.store(true);
  if (!w.asked.exchange(true) && Py_AddPendingCall(call_back, nullptr) != 0) w.asked.store(false);
  if (!w.has_helper) start_helper();
}

void load() {
  const nb::module_ log = nb::module_::import_("ugds._log");
  start_arguments = nb::make_tuple(log.attr("start"), nb::tuple()).release().ptr();
  emit = log.attr("emit").inc_ref().ptr();
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

nb::object text_of(const std::string& line) {
  nb::object text = nb::steal(PyUnicode_FromStringAndSize(line.data(), static_cast<Py_ssize_t>(line.size())));
  if (!text.is_valid()) throw nb::python_error();
  return text;
}

void log_all() noexcept {
  try {
    for (std::string line = take(); !line.empty(); line = take()) {
      or_stay([&] {
        if (emit == nullptr) load();
        nb::borrow(emit)(text_of(line));
      });
    }
  } catch (nb::python_error& error) {
    if (error.matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();  // for whoever the interpreter runs next
    or_stay([&] { error.discard_as_unraisable("while an event of ugds was logged"); });
  } catch (...) {
    // No memory: there is no way to say more.
  }
}

/// One at a time, for their order: while one is logged, the interpreter may call back, and others may fail.
void log_now() noexcept {
  Waiting& w = waiting();
  while (w.any.load() && !w.logs.exchange(true)) {
    const nb::error_scope scope;
    log_all();
    w.logs.store(false);
  }
}

// The thread of Python's runs Python's code (ugds/_log.py), and this in between, which calls nothing of Python's: when
// the interpreter ends, it ends the thread, and that must not be in the middle of C++.

/// False: there is nothing to log, or somebody is at it.
bool begin_log() {
  Waiting& w = waiting();
  if (!w.any.load() || w.logs.exchange(true)) return false;
  w.own.store(PyThread_get_thread_ident());
  return true;
}

nb::object next_event() {
  const std::string line = take();
  return line.empty() ? nb::object(nb::none()) : text_of(line);
}

void end_log() {
  waiting().own.store(0);
  waiting().logs.store(false);
}

void listen(bool yes) {
  {
    const std::lock_guard guard(waiting().lock);
    waiting().listens = yes;
  }
  EventLog::instance().set_observer(yes ? observe : nullptr);
}

}  // namespace

void prepare_to_log() noexcept {
  try {
    if (emit == nullptr) or_stay(load);
  } catch (nb::python_error&) {
    // It is tried again with the first event.
  } catch (const std::exception&) {
  }
}

void log_events() noexcept {
  Waiting& w = waiting();
  const unsigned long me = PyThread_get_thread_ident();
  const auto others = [&] { return w.own.load() != 0 && w.own.load() != me; };
  if (others()) {
    const nb::error_scope scope;
    const Unlocked unlocked;
    const std::uint64_t start = monotonic_ns();
    const timespec nap{0, 50'000};
    while (others() && monotonic_ns() - start < kPatience) nanosleep(&nap, nullptr);
  }
  log_now();
}

void stop_logging() noexcept {
  listen(false);
  without_lock([] {
    const std::uint64_t start = monotonic_ns();
    const timespec nap{0, 1'000'000};
    const auto helped = [] {
      const std::lock_guard guard(waiting().lock);
      return waiting().has_helper;
    };
    while (helped() && monotonic_ns() - start < kPatience) nanosleep(&nap, nullptr);
  });
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
                                         waiting().own.store(0);
                                         waiting().has_helper = false;
                                         waiting().lock.unlock();
                                       }});
  listen(true);
  start_thread = nb::module_::import_("_thread").attr("start_new_thread").inc_ref().ptr();
  m.def("begin_log", &begin_log);
  m.def("next_event", &next_event);
  m.def("end_log", &end_log);
  m.def("state_folder", [] { return nb::steal(PyUnicode_DecodeFSDefault(state_folder().c_str())); });
  m.def("flush_events", [](double seconds) {
    log_events();
    return without_lock([&] { return EventLog::instance().flush(static_cast<std::uint64_t>(seconds * 1e9)); });
  });
}

}  // namespace ugds::python
