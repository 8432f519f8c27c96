// SPDX-License-Identifier: Apache-2.0
//
// Completions: what `Batch.completed` and `wait` give. Its results are one piece of memory, which NumPy looks at
// without a Python object for each; `ugds._batch` makes a sequence of it.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "results.hpp"

namespace ugds::python {

void Unseen::add(const std::shared_ptr<Failed>& failed) {
  count.fetch_add(1, std::memory_order_relaxed);
  std::lock_guard guard(lock);
  if (some.size() >= kMost)
    std::erase_if(some, [](const auto& one) { return one->seen.load(std::memory_order_relaxed); });
  if (some.size() < kMost) some.push_back(failed);
}

std::vector<std::shared_ptr<Failed>> Unseen::take() {
  std::vector<std::shared_ptr<Failed>> left;
  std::lock_guard guard(lock);
  for (auto& one : some) {
    if (!one->seen.load(std::memory_order_relaxed)) left.push_back(std::move(one));
  }
  some.clear();
  return left;
}

void Results::resize(std::size_t room) {
  auto* const moved = static_cast<Result*>(std::realloc(items_, std::max<std::size_t>(1, room) * sizeof(Result)));
  if (moved == nullptr) throw std::bad_alloc();
  items_ = moved;
  room_ = room;
}

void Results::note(const engine::Done& done, const std::shared_ptr<Unseen>& unseen) noexcept {
  auto failed = std::make_shared<Failed>();
  failed->error = *done.error;
  failed->cookie = done.cookie;
  failed->unseen = unseen;
  if (unseen) unseen->add(failed);
  failures_.push_back(std::move(failed));
}

std::size_t Results::move_from(Results& from, std::size_t& taken, std::size_t most) {
  const std::size_t moved = std::min(most, from.count_ - taken);
  if (moved == 0) return 0;
  const Result* const first = from.items_ + taken;
  std::memcpy(items_ + count_, first, moved * sizeof(Result));
  const auto failed = std::count_if(first, first + moved, [](const Result& one) { return one.result < 0; });
  std::move(from.failures_.begin(), from.failures_.begin() + failed, std::back_inserter(failures_));
  from.failures_.erase(from.failures_.begin(), from.failures_.begin() + failed);
  count_ += moved;
  taken += moved;
  if (taken == from.count_) taken = from.count_ = 0;
  return moved;
}

void Results::put_back(Results& other, std::size_t& taken) {
  const std::size_t left = count_ - taken;
  other.make_room(left);
  other.move_from(*this, taken, left);
  std::swap(items_, other.items_);
  std::swap(count_, other.count_);
  std::swap(room_, other.room_);
  std::swap(failures_, other.failures_);
  taken = 0;
}

nb::object done_of(Failed& failed) {
  failed.look();
  const nb::object type = nb::module_::import_("ugds._batch").attr("Done");
  return type(failed.cookie, failed.error.completed, error_object(failed.error));
}

PyCompletions::PyCompletions(Results&& taken) : results(std::move(taken)) {
  results.trim();
  if (results.failures().empty()) return;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (results.data()[i].result < 0) failed_at.push_back(i);
  }
}

namespace {

/// Cookie, bytes and error of one. It has been looked at then.
nb::tuple item(PyCompletions& self, std::size_t index) {
  if (index >= self.results.size()) throw nb::index_error("there are not that many");
  const Result& one = self.results.data()[index];
  if (one.result >= 0) return nb::make_tuple(one.cookie, one.result, nb::none());
  const auto& at = self.failed_at;
  Failed& failed =
      *self.results.failures()[static_cast<std::size_t>(std::lower_bound(at.begin(), at.end(), index) - at.begin())];
  failed.look();
  return nb::make_tuple(one.cookie, failed.error.completed, error_object(failed.error));
}

nb::list errors(PyCompletions& self) {
  nb::list list;
  for (const auto& failed : self.results.failures()) list.append(done_of(*failed));
  return list;
}

/// One field of all, as NumPy sees it.
nb::object field(nb::handle self, std::size_t offset) {
  // Of the module that is imported by the first who asks; kept for good.
  static const nb::object* const numpy = new nb::object(nb::module_::import_("numpy"));              // NOLINT
  static const nb::object* const array = new nb::object(numpy->attr("ndarray"));                     // NOLINT
  static const nb::object* const type = new nb::object(numpy->attr("dtype")(numpy->attr("int64")));  // NOLINT
  static const nb::object* const strides = new nb::object(nb::make_tuple(sizeof(Result)));           // NOLINT
  const nb::object shape = nb::make_tuple(nb::inst_ptr<PyCompletions>(self)->results.size());
  return (*array)(shape, *type, self, offset, *strides);
}

nb::object cookies(nb::handle self) { return field(self, offsetof(Result, cookie)); }

nb::object results(nb::handle self) {
  for (const auto& failed : nb::inst_ptr<PyCompletions>(self)->results.failures()) failed->look();
  return field(self, offsetof(Result, result));
}

int get_buffer(PyObject* exporter, Py_buffer* view, int flags) {
  auto& self = *nb::inst_ptr<PyCompletions>(exporter);
  static Result none;
  void* const memory =
      self.results.data() != nullptr ? const_cast<Result*>(self.results.data()) : static_cast<void*>(&none);
  return PyBuffer_FillInfo(view, exporter, memory, static_cast<Py_ssize_t>(self.results.size() * sizeof(Result)), 1,
                           flags);
}

PyObject* refuse_new(PyTypeObject*, PyObject*, PyObject*) {
  PyErr_SetString(PyExc_TypeError, "Completions are made by a Batch");
  return nullptr;
}

PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(refuse_new)},
                       {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                       {0, nullptr}};

}  // namespace

void define_completions(nb::module_& m) {
  nb::class_<PyCompletions>(
      m, "Completions", nb::type_slots(slots), nb::is_final(),
      "What became of requests of a batch, in the order in which they ended: a sequence of `Done`.\n\n"
      "`cookies` and `results` (bytes, or a negative errno) are NumPy arrays of int64 over all of them, made without "
      "a\n"
      "Python object for each; `errors` lists those that failed. Whoever reads `results` or `errors`, or iterates past "
      "a\n"
      "failure, has looked at it.")
      .def("item", &item)
      .def_prop_ro("cookies", &cookies, "The cookies, as an array of int64. Looks at no failure.")
      .def_prop_ro("results", &results, "Bytes, or a negative errno, as an array of int64. Looks at every failure.")
      .def_prop_ro("errors", &errors, "A list of the `Done` of those that failed. Looks at them.")
      .def("__len__", [](const PyCompletions& self) { return self.results.size(); })
      .def("__repr__", [](const PyCompletions& self) {
        return "<ugds.Completions of " + std::to_string(self.results.size()) + " requests, " +
               std::to_string(self.results.failures().size()) + " failed>";
      });
}

}  // namespace ugds::python
