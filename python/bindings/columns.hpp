// SPDX-License-Identifier: Apache-2.0
//
// Arguments of many requests at once: a number for all of them, or an array with one for each, read where it lies.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common.hpp"

namespace ugds::python {

/// Numbers from 0 to 2^63 - 1. Holds on to the array while it exists; destroyed with the interpreter lock.
class Column {
 public:
  explicit Column(std::uint64_t value = 0) : value_(value) {}
  /// An int, text such as "4KiB", or a one-dimensional array of integers: int64 and uint64 ones that lie in one piece
  /// are used as they are, others are converted. Raises TypeError for other types; ugds.Error (EINVAL).
  Column(PyObject* object, const char* name, const char* operation);
  /// Of an argument that may be left out.
  static Column optional(PyObject* object, const char* name, const char* operation) {
    if (object == nullptr) return Column(0);
    return Column(object, name, operation);
  }
  ~Column() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }
  Column(const Column&) = delete;
  Column& operator=(const Column&) = delete;

  bool is_array() const { return is_array_; }
  std::size_t size() const { return size_; }
  /// The i-th is `data()[i & mask()]`: an array of one is for all, as a number is.
  const std::uint64_t* data() const { return data_; }
  std::size_t mask() const { return size_ == 1 ? 0 : ~std::size_t{0}; }
  std::uint64_t operator[](std::size_t i) const { return data_[i & mask()]; }
  PyObject* object() const { return object_.ptr(); }

  /// Becomes an array of `size` numbers, to be filled.
  std::uint64_t* make(std::size_t size);

 private:
  void take_array(PyObject* object, const char* name, const char* operation);
  bool take_view(PyObject* object);
  void check(const char* name, const char* operation) const;

  const std::uint64_t* data_ = &value_;
  std::size_t size_ = 1;
  std::uint64_t value_ = 0;
  bool is_array_ = false;
  Py_buffer view_{};
  nb::object object_;  ///< the array, as it is used
  std::unique_ptr<std::uint64_t[]> made_;
};

/// The one length of all arrays; 1 where there is none. Raises ugds.Error (EINVAL) for arrays that do not fit together.
class Length {
 public:
  explicit Length(const char* operation) : operation_(operation) {}
  void add(std::size_t size, const char* name);
  void add(const Column& column, const char* name) {
    if (column.is_array()) add(column.size(), name);
  }
  std::size_t get() const { return length_; }
  /// Whether nothing was an array.
  bool is_single() const { return name_ == nullptr; }

 private:
  const char* operation_;
  const char* name_ = nullptr;  ///< of who set the length
  std::size_t length_ = 1;
};

/// Memory of the requests: one buffer for all of them, or a list of one for each.
class Buffers {
 public:
  Buffers(PyObject* object, const char* operation);
  bool is_list() const { return is_list_; }
  std::size_t size() const { return views_.size(); }
  const View& operator[](std::size_t i) const { return views_[views_.size() == 1 ? 0 : i]; }

 private:
  bool is_list_;
  std::vector<View> views_;
};

/// Sizes and places as they were given, or made up: sizes are the rest of the buffers, places one after the other.
/// Raises TypeError, ugds.Error (EINVAL).
void complete_columns(Column& sizes, bool has_sizes, Column& places, bool has_places, const Buffers& buffers,
                      const Length& length, const char* operation);

/// Raises ugds.Error (EINVAL) for the first request that reaches beyond its buffer.
void check_places(const Buffers& buffers, const Column& places, const Column& sizes, std::size_t count,
                  const char* operation);

/// A Registration, or a view inside of one. Raises ugds.Error: EINVAL (not registered), ESTALE (closed).
View buffer_argument(PyObject* object, const char* operation);

}  // namespace ugds::python
