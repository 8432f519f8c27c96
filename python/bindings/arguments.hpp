// SPDX-License-Identifier: Apache-2.0
//
// Methods of the C API, for calls whose cost counts: nanobind's way of calling costs more than a request does.
#pragma once

#include <nanobind/nanobind.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

#include "common.hpp"
#include "engine/policy.hpp"

namespace ugds::python {

/// Names of a method's arguments, of which the first `positional` may be given by position. Made once.
template <std::size_t N>
class Names {
 public:
  Names(const char* const (&names)[N], std::size_t positional, const char* help)
      : positional_(positional), help_(help) {
    for (std::size_t i = 0; i < N; ++i) {
      names_[i] = names[i];
      interned_[i] = PyUnicode_InternFromString(names[i]);
    }
  }

  /// Puts the arguments of a call into `out`, which holds nothing yet, by name; of the names only the first `count`
  /// are known.
  void parse(PyObject* const* args, std::size_t positional, PyObject* keywords, std::size_t count,
             PyObject** out) const {
    if (positional > positional_) [[unlikely]]
      refuse_positional();
    for (std::size_t i = 0; i < positional; ++i) out[i] = args[i];
    if (keywords == nullptr) return;
    const auto given = static_cast<std::size_t>(PyTuple_GET_SIZE(keywords));
    for (std::size_t k = 0; k < given; ++k) {
      PyObject* keyword = PyTuple_GET_ITEM(keywords, static_cast<Py_ssize_t>(k));
      std::size_t i = 0;
      while (i < count && keyword != interned_[i]) ++i;
      if (i == count) [[unlikely]] {  // a name that was made at run time
        for (i = 0; i < count && PyUnicode_CompareWithASCIIString(keyword, names_[i]) != 0; ++i) {
        }
      }
      if (i == count || out[i] != nullptr) [[unlikely]]
        refuse_keyword(keyword);
      out[i] = args[positional + k];
    }
  }

 private:
  [[noreturn, gnu::cold]] void refuse_positional() const {
    throw nb::type_error(
        ("at most " + std::to_string(positional_) + " positional arguments; the arguments are " + help_).c_str());
  }
  [[noreturn, gnu::cold]] void refuse_keyword(PyObject* keyword) const {
    throw nb::type_error(("unexpected or repeated keyword argument \"" +
                          nb::cast<std::string>(nb::str(nb::handle(keyword))) + "\"; the arguments are " + help_)
                             .c_str());
  }

  const char* names_[N];
  PyObject* interned_[N];
  std::size_t positional_;
  const char* help_;
};

/// A flag as Python's `if` takes it.
inline bool flag(PyObject* value) {
  if (value == nullptr || value == Py_False) return false;
  const int truth = PyObject_IsTrue(value);
  if (truth < 0) throw nb::python_error();
  return truth != 0;
}

/// "normal", "background", or None.
engine::Priority priority_argument(PyObject* value, const char* operation);

/// Seconds as nanoseconds; None, or nothing, is for ever.
std::uint64_t time_argument(PyObject* value, const char* name, const char* operation);

/// Sets Python's error indicator for the exception that is being handled. What was refused before the device was looked
/// at is named for `device` all the same. Returns nullptr.
PyObject* translate(const char* device) noexcept;

/// Gives a type methods of the C API.
template <std::size_t N>
void add_methods(nb::handle type, PyMethodDef (&methods)[N]) {
  for (PyMethodDef& definition : methods) {
    const nb::object descriptor =
        nb::steal(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &definition));
    if (!descriptor.is_valid()) throw nb::python_error();
    nb::setattr(type, definition.ml_name, descriptor);
  }
}

template <class Function>
PyCFunction method_pointer(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

}  // namespace ugds::python
