// SPDX-License-Identifier: Apache-2.0
//
// Batch: many requests by one call. Arguments are read where they lie, requests go down in one run of instructions, and
// what becomes of them is written into one piece of memory; nothing is made for each. Results that a call collected to
// make room for the rest of its requests wait in the batch until they are asked for.
#include "batch.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "arguments.hpp"
#include "base/clock.hpp"
#include "columns.hpp"

namespace ugds::python {

namespace {

using engine::Batch;
using engine::Table;
using engine::Wanted;
using nvme::Opcode;

constexpr std::uint64_t kForEver = std::numeric_limits<std::int64_t>::max();
/// Requests that are staged with the interpreter lock: some ten microseconds' worth.
constexpr std::size_t kWithLock = 512;
/// Results that are collected at once while room is made.
constexpr std::size_t kPortion = 4096;
constexpr auto kNever = [](std::size_t) { return false; };

[[noreturn, gnu::cold]] void raise_stale(const PyBatch& self, const char* operation) {
  Table::instance().explain_stale(self.handle, operation);
  set_device(last_error(), self.uri.c_str());
  raise_last();
}

[[noreturn, gnu::cold]] void raise_closed(const char* operation) {
  raise_new(EBADF, operation, "the batch is closed", "make another by Device.batch()");
}

/// The batch in its device. Raises ugds.Error (EBADF).
inline Batch& batch_of(const PyBatch& self, const Table::Use& handle, const char* operation) {
  if (!handle) [[unlikely]]
    raise_stale(self, operation);
  if (self.closed.load(std::memory_order_relaxed)) [[unlikely]]
    raise_closed(operation);
  Batch* const batch = handle->batch(self.id.slot);
  if (batch == nullptr) __builtin_unreachable();  // it was opened
  return *batch;
}

/// Requests of one buffer, with cookies in a row.
struct Plain {
  const memory::Reference* buffer;
  const std::uint64_t *offsets, *sizes, *places;
  std::size_t offset_mask, size_mask, place_mask;
  std::uint64_t base, cookie;
  Opcode opcode;
  bool durable;

  [[gnu::always_inline]] Wanted operator()(std::size_t i) const {
    return {.buffer = buffer,
            .version = 1,
            .offset = offsets[i & offset_mask],
            .size = sizes[i & size_mask],
            .buffer_offset = base + places[i & place_mask],
            .cookie = cookie + i,
            .opcode = opcode,
            .durable = durable};
  }
};

/// Any others.
struct General {
  const Plain& plain;
  const Buffers& buffers;
  const std::uint64_t* versions;  ///< of the buffers, where they are a list
  const Column* cookies;

  [[gnu::always_inline]] Wanted operator()(std::size_t i) const {
    Wanted wanted = plain(i);
    if (versions != nullptr) {
      const View& view = buffers[i];
      wanted.buffer = &view.buffer;
      wanted.version = versions[buffers.size() == 1 ? 0 : i];
      wanted.buffer_offset += view.offset;
    }
    if (cookies != nullptr) wanted.cookie = (*cookies)[i];
    return wanted;
  }
};

/// Submits requests, and collects results where there is no capacity for the rest.
class Submission {
 public:
  Submission(PyBatch& self, engine::Handle& handle, Batch& batch, std::size_t count)
      : self_(self), handle_(handle), batch_(batch), count_(count) {}

  /// False: the batch was closed, or the caller was interrupted and an exception is set.
  template <class Get>
  [[gnu::flatten]] bool run(const Get& wanted) {
    if (count_ <= kWithLock && !handle_.rings_may_block()) [[likely]] {
      if (!submit(wanted)) return false;
      if (done_ == count_ && batch_.is_settled(self_.id.generation)) [[likely]]
        return true;
    }
    return run_without_lock(wanted);
  }
  std::size_t done() const { return done_; }

