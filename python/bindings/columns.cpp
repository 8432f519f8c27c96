// SPDX-License-Identifier: Apache-2.0
#include "columns.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string>

namespace ugds::python {

namespace {

/// The largest number of a column.
constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();

/// A format of 8-byte integers, in this machine's order.
bool is_whole(const char* format) {
  if (format == nullptr) return false;
  if (*format == '@' || *format == '=' || *format == (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? '<' : '>')) ++format;
  return std::strchr("lLqQnN", *format) != nullptr && *format != '\0' && format[1] == '\0';
}

/// Not zero where [at, at + size) ends beyond `limit`. All are below 2^63.
inline std::uint64_t beyond(std::uint64_t at, std::uint64_t size, std::uint64_t limit) {
  const std::uint64_t end = at + size;
  return (end | (limit - end)) >> 63;
}

[[noreturn, gnu::cold]] void raise_place(const Buffers& buffers, const Column& places, const Column& sizes,
                                         std::size_t count, const char* operation) {
  std::size_t i = 0;
  while (i + 1 < count && beyond(places[i], sizes[i], buffers[i].size) == 0) ++i;
  raise_new(EINVAL, operation,
            "request " + std::to_string(i) + ", [" + std::to_string(places[i]) + ", +" + std::to_string(sizes[i]) +
                "), reaches beyond its buffer, which has " + std::to_string(buffers[i].size) + " bytes",
            "nothing was submitted; give smaller sizes or buffer_offsets");
}

}  // namespace

Column::Column(PyObject* object, const char* name, const char* operation) {
  if (PyLong_CheckExact(object) || PyUnicode_Check(object)) {
    value_ = size_argument(object, name, operation);
  } else if (PyIndex_Check(object) != 0 && PySequence_Check(object) == 0) {  // NumPy's numbers
    value_ = size_argument(object, name, operation);
  } else {
    is_array_ = true;
    take_array(object, name, operation);
  }
  check(name, operation);
}

bool Column::take_view(PyObject* object) {
  if (PyObject_CheckBuffer(object) == 0) return false;
  if (PyObject_GetBuffer(object, &view_, PyBUF_ND | PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    return false;
  }
  if (view_.ndim != 1 || view_.itemsize != 8 || !is_whole(view_.format) ||
      reinterpret_cast<std::uintptr_t>(view_.buf) % alignof(std::uint64_t) != 0) {
    PyBuffer_Release(&view_);
    view_ = {};
    return false;
  }
  data_ = static_cast<const std::uint64_t*>(view_.buf);
  size_ = static_cast<std::size_t>(view_.shape[0]);
  object_ = nb::borrow(object);
  return true;
}

void Column::take_array(PyObject* object, const char* name, const char* operation) {
  if (take_view(object)) [[likely]]
    return;
  // Converted by NumPy, which knows every kind of array.
  const nb::object converted = nb::module_::import_("ugds._batch").attr("column")(nb::handle(object), name);
  if (take_view(converted.ptr())) return;
  raise_new(EINVAL, operation,
            std::string(name) + " has " + std::to_string(nb::cast<int>(converted.attr("ndim"))) + " dimensions",
            "give a number, or an array of one dimension");
}

void Column::check(const char* name, const char* operation) const {
  std::uint64_t all = 0;
  for (std::size_t i = 0; i < size_; ++i) all |= data_[i];
  if (all >> 63 == 0) [[likely]]
    return;
  std::size_t i = 0;
  while (data_[i] >> 63 == 0) ++i;
  raise_new(EINVAL, operation,
            std::string(name) + (is_array_ ? "[" + std::to_string(i) + "]" : "") + " is negative, or above 2^63 - 1",
            "nothing was submitted; give numbers from 0 to 2^63 - 1");
}

std::uint64_t* Column::make(std::size_t size) {
  made_ = std::make_unique_for_overwrite<std::uint64_t[]>(size);
  data_ = made_.get();
  size_ = size;
  return made_.get();
}

void Length::add(std::size_t size, const char* name) {
  if (name_ == nullptr || length_ == 1) {
    name_ = name;
    length_ = size;
  } else if (size != length_ && size != 1) {
    raise_new(EINVAL, operation_,
              std::string(name_) + " is for " + std::to_string(length_) + " requests and " + name + " for " +
                  std::to_string(size),
              "nothing was submitted; give arrays of one length, or one number for all");
  }
}

View buffer_argument(PyObject* object, const char* operation) {
  if (!is_registration(object)) return view_of(object, operation);
  const PyRegistration& registration = *nb::inst_ptr<PyRegistration>(object);
  if (registration.closed) raise_new(ESTALE, operation, "the registration is closed", "register the buffer again");
  return {registration.reference, 0, registration.reference.size};
}

Buffers::Buffers(PyObject* object, const char* operation)
    : is_list_(PyList_Check(object) != 0 || PyTuple_Check(object) != 0) {
  if (!is_list_) {
    views_.push_back(buffer_argument(object, operation));
    return;
  }
  const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(object));
  views_.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    // Of a list that a conversion changes meanwhile, what is there.
    if (static_cast<std::size_t>(PySequence_Fast_GET_SIZE(object)) != count)
      raise_new(EINVAL, operation, "the list of buffers changed during the call");
    const nb::object one = nb::borrow(PySequence_Fast_GET_ITEM(object, static_cast<Py_ssize_t>(i)));
    views_.push_back(buffer_argument(one.ptr(), operation));
  }
}

void check_places(const Buffers& buffers, const Column& places, const Column& sizes, std::size_t count,
                  const char* operation) {
  std::uint64_t bad = 0;
  if (buffers.is_list()) {
    for (std::size_t i = 0; i < count; ++i) bad |= beyond(places[i], sizes[i], buffers[i].size);
  } else if (sizes.mask() == 0 && places.mask() != 0) {  // of one size, as most are
    const std::uint64_t* const at = places.data();
    const std::uint64_t size = sizes[0], limit = buffers[0].size;
    for (std::size_t i = 0; i < count; ++i) bad |= beyond(at[i], size, limit);
  } else {
    const std::uint64_t limit = buffers[0].size;
    for (std::size_t i = 0; i < count; ++i) bad |= beyond(places[i], sizes[i], limit);
  }
  if (bad != 0) [[unlikely]]
    raise_place(buffers, places, sizes, count, operation);
}

void complete_columns(Column& sizes, bool has_sizes, Column& places, bool has_places, const Buffers& buffers,
                      const Length& length, const char* operation) {
  const std::size_t count = length.get();
  if (!has_sizes) {
    if (!buffers.is_list() && !length.is_single() && count != 0)
      throw nb::type_error("sizes is needed for many requests in one buffer");
    std::uint64_t* const made = sizes.make(count);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t rest = buffers[i].size, place = has_places ? places[i] : 0;
      if (place > rest) raise_new(EINVAL, operation, "buffer_offsets lies beyond the buffer", "give a smaller one");
      made[i] = rest - place;
    }
  }
  if (has_places || buffers.is_list() || count <= 1) return;
  std::uint64_t* const made = places.make(count);
  std::uint64_t next = 0;
  for (std::size_t i = 0; i < count; ++i) {
    made[i] = std::min(next, kMost);
    next = std::min(next, kMost) + sizes[i];
  }
}

}  // namespace ugds::python
