// SPDX-License-Identifier: Apache-2.0
#include "common.hpp"

#include <nanobind/stl/string.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/text.hpp"

namespace ugds::python {

namespace {

PyObject* error_type = nullptr;

/// Text of the core's, which may hold what a caller gave it: bytes that are no UTF-8 become U+FFFD.
nb::object text(const char* bytes) {
  nb::object out = nb::steal(PyUnicode_DecodeUTF8(bytes, static_cast<Py_ssize_t>(std::strlen(bytes)), "replace"));
  if (!out.is_valid()) throw nb::python_error();
  return out;
}

}  // namespace

nb::object error_object(const Error& error) {
  nb::object raised = nb::borrow(error_type)(error.code, text(error.message().c_str()));
  raised.attr("operation") = text(error.operation);
  raised.attr("device") = text(error.device);
  raised.attr("offset") = nb::int_(error.offset);
  raised.attr("length") = nb::int_(error.length);
  raised.attr("completed") = nb::int_(error.completed);
  raised.attr("status") = error.status == kNoStatus ? nb::object(nb::none()) : nb::object(nb::int_(error.status));
  raised.attr("status_text") = text(error.status_words);
  raised.attr("cause") = text(error.cause);
  raised.attr("hint") = text(error.hint);
  return raised;
}

void define_errors(nb::module_& m) {
  error_type = PyErr_NewExceptionWithDoc(
      "ugds.Error",
      "What every failed operation raises: an OSError whose `errno` is the kind.\n\n"
      "Attributes: `operation` (\"read\"), `device` (the URI), `offset` and `length` (bytes), `completed` (the "
      "contiguous\n"
      "prefix, in bytes, that is right), `status` (the NVMe status, type in bits 10:8 and code in 7:0, or None),\n"
      "`status_text` (the same in words), `cause`, and `hint` (what to do).",
      PyExc_OSError, nullptr);
  if (error_type == nullptr) throw nb::python_error();
  m.attr("Error") = nb::borrow(error_type);
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Failure& failure) {
      set_error(failure.error());
    }
  });
}

void set_error(const Error& error) noexcept {
  log_events();  // what led to it comes first
  try {
    or_stay([&] { PyErr_SetObject(error_type, error_object(error).ptr()); });
  } catch (nb::python_error& other) {
    other.restore();
  } catch (...) {
    PyErr_NoMemory();
  }
}

void raise(const Error& error) { throw Failure(error); }

void raise_last() { raise(last_error()); }

void raise_new(int code, const char* operation, const std::string& cause, const std::string& hint) {
  Error error;
  error.code = code;
  error.operation = operation;
  set_cause(error, "%s", cause.c_str());
  set_hint(error, "%s", hint.c_str());
  raise(error);
}

std::uint64_t size_argument(nb::handle value, const char* name, const char* operation) {
  if (PyUnicode_Check(value.ptr())) {
    try {
      return parse_size(nb::cast<std::string>(value), name);
    } catch (Failure& failure) {
      failure.error().operation = operation;
      throw Failure(failure.error());
    }
  }
  if (!PyIndex_Check(value.ptr()) || PyBool_Check(value.ptr())) {
    throw nb::type_error((std::string(name) + " must be an int or text such as \"64MiB\", not " +
                          nb::cast<std::string>(value.type().attr("__name__")))
                             .c_str());
  }
  nb::object number = nb::steal(PyNumber_Index(value.ptr()));
  if (!number.is_valid()) throw nb::python_error();
  const unsigned long long bytes = PyLong_AsUnsignedLongLong(number.ptr());
  if (bytes == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise_new(EINVAL, operation, std::string(name) + " is " + nb::cast<std::string>(nb::str(number)),
              "give a number of bytes from 0 to 2^64 - 1");
  }
  return bytes;
}

bool is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

Unlocked::Unlocked() : ending_(is_ending()), state_(PyEval_SaveThread()) {}

Unlocked::~Unlocked() {
  // The interpreter is gone or going: taking its lock would end this thread in the middle of C++ code.
  while (!ending_ && is_ending()) pause();
  or_stay([this] { PyEval_RestoreThread(state_); });
}

void stay() noexcept {
  for (;;) pause();
}

PyDevice::~PyDevice() {
  const auto end = [&] {
    engine::Table::instance().abandon(id);
    end_progress(false);
  };
  // Whoever is inside may need the lock to get out.
  if (PyGILState_Check() != 0) {
    without_lock(end);
  } else {
    end();
  }
}

engine::Interrupt python_interrupt() {
  return {[](void*) {
            const Locked lock;
            return PyErr_CheckSignals() != 0;
          },
          nullptr};
}

void check_interrupt() {
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
}

}  // namespace ugds::python