 private:
  template <class Get>
  [[gnu::always_inline]] bool submit(const Get& wanted) {
    const std::size_t first = done_;
    const std::int64_t taken = batch_.submit(
        self_.id.generation, count_ - first, false,
        [&wanted, first ](std::size_t i) __attribute__((always_inline)) { return wanted(first + i); }, kNever);
    if (taken < 0) [[unlikely]]
      return false;
    done_ += static_cast<std::size_t>(taken);
    self_.taken.fetch_add(static_cast<std::uint64_t>(taken), std::memory_order_relaxed);
    return true;
  }
  template <class Get>
  [[gnu::cold, gnu::noinline]] bool run_without_lock(const Get& wanted) {
    return without_lock([&] {
      Results portion;
      bool interrupted = false;
      Context context{python_interrupt(), interrupted};
      for (;;) {
        if (!submit(wanted)) return false;
        if (done_ == count_) return batch_.settle(self_.id.generation, context.interrupt());
        const std::size_t most = std::min(kPortion, count_ - done_);
        portion.make_room(most);
        if (!self_.make_room(batch_, portion, most, context.interrupt()) || interrupted) return false;
      }
    });
  }
  /// Remembers that the caller was interrupted.
  struct Context {
    engine::Interrupt inner;
    bool& interrupted;
    engine::Interrupt interrupt() {
      return {[](void* self) {
                auto& context = *static_cast<Context*>(self);
                return context.interrupted = context.inner.asked(context.inner.context);
              },
              this};
    }
  };

  PyBatch& self_;
  engine::Handle& handle_;
  Batch& batch_;
  std::size_t count_, done_ = 0;
};

/// As they were given, or made up: sizes are the rest of the buffers, places one after the other.
void complete(Column& sizes, bool has_sizes, Column& places, bool has_places, const Buffers& buffers,
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
    made[i] = std::min(next, kForEver);
    next = std::min(next, kForEver) + sizes[i];
  }
}

/// Neighbours in one registration share a number.
std::unique_ptr<std::uint64_t[]> number(const Buffers& buffers) {
  auto versions = std::make_unique_for_overwrite<std::uint64_t[]>(std::max<std::size_t>(1, buffers.size()));
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const memory::Reference& now = buffers[i].buffer;
    const memory::Reference& before = buffers[i == 0 ? 0 : i - 1].buffer;
    const bool same = now.registration == before.registration && now.generation == before.generation &&
                      now.readonly == before.readonly;
    versions[i] = i == 0 ? 1 : versions[i - 1] + (same ? 0 : 1);
  }
  return versions;
}

nb::object range_of(std::uint64_t first, std::uint64_t count) {
  nb::object range = nb::steal(PyObject_CallFunction(reinterpret_cast<PyObject*>(&PyRange_Type), "KK",
                                                     static_cast<unsigned long long>(first),
                                                     static_cast<unsigned long long>(first + count)));
  if (!range.is_valid()) throw nb::python_error();
  return range;
}

/// The cookies of a call, as its caller gets them.
nb::object cookies_of(const Column& cookies, std::size_t count) {
  if (cookies.is_array() && cookies.size() == count) return nb::borrow(cookies.object());
  if (count == 1) return range_of(cookies[0], 1);
  return nb::module_::import_("ugds._batch").attr("repeated")(cookies[0], count);
}

enum Argument { kBuffer, kOffsets, kSizes, kPlaces, kCookies, kDurable, kArguments };
constexpr const char* kNames[kArguments] = {"buffer", "offsets", "sizes", "buffer_offsets", "cookies", "durable"};
Names<kArguments>* names;

[[noreturn, gnu::cold]] void raise_submission(PyBatch& self, const char* operation) {
  check_interrupt();
  if (self.closed.load(std::memory_order_relaxed)) raise_closed(operation);
  raise_stale(self, operation);
}

