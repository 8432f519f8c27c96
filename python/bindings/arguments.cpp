// SPDX-License-Identifier: Apache-2.0
#include "arguments.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace ugds::python {

engine::Priority priority_argument(PyObject* value, const char* operation) {
  if (value == nullptr || value == Py_None) return engine::Priority::unsaid;
  if (PyUnicode_Check(value) != 0) {
    if (PyUnicode_CompareWithASCIIString(value, "normal") == 0) return engine::Priority::normal;
    if (PyUnicode_CompareWithASCIIString(value, "background") == 0) return engine::Priority::background;
  }
  raise_new(EINVAL, operation, "priority is " + nb::cast<std::string>(nb::repr(nb::handle(value))),
            "use \"normal\" or \"background\", or leave it out");
}

std::uint64_t time_argument(PyObject* value, const char* name, const char* operation) {
  constexpr std::uint64_t kForEver = std::numeric_limits<std::int64_t>::max();
  if (value == nullptr || value == Py_None) return kForEver;
  const double seconds = PyFloat_AsDouble(value);
  if (seconds == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (!(seconds >= 0)) {
    raise_new(EINVAL, operation, std::string(name) + " is " + std::to_string(seconds) + " seconds",
              "give a time from 0, or None to wait without a limit");
  }
  return seconds >= 1e9 ? kForEver : static_cast<std::uint64_t>(seconds * 1e9);
}

PyObject* translate(const char* device) noexcept {
  try {
    throw;
  } catch (const abi::__forced_unwind&) {
    stay();  // see or_stay()
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const Failure& failure) {
    Error error = failure.error();
    if (error.device[0] == '\0') set_device(error, device);
    set_error(error);
  } catch (const nb::builtin_exception& error) {
    const bool index = error.type() == nb::exception_type::index_error;
    PyErr_SetString(index ? PyExc_IndexError : PyExc_TypeError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace ugds::python
