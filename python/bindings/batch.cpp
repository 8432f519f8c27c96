// SPDX-License-Identifier: Apache-2.0
//
// Batch: many requests by one call (submission.cpp), and what becomes of them in one piece of memory; nothing is made
// for each. Results that a call collected to make room for the rest of its requests wait in the batch until they are
// asked for (collecting.cpp).
#include "batch.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "arguments.hpp"

namespace ugds::python {

namespace {

using engine::Batch;
using engine::Table;

constexpr std::uint64_t kForEver = std::numeric_limits<std::int64_t>::max();

}  // namespace

void raise_stale(const PyBatch& self, const char* operation) {
  Table::instance().explain_stale(self.handle, operation);
  set_device(last_error(), self.uri.c_str());
  raise_last();
}

void raise_closed(const char* operation) {
  raise_new(EBADF, operation, "the batch is closed", "make another by Device.batch()");
}

PyBatch& batch_self(PyObject* self) {
  if (!nb::inst_ready(self)) [[unlikely]]
    throw nb::type_error("a Batch is made by Device.batch()");
  return *nb::inst_ptr<PyBatch>(self);
}

namespace {

enum CompletedArgument { kMin, kTimeout, kMax, kCompletedArguments };
constexpr const char* kCompletedNames[kCompletedArguments] = {"min", "timeout", "max"};
Names<kCompletedArguments>* completed_names;

std::size_t count_argument(PyObject* value, const char* name, std::size_t otherwise) {
  if (value == nullptr || value == Py_None) return otherwise;
  return size_argument(value, name, "batch");
}

/// What collect() came to, for whoever asked.
void raise_unless_collected(PyBatch& self, PyBatch::Ended ended, Results& results, const Table::Use& handle) {
  if (ended == PyBatch::Ended::interrupted) {
    self.put_back(results);
    check_interrupt();
  }
  if (ended == PyBatch::Ended::closed && results.size() == 0) {
    if (!handle) raise_stale(self, "batch");
    raise_closed("batch");
  }
}

PyObject* completed(PyObject* object, PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
  try {
    PyObject* a[kCompletedArguments] = {};
    completed_names->parse(args, static_cast<std::size_t>(positional), keywords, kCompletedArguments, a);
    PyBatch& self = batch_self(object);
    const std::size_t most = count_argument(a[kMax], "max", std::numeric_limits<std::size_t>::max());
    std::size_t least = std::min(count_argument(a[kMin], "min", 1), most);
    std::uint64_t limit = time_argument(a[kTimeout], "timeout", "batch");
    // A look that waits for nothing still lets a controller that its callers run have a turn.
    if (least == 0) least = std::min<std::size_t>(1, most), limit = 0;
    Results results;
    const Table::Use handle(Table::instance(), self.handle);
    if (handle || self.waiting() == 0) {
      Batch& batch = batch_of(self, handle, "batch");
      raise_unless_collected(self, self.collect(*handle, batch, results, least, most, limit), results, handle);
    } else {
      self.take_waiting(results, most);
    }
    return nb::cast(PyCompletions(std::move(results))).release().ptr();
  } catch (...) {
    return translate(nb::inst_ptr<PyBatch>(object)->uri.c_str());
  }
}

/// All of them, or none where the time is up.
PyCompletions collect_all(PyBatch& self, nb::handle timeout) {
  const std::uint64_t limit = time_argument(timeout.ptr(), "timeout", "batch");
  constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();
  Results results;
  const Table::Use handle(Table::instance(), self.handle);
  Batch& batch = batch_of(self, handle, "batch");
  const PyBatch::Ended ended = self.collect(*handle, batch, results, kAll, kAll, limit);
  if (ended == PyBatch::Ended::timed_out) {
    const std::size_t count = results.size();
    self.put_back(results);
    Error error;
    error.code = ETIMEDOUT;
    error.operation = "wait";
    set_device(error, self.uri.c_str());
    set_cause(error,
              "the time given to this wait is over: %llu requests have not ended, %zu have; none has failed by it",
              static_cast<unsigned long long>(batch.outstanding(self.id.generation)), count);
    set_hint(error, "nothing is lost: wait again, or take what there is by completed()");
    raise(error);
  }
  raise_unless_collected(self, ended, results, handle);
  return PyCompletions(std::move(results));
}

/// Waits for what is in flight; Ctrl-C ends that, and what is left is freed when it has ended.
void close(PyBatch& self) {
  if (self.closed.exchange(true)) return;
  {
    const Table::Use handle(Table::instance(), self.handle);
    if (!handle) return;
    Batch& batch = *handle->batch(self.id.slot);
    batch.cancel(self.id.generation);
    bool ended = false;
    without_lock([&] {
      constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();
      batch.collect(self.id.generation, kAll, kAll, kForEver, python_interrupt(), [](const engine::Done&) {});
      ended = batch.outstanding(self.id.generation) == 0;
      if (ended) handle->close_batch(self.id);
    });
    if (!ended) self.retire();
  }
  check_interrupt();
  collect_retired();
}

/// As close(), without a wait.
void abandon(PyBatch& self) {
  if (!self.closed.exchange(true)) self.retire();
  collect_retired();
}

std::int64_t cancel(PyBatch& self) {
  const Table::Use handle(Table::instance(), self.handle);
  const std::int64_t count = batch_of(self, handle, "batch").cancel(self.id.generation);
  if (count == Batch::kClosed) raise_closed("batch");
  return count;
}

std::uint64_t outstanding(PyBatch& self) {
  const Table::Use handle(Table::instance(), self.handle);
  const std::uint64_t here = self.waiting();
  if (!handle || self.closed) return here;
  return here + handle->batch(self.id.slot)->outstanding(self.id.generation);
}

PyObject* refuse_new(PyTypeObject*, PyObject*, PyObject*) {
  PyErr_SetString(PyExc_TypeError, "a Batch is made by Device.batch()");
  return nullptr;
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  if (nb::inst_ready(object)) Py_VISIT(nb::inst_ptr<PyBatch>(object)->device.ptr());
  return 0;
}

PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(refuse_new)},
                       {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {0, nullptr}};

PyMethodDef methods[] = {
    {"read", method_pointer(&batch_read), METH_FASTCALL | METH_KEYWORDS,
     "read($self, buffer, offsets, sizes=None, buffer_offsets=None, cookies=None)\n--\n\n"
     "Submits reads, one for each offset, and returns their cookies: a range, or what was given.\n\n"
     "offsets, sizes, buffer_offsets: bytes, each a number for all requests (an int, or text such as \"4KiB\") or an "
     "array of\n"
     "integers with one for each; int64 and uint64 arrays are read where they lie. buffer: a Registration, or a view "
     "inside\n"
     "of one, or a list of them with one for each request. Offsets and sizes are whole blocks, and memory begins at "
     "multiples\n"
     "of 4 bytes. Without sizes a request is for the rest of its buffer: a single one, or each of a list. Without\n"
     "buffer_offsets the requests of one buffer are packed, each behind the one before, from its start; each of a list "
     "is at\n"
     "the start of its own. cookies: integers by which to know the requests again; without them they are numbered.\n\n"
     "Any number of requests may be given, in no order among each other. The call returns when all of them are taken; "
     "for\n"
     "those beyond the batch's depth it waits, and keeps the results that it has to make room of until they are asked "
     "for.\n"
     "Memory that is given up meanwhile is kept until the device is done with it.\n\n"
     "Raises `ugds.Error`, with nothing submitted: EINVAL (a negative number, arrays that do not fit together, memory "
     "that is\n"
     "not registered, a range beyond its buffer), ESTALE, EBADF (closed); TypeError. Whatever else is wrong with a "
     "request is\n"
     "told when it ends. Ctrl-C ends the wait: what was taken by then is told of as ever. Thread-safe."},
    {"write", method_pointer(&batch_write), METH_FASTCALL | METH_KEYWORDS,
     "write($self, buffer, offsets, sizes=None, buffer_offsets=None, cookies=None, *, durable=False)\n--\n\n"
     "Submits writes, as `read` does reads. `durable=True`: each is on the medium when it ends, else after "
     "`Device.flush()`."},
    {"completed", method_pointer(&completed), METH_FASTCALL | METH_KEYWORDS,
     "completed($self, min=1, timeout=None, max=None)\n--\n\n"
     "Waits until `min` results are there, and gives all that are, up to `max`, as `Completions`.\n\n"
     "timeout: seconds after which it gives what there is; None waits. It never waits for what cannot come: with "
     "nothing\n"
     "outstanding it gives what is there, or none. 0 for `min` or `timeout` looks once. Raises `ugds.Error`: EBADF "
     "(closed),\n"
     "EINVAL. Ctrl-C ends the wait, and loses nothing. Thread-safe: each result is given once."},
};

}  // namespace

