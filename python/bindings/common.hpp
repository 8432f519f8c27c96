// SPDX-License-Identifier: Apache-2.0
//
// What the parts of the extension module share: errors, arguments, and the buffers that outlive their Python objects.
#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "engine/table.hpp"
#include "gpu/runtime.hpp"
#include "memory/host.hpp"
#include "memory/registry.hpp"
#include "serve/server.hpp"

namespace ugds::python {

namespace nb = nanobind;

/// Refuses to be pickled or copied, with a reason that is a sentence's end: for `.def("__reduce__", …)`.
template <class T>
auto refuses_pickling(const char* reason) {
  return [reason](const T&) -> nb::object { throw nb::type_error(reason); };
}

/// Makes `ugds.Error` and its translation from Failure.
void define_errors(nb::module_& m);
/// An instance of `ugds.Error` with every field of the core's error.
nb::object error_object(const Error& error);
/// Sets Python's error indicator to `ugds.Error` for an error of the core.
void set_error(const Error& error) noexcept;
/// Throws a Failure, which becomes `ugds.Error` where the call returns to Python.
[[noreturn]] void raise(const Error& error);
/// Raises for this thread's last error.
[[noreturn]] void raise_last();
[[noreturn]] void raise_new(int code, const char* operation, const std::string& cause, const std::string& hint = "");

[[noreturn]] void stay() noexcept;
/// Runs what may take the interpreter's lock. An interpreter that ends meanwhile ends the thread there, by unwinding
/// its stack: through what may not throw, which would end the process with a message, and through destructors that
/// touch what is gone. So the thread stays where it is instead, until the process has ended. By a destructor: such an
/// unwinding must not be caught where an exception of C++ is being handled, as where one becomes Python's.
template <class Body>
auto or_stay(Body&& body) {
  struct Left {
    bool in_order = false;
    ~Left() {
      if (!in_order) stay();
    }
  } left;
  try {
    if constexpr (std::is_void_v<decltype(body())>) {
      body();
      left.in_order = true;
    } else {
      auto result = body();
      left.in_order = true;
      return result;
    }
  } catch (const std::exception&) {
    left.in_order = true;
    throw;
  }
}
/// Has the interpreter lock for its lifetime.
class Locked {
 public:
  Locked() : state_(or_stay(PyGILState_Ensure)) {}
  ~Locked() { PyGILState_Release(state_); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  PyGILState_STATE state_;
};

/// Lets go of the interpreter lock for its lifetime. Unlike nanobind's, it parks the thread if the interpreter has
/// ended meanwhile.
class Unlocked {
 public:
  Unlocked();
  ~Unlocked();
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  bool ending_;  ///< the interpreter was ending before: this is the thread that ends it
  PyThreadState* state_;
};

/// Whether the interpreter is ending: whoever does not have its lock by now does not get it any more.
bool is_ending();

/// Runs `body` without the interpreter lock; what it throws is thrown on with the lock.
template <class Body>
auto without_lock(Body&& body) {
  const Unlocked unlocked;
  return body();
}

/// An int, or text such as "64MiB". Raises TypeError for other types, ugds.Error for what is negative or too large.
std::uint64_t size_argument(nb::handle value, const char* name, const char* operation);

/// `ugds.testing.Emulator` of the controller that is served.
nb::object emulator_of(const std::shared_ptr<serve::Server>& server);
/// Stops every server that is left when the interpreter ends.
void stop_servers() noexcept;

/// Ends long waits on Ctrl-C. After a wait, call `check`.
engine::Interrupt python_interrupt();
/// Raises the exception that a signal handler left, if one did.
void check_interrupt();

class Progress;

/// Device and Registration as their Python types hold them.
struct PyDevice {
  engine::HandleId id = 0;
  std::string uri;
  std::string transport;
  unsigned opened_in = fork_generation();
  std::mutex progress_lock;
  std::shared_ptr<Progress> progress;  ///< of awaits (progress.hpp), from the first on
  ~PyDevice();
  /// Before the device is closed, and when it is or `stays` open. In a child of a fork nothing is touched. Without the
  /// interpreter lock.
  void drain_progress(std::uint64_t limit_ns);
  void end_progress(bool stays);
};

/// The Python memory that a registration keeps alive: a buffer view, a DLPack import, or memory of ours.
class Keeper {
 public:
  virtual ~Keeper() = default;
};

struct PyRegistration {
  memory::Reference reference{};
  memory::Kind kind = memory::Kind::host;
  gpu::Runtime* runtime = nullptr;  ///< of GPU memory
  gpu::Place place{};
  nb::object owner;
  std::unique_ptr<Keeper> keeper;
  bool closed = false;
  std::uint32_t exports = 0;  ///< views by the buffer protocol: while there are some, their memory is kept

  PyRegistration() = default;
  PyRegistration(PyRegistration&& other) noexcept
      : reference(std::exchange(other.reference, {})),
        kind(other.kind),
        runtime(other.runtime),
        place(other.place),
        owner(std::move(other.owner)),
        keeper(std::move(other.keeper)),
        closed(other.closed) {}
  ~PyRegistration();
};

/// Closes what was left while commands were in flight, where they have retired. Called by every call that sets up or
/// closes, and by I/O when something is left.
void collect_retired();
bool anything_retired();
void count_retired(std::ptrdiff_t change);

/// The type of Python's Registration objects.
extern PyTypeObject* registration_type;
inline bool is_registration(PyObject* object) { return Py_TYPE(object) == registration_type; }

/// Memory inside of a registration.
struct View {
  memory::Reference buffer;
  std::uint64_t offset = 0, size = 0;
};
/// Memory that is registered for one call of one device: nobody else finds it.
struct Temporary {
  std::uint32_t device = 0;  ///< by its number
  std::optional<PyRegistration> registration;
};
/// The registration that a buffer lies in. Raises ugds.Error (EINVAL) for one that is not registered; GPU memory that
/// begins at a multiple of 64 KiB is registered in `temporary`, where that is given.
View view_of(nb::handle buffer, const char* operation, Temporary* temporary = nullptr);

/// Logs the events that wait, by Python's `logging`, with the interpreter lock. Keeps an error that is being raised.
void log_events() noexcept;
/// Loads what that needs: when something fails there may be no descriptors left, or no memory.
void prepare_to_log() noexcept;
/// When the interpreter ends: logs the last ones.
void stop_logging() noexcept;

void define_log(nb::module_& m);
void define_registration(nb::module_& m);
void define_streams(nb::module_& m);
void define_device(nb::module_& m);
void define_open(nb::module_& m);
void define_modes(nb::module_& m);
void define_testing(nb::module_& m);
void define_serve(nb::module_& m);
void define_measure(nb::module_& m);
void define_trace(nb::module_& m);
void define_simulate(nb::module_& m);

}  // namespace ugds::python