template <Opcode opcode>
nb::object transfer(PyBatch& self, PyObject* const* a) {
  constexpr const char* name = opcode == Opcode::read ? "read" : "write";
  const auto given = [&](Argument i) { return a[i] != nullptr && a[i] != Py_None; };
  if (anything_retired()) [[unlikely]]
    collect_retired();
  if (a[kBuffer] == nullptr || a[kOffsets] == nullptr) throw nb::type_error("missing argument: buffer, offsets");
  const Buffers buffers(a[kBuffer], name);
  const Column offsets(a[kOffsets], "offsets", name);
  const auto optional = [&](Argument i) { return given(i) ? a[i] : nullptr; };
  Column sizes = Column::optional(optional(kSizes), "sizes", name);
  Column places = Column::optional(optional(kPlaces), "buffer_offsets", name);
  const Column cookies = Column::optional(optional(kCookies), "cookies", name);
  Length length(name);
  if (buffers.is_list()) length.add(buffers.size(), "buffer");
  length.add(offsets, "offsets");
  length.add(sizes, "sizes");
  length.add(places, "buffer_offsets");
  length.add(cookies, "cookies");
  const std::size_t count = length.get();
  complete(sizes, given(kSizes), places, given(kPlaces), buffers, length, name);
  check_places(buffers, places, sizes, count, name);

  const Table::Use handle(Table::instance(), self.handle);
  Batch& batch = batch_of(self, handle, name);
  const std::uint64_t first = given(kCookies) ? 0 : self.next_cookie.fetch_add(count, std::memory_order_relaxed);
  const bool many = buffers.is_list() && count != 0;
  static const View none{};
  const View& view = many || count == 0 ? none : buffers[0];
  const Plain plain{.buffer = &view.buffer,
                    .offsets = offsets.data(),
                    .sizes = sizes.data(),
                    .places = places.data(),
                    .offset_mask = offsets.mask(),
                    .size_mask = sizes.mask(),
                    .place_mask = places.mask(),
                    .base = view.offset,
                    .cookie = first,
                    .opcode = opcode,
                    .durable = opcode == Opcode::write && flag(a[kDurable])};
  Submission submission(self, *handle, batch, count);
  bool whole = true;
  if (!many && !given(kCookies)) [[likely]] {
    if (count != 0) whole = submission.run(plain);
  } else {
    const auto versions = many ? number(buffers) : nullptr;
    whole = submission.run(General{plain, buffers, versions.get(), given(kCookies) ? &cookies : nullptr});
  }
  if (!whole) [[unlikely]]
    raise_submission(self, name);
  return given(kCookies) ? cookies_of(cookies, count) : range_of(first, count);
}

PyBatch& self_of(PyObject* self) {
  if (!nb::inst_ready(self)) [[unlikely]]
    throw nb::type_error("a Batch is made by Device.batch()");
  return *nb::inst_ptr<PyBatch>(self);
}

template <Opcode opcode>
PyObject* method(PyObject* self, PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
  try {
    PyObject* arguments[kArguments] = {};
    names->parse(args, static_cast<std::size_t>(positional), keywords, opcode == Opcode::read ? kDurable : kArguments,
                 arguments);
    return transfer<opcode>(self_of(self), arguments).release().ptr();
  } catch (...) {
    return translate(nb::inst_ptr<PyBatch>(self)->uri.c_str());
  }
}

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
    PyBatch& self = self_of(object);
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
    raise_new(ETIMEDOUT, "batch",
              std::to_string(batch.outstanding(self.id.generation)) + " requests have not ended in the time given, " +
                  std::to_string(count) + " have",
              "nothing is lost: wait again, or take what there is by completed()");
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
    {"read", method_pointer(&method<Opcode::read>), METH_FASTCALL | METH_KEYWORDS,
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
    {"write", method_pointer(&method<Opcode::write>), METH_FASTCALL | METH_KEYWORDS,
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
  names = new Names<kArguments>(kNames, kCookies + 1,
                                "buffer, offsets, sizes, buffer_offsets, cookies, and for write durable");
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
                 throw nb::type_error("a Batch cannot be pickled: it is of a device that is open in this process");
               })
          .def("__repr__", [](const PyBatch& b) {
            return "<ugds.Batch of depth " + std::to_string(b.depth) + " on " + b.uri + (b.closed ? " (closed)>" : ">");
          });
  add_methods(type, methods);
}

}  // namespace ugds::python