PyBatch* open_batch(nb::object device, std::uint32_t depth, nb::handle priority) {
  collect_retired();
  const auto& opened = nb::cast<const PyDevice&>(device);
  const engine::Priority wanted = priority_argument(priority.ptr(), "batch");
  auto batch = std::make_unique<PyBatch>();
  batch->uri = opened.uri;
  batch->depth = depth;
  {
    const Table::Use handle(Table::instance(), opened.id);
    batch->handle = opened.id;
    batch->closed = true;
    if (!handle) raise_stale(*batch, "batch");
    try {
      batch->id = handle->open_batch(depth, wanted);
    } catch (Failure& failure) {
      set_device(failure.error(), batch->uri.c_str());
      throw Failure(failure.error());
    }
    batch->closed = false;
  }
  batch->device = std::move(device);
  return batch.release();
}

void define_batch(nb::module_& m) {
  define_submission();
  completed_names = new Names<kCompletedArguments>(kCompletedNames, kCompletedArguments, "min, timeout, max");
  define_completions(m);
  auto type =
      nb::class_<PyBatch>(
          m, "Batch", nb::type_slots(slots), nb::is_final(),
          "Many requests in flight at once, whose results are collected as they come. Made by `Device.batch`; a "
          "context\n"
          "manager: leaving the block waits for what is in flight, and raises the first error that nobody has looked "
          "at.\n"
          "Thread-safe: any number of threads may submit and collect.")
          .def_prop_ro(
              "device", [](const PyBatch& b) { return b.device; }, "The device.", nb::sig("def device(self) -> Device"))
          .def_prop_ro(
              "depth", [](const PyBatch& b) { return b.depth; }, "Requests that may be in flight, or ended and unread.")
          .def_prop_ro(
              "closed", [](const PyBatch& b) { return b.closed.load(); }, "Whether the batch is closed.")
          .def_prop_ro("outstanding", &outstanding,
                       "Requests that were submitted and whose results were not collected.")
          .def("cancel", &cancel,
               "Takes back requests that the device was not given yet: they end with ECANCELED, and what is right of "
               "them is\n"
               "told. Returns how many they were. What the device has runs on. Thread-safe.")
          .def("close", &close,
               "Cancels what the device was not given, waits for the rest, and frees the batch. Results that were not "
               "collected\n"
               "are gone. Does nothing the second time.")
          .def("abandon", &abandon)
          .def("collect_all", &collect_all, nb::arg("timeout").none())
          .def("unknown",
               [](const PyBatch& b) {
                 const std::uint64_t taken = b.taken, told = b.told;
                 return taken > told ? taken - told : 0;
               })
          .def("unseen", [](const PyBatch& b) { return b.unseen->count.load(); })
          .def("take_unseen",
               [](PyBatch& b) {
                 nb::list list;
                 for (const auto& failed : b.unseen->take()) list.append(done_of(*failed));
                 b.unseen->count = 0;
                 return list;
               })
          .def("__reduce__",
               [](const PyBatch&) -> nb::object {
                 throw nb::type_error(
                     "a Batch cannot be pickled or copied: it is of a device that is open in this process");
               })
          .def("__repr__", [](const PyBatch& b) {
            return "<ugds.Batch of depth " + std::to_string(b.depth) + " on " + b.uri + (b.closed ? " (closed)>" : ">");
          });
  add_methods(type, methods);
}

}  // namespace ugds::python
