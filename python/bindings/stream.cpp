// SPDX-License-Identifier: Apache-2.0
//
// Requests in the order of a GPU's stream. A submission keeps the interpreter lock: it takes a few microseconds.
#include "stream.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "columns.hpp"
#include "engine/stream.hpp"
#include "engine/stream_worker.hpp"

namespace ugds::python {

namespace {

using engine::Late;
using engine::Stream;
using engine::StreamCall;
using engine::StreamResult;
using engine::Table;
using engine::Transfer;
using nvme::Opcode;

/// A reference to a result.
class ResultOf {
 public:
  ResultOf() = default;
  explicit ResultOf(StreamResult* result) : result_(result) {}
  ResultOf(ResultOf&& other) noexcept : result_(std::exchange(other.result_, nullptr)) {}
  ResultOf& operator=(ResultOf&& other) noexcept {
    std::swap(result_, other.result_);
    return *this;
  }
  ~ResultOf() {
    if (result_ != nullptr) result_->release();
  }
  StreamResult* operator->() const { return result_; }
  StreamResult* get() const { return result_; }

 private:
  StreamResult* result_ = nullptr;
};

/// What an operation needs until it has ended, whatever its caller drops.
struct Kept {
  ResultOf result;
  std::vector<nb::object> objects;
};
std::vector<Kept>& kept() {
  static auto* list = new std::vector<Kept>;  // NOLINT: outlives the interpreter's own teardown
  return *list;
}
/// Devices on which operations are pending: one that was dropped stays open for them.
std::vector<nb::object>& kept_devices() {
  static auto* list = new std::vector<nb::object>;  // NOLINT: as above
  return *list;
}
std::mutex kept_lock;

struct PyStreamOp {
  ResultOf result;
  engine::HandleId device;
  std::string uri;
};

struct PyGroup {
  nb::object device;
  nb::object stream;
  std::vector<Transfer> requests;
  std::vector<nb::object> buffers;
  ResultOf result;
  std::uint64_t status = 0;
  bool submitted = false;
};

/// The number of a stream: an int, or an object of torch, CuPy, Numba or cuda.core.
gpu::StreamHandle stream_argument(nb::handle stream) {
  const auto handle = [](nb::handle number) {
    return reinterpret_cast<gpu::StreamHandle>(nb::cast<std::uintptr_t>(nb::int_(number)));
  };
  if (stream.is_none()) return nullptr;
  if (PyLong_Check(stream.ptr())) return handle(stream);
  if (nb::hasattr(stream, "cuda_stream")) return handle(stream.attr("cuda_stream"));
  if (nb::hasattr(stream, "__cuda_stream__")) {
    nb::object pair = stream.attr("__cuda_stream__");
    if (PyCallable_Check(pair.ptr()) != 0) pair = pair();
    return handle(nb::object(pair[1]));
  }
  if (nb::hasattr(stream, "ptr")) return handle(stream.attr("ptr"));
  if (nb::hasattr(stream, "handle")) {
    nb::object number = stream.attr("handle");
    if (nb::hasattr(number, "value")) number = number.attr("value");  // Numba's is of ctypes
    return number.is_none() ? nullptr : handle(number);
  }
  throw nb::type_error("stream must be an int, or an object with cuda_stream, __cuda_stream__, ptr or handle");
}

gpu::Runtime& any_runtime(const char* operation) {
  std::string why;
  if (gpu::Runtime* runtime = gpu::cuda(&why)) return *runtime;
  if (gpu::Runtime* runtime = gpu::hip()) return *runtime;
  raise_new(EOPNOTSUPP, operation, "there is no GPU: " + why, "use read and write, which need none");
}

Stream& stream_of(const memory::Registry::GpuPlace& place, nb::handle stream, const char* operation) {
  const gpu::StreamHandle handle = stream_argument(stream);
  if (place.runtime != nullptr) return Stream::of(*place.runtime, handle, place.place);
  gpu::Runtime& runtime = any_runtime(operation);
  if (reinterpret_cast<std::uintptr_t>(handle) > 2) return Stream::of(runtime, handle, {});
  return Stream::of(runtime, handle, runtime.place_of(0));
}

/// An array of one int64 is read when the stream gets there; whatever else is a number now.
std::uint64_t late_argument(nb::handle value, const char* name, const char* operation, const std::int64_t*& late,
                            std::vector<nb::object>& objects) {
  Py_buffer view;
  if (!PyLong_Check(value.ptr()) && !PyUnicode_Check(value.ptr()) && PyObject_CheckBuffer(value.ptr()) != 0 &&
      PyObject_GetBuffer(value.ptr(), &view, PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_ND) == 0) {
    const bool fits = view.itemsize == 8 && view.len == 8 && view.format != nullptr &&
                      (view.format[0] == 'l' || view.format[0] == 'q') && view.format[1] == '\0';
    late = fits ? static_cast<const std::int64_t*>(view.buf) : nullptr;
    PyBuffer_Release(&view);
    if (late == nullptr) {
      raise_new(EINVAL, operation, std::string(name) + " is an array, and not of one int64",
                "give a number, or numpy.array([n], numpy.int64) to have it read when the stream gets there");
    }
    objects.push_back(nb::borrow(value));
    return *late < 0 ? 0 : static_cast<std::uint64_t>(*late);
  }
  PyErr_Clear();
  return size_argument(value, name, operation);
}

void keep(const ResultOf& result, std::vector<nb::object> objects) {
  if (objects.empty()) return;
  result->refer();
  const std::lock_guard guard(kept_lock);
  kept().push_back({ResultOf(result.get()), std::move(objects)});
}

void keep_device(nb::handle device) {
  const std::lock_guard guard(kept_lock);
  for (const nb::object& one : kept_devices()) {
    if (one.is(device)) return;
  }
  kept_devices().push_back(nb::borrow(device));
}

bool is_pending(nb::handle device) {
  const Table::Use handle(Table::instance(), nb::inst_ptr<PyDevice>(device)->id);
  return handle && handle->stream_operations() != 0;
}

void submit(nb::handle self, Stream& stream, const StreamCall& call, const char* operation) {
  const PyDevice& device = *nb::inst_ptr<PyDevice>(self);
  const Table::Use handle(Table::instance(), device.id);
  if (!handle) {
    Table::instance().explain_stale(device.id, operation);
    set_device(last_error(), device.uri.c_str());
    raise_last();
  }
  const std::int64_t result = stream.submit(*handle, call, python_interrupt());
  if (result >= 0) return keep_device(self);
  check_interrupt();
  raise_last();
}

template <Opcode opcode>
PyStreamOp transfer(nb::handle device, nb::handle buffer, nb::handle offset, nb::handle size, nb::handle buffer_offset,
                    nb::handle stream, std::uint64_t status, bool durable) {
  constexpr const char* name = opcode == Opcode::read ? "read" : "write";
  if (anything_retired()) collect_retired();
  collect_stream_objects();
  std::vector<nb::object> objects;
  Late late;
  const View view = buffer_argument(buffer.ptr(), name);
  Transfer t{.opcode = opcode, .buffer = view.buffer, .durable = durable};
  t.offset = late_argument(offset, "offset", name, late.offset, objects);
  const std::uint64_t in_view = late_argument(buffer_offset, "buffer_offset", name, late.buffer_offset, objects);
  if (in_view > view.size) {
    raise_new(EINVAL, name, "buffer_offset lies beyond the buffer", "give a smaller one");
  }
  if (late.buffer_offset != nullptr && view.offset != 0) {
    raise_new(EINVAL, name, "a buffer_offset that is bound late needs the Registration itself, and not a view in it",
              "give the Registration");
  }
  t.buffer_offset = view.offset + in_view;
  t.size = size.is_none() ? view.size - in_view : late_argument(size, "size", name, late.size, objects);
  if (late.buffer_offset == nullptr && t.size > view.size - in_view)
    raise_new(EINVAL, name, "the range reaches beyond the buffer", "give a smaller size");
  memory::Registry::GpuPlace place;
  if (is_registration(buffer.ptr())) {
    const PyRegistration& registration = *nb::inst_ptr<PyRegistration>(buffer.ptr());
    place = {registration.runtime, registration.place};
  } else {
    place = memory::Registry::instance().gpu_of(t.buffer);
  }
  const PyDevice& of = *nb::inst_ptr<PyDevice>(device);
  PyStreamOp op{ResultOf(StreamResult::make()), of.id, of.uri};
  StreamCall call{.requests = std::span(&t, 1), .late = late, .status = status, .result = op.result.get()};
  submit(device, stream_of(place, stream, name), call, name);
  keep(op.result, std::move(objects));
  return op;
}

/// As the device's mode waits for large requests.
std::uint64_t poll_time(engine::HandleId device) {
  const Table::Use handle(Table::instance(), device);
  const bool polls = handle && handle->scheduler().waiting().polls(engine::StreamPlan::kMuch);
  return polls ? engine::kPollForRequest : engine::kPollForMoment;
}

/// Waits without the interpreter lock. Raises TimeoutError, and what a signal handler raises.
std::int64_t wait_for_result(const ResultOf& result, std::optional<double> timeout, engine::HandleId device,
                             const std::string& uri) {
  const std::uint64_t limit = timeout ? static_cast<std::uint64_t>(std::clamp(*timeout, 0.0, 1e9) * 1e9) : ~0ull;
  const auto is_done = [&] {
    return engine::wait_until([&] { return result->done(); }, limit, python_interrupt(), poll_time(device));
  };
  if (!result->done() && !without_lock(is_done)) {
    check_interrupt();
    PyErr_SetString(PyExc_TimeoutError, ("the operation on " + uri + " has not ended yet").c_str());
    throw nb::python_error();
  }
  if (!result->failed()) return result->result();
  result->look();
  raise(result->error());
}

template <Opcode opcode>
void add(PyGroup& self, nb::object buffer, nb::object offsets, nb::object sizes, nb::object buffer_offsets,
         bool durable) {
  constexpr const char* name = opcode == Opcode::read ? "read" : "write";
  if (self.submitted) raise_new(EINVAL, name, "the group was submitted", "make another one");
  const Buffers buffers(buffer.ptr(), name);
  const auto given = [](const nb::object& object) { return object.is_none() ? nullptr : object.ptr(); };
  const Column at(offsets.ptr(), "offsets", name);
  Column bytes = Column::optional(given(sizes), "sizes", name);
  Column places = Column::optional(given(buffer_offsets), "buffer_offsets", name);
  Length length(name);
  if (buffers.is_list()) length.add(buffers.size(), "buffer");
  length.add(at, "offsets");
  length.add(bytes, "sizes");
  length.add(places, "buffer_offsets");
  complete_columns(bytes, !sizes.is_none(), places, !buffer_offsets.is_none(), buffers, length, name);
  check_places(buffers, places, bytes, length.get(), name);
  for (std::size_t i = 0; i < length.get(); ++i) {
    const View& view = buffers[i];
    self.requests.push_back({.opcode = opcode,
                             .buffer = view.buffer,
                             .offset = at[i],
                             .size = bytes[i],
                             .buffer_offset = view.offset + places[i],
                             .durable = durable});
  }
}

void submit_group(PyGroup& self) {
  if (self.submitted) return;
  self.submitted = true;
  collect_stream_objects();
  if (self.requests.empty()) return;
  memory::Registry::GpuPlace place;
  for (const Transfer& t : self.requests) {
    if (place = memory::Registry::instance().gpu_of(t.buffer); place.runtime != nullptr) break;
  }
  ResultOf result(StreamResult::make());
  const StreamCall call{.requests = self.requests, .status = self.status, .result = result.get()};
  submit(self.device, stream_of(place, self.stream, "group"), call, "group");
  self.result = std::move(result);
}

std::int64_t group_result(PyGroup& self, std::optional<double> timeout) {
  if (!self.submitted)
    raise_new(EINVAL, "group", "the group was not submitted", "it is at the end of its `with` block");
  if (self.result.get() == nullptr) return 0;
  const PyDevice& device = nb::cast<const PyDevice&>(self.device);
  return wait_for_result(self.result, timeout, device.id, device.uri);
}

void synchronize(nb::handle object) {
  collect_stream_objects();
  const gpu::StreamHandle handle = stream_argument(object);
  const std::vector<Stream*> streams = Stream::named(handle);
  if (streams.empty()) any_runtime("synchronize");
  const std::int64_t result = without_lock([&]() -> std::int64_t {
    for (Stream* stream : streams) {
      if (const std::int64_t code = engine::wait_for(*stream, python_interrupt()); code < 0) return code;
    }
    return 0;
  });
  if (result < 0) {
    check_interrupt();
    raise_new(EINTR, "synchronize", "interrupted");
  }
  for (Stream* stream : streams) {
    const ResultOf failed(stream->take_error());
    if (failed.get() != nullptr) raise(failed->error());
  }
}

nb::dict stream_stats(const PyDevice& device) {
  const Table::Use handle(Table::instance(), device.id);
  nb::dict counts;
  static const Stream::Counters none;
  engine::StreamWorker* const worker = handle ? handle->streams() : nullptr;
  const Stream::Counters& c = worker != nullptr ? worker->counters() : none;
  counts["requests"] = c.requests.load();
  counts["bytes"] = c.bytes.load();
  counts["held_by_wait"] = c.held_by_wait.load();
  counts["held_by_kernel"] = c.held_by_kernel.load();
  counts["held_by_call"] = c.held_by_call.load();
  counts["staged"] = c.staged.load();
  counts["direct"] = c.direct.load();
  counts["pending"] = worker != nullptr ? worker->pending() : 0;
  return counts;
}

constexpr const char* kReadDoc =
    "Reads in the order of a GPU's stream: what is enqueued there after this call runs after the read. Returns at\n"
    "once, with a `StreamOp`.\n\n"
    "buffer, offset, size, buffer_offset: as `read`, in whole blocks; each a number, or an array of one int64, which\n"
    "is read when the stream gets to the request (a size is at most what it is now). stream: an int (CUstream), or a\n"
    "stream of torch, CuPy, Numba or cuda.core; None is the default stream. status: the address of 4 bytes of GPU\n"
    "memory, which are 0 or an errno before the stream goes on, for kernels that want to know. What a read that "
    "failed\n"
    "has not read is filled with 0xdb. Every object may be dropped at once.\n\n"
    "Raises `ugds.Error`: EOPNOTSUPP (no GPU, the stream is being captured), EINVAL, ERANGE, ESTALE (the memory was\n"
    "freed), EAGAIN (no room on the stream within the deadline). What fails later is raised by `StreamOp.result` and\n"
    "`ugds.synchronize`. Thread-safe.";

}  // namespace

void collect_stream_objects() {
  std::vector<Kept> ended;  // destroyed after the lock is let go
  std::vector<nb::object> devices;
  const std::lock_guard guard(kept_lock);
  std::erase_if(kept_devices(), [&](nb::object& device) {
    if (is_pending(device)) return false;
    devices.push_back(std::move(device));
    return true;
  });
  std::erase_if(kept(), [&](Kept& one) {
    if (!one.result->done()) return false;
    ended.push_back(std::move(one));
    return true;
  });
}

void define_stream_methods(nb::handle type) {
  const auto define = [&](const char* name, auto function, const auto&... extra) {
    nb::cpp_function_def(function, nb::scope(type), nb::name(name), nb::is_method(), extra...);
  };
  define(
      "read_async",
      [](nb::handle device, nb::handle buffer, nb::handle offset, nb::handle size, nb::handle buffer_offset,
         nb::handle stream, std::uint64_t status) {
        return transfer<Opcode::read>(device, buffer, offset, size, buffer_offset, stream, status, false);
      },
      nb::arg("buffer"), nb::arg("offset") = 0, nb::arg("size").none() = nb::none(), nb::arg("buffer_offset") = 0,
      nb::kw_only(), nb::arg("stream").none() = nb::none(), nb::arg("status") = 0, kReadDoc);
  define(
      "write_async",
      [](nb::handle device, nb::handle buffer, nb::handle offset, nb::handle size, nb::handle buffer_offset,
         nb::handle stream, std::uint64_t status, bool durable) {
        return transfer<Opcode::write>(device, buffer, offset, size, buffer_offset, stream, status, durable);
      },
      nb::arg("buffer"), nb::arg("offset") = 0, nb::arg("size").none() = nb::none(), nb::arg("buffer_offset") = 0,
      nb::kw_only(), nb::arg("stream").none() = nb::none(), nb::arg("status") = 0, nb::arg("durable") = false,
      "Writes in the order of a GPU's stream: of what was enqueued there before, and it is done when the stream goes "
      "on. "
      "As\n`read_async`; `durable` as in `write`.");
  define(
      "group",
      [](nb::handle device, nb::handle stream, std::uint64_t status) {
        auto group = std::make_unique<PyGroup>();
        group->device = nb::borrow(device);
        group->stream = nb::borrow(stream);
        group->status = status;
        return group.release();
      },
      nb::arg("stream").none() = nb::none(), nb::kw_only(), nb::arg("status") = 0, nb::rv_policy::take_ownership,
      "A `Group` of requests that are ordered as one on the stream, and not among themselves: submitted at the end of "
      "its\n`with` block. Arguments as of `read_async`. Thread-safe.");
  define("stream_stats", &stream_stats);
}

void define_streams(nb::module_& m) {
  nb::class_<PyStreamOp>(m, "StreamOp", nb::is_final(),
                         "A read or write on a stream. It may be dropped at any time: the operation runs on.")
      .def("__repr__",
           [](const PyStreamOp& op) {
             return "<ugds.StreamOp on " + op.uri + (op.result->done() ? ", done>" : ", pending>");
           })
      .def("__reduce__", refuses_pickling<PyStreamOp>(
                             "a StreamOp cannot be pickled or copied: it is pending on a stream of this process"))
      .def(
          "done", [](const PyStreamOp& op) { return op.result->done(); }, "Whether it has ended.")
      .def(
          "result",
          [](const PyStreamOp& op, std::optional<double> timeout) {
            return wait_for_result(op.result, timeout, op.device, op.uri);
          },
          nb::arg("timeout").none() = nb::none(),
          "Waits until it has ended, for at most `timeout` seconds, and gives the bytes. Raises `ugds.Error`, as "
          "`read`\n"
          "does, and TimeoutError. Thread-safe.");
  nb::class_<PyGroup>(m, "Group", nb::is_final(), "Requests that are one on a stream (see `Device.group`).")
      .def("__reduce__",
           refuses_pickling<PyGroup>("a Group cannot be pickled or copied: it is of a stream of this process"))
      .def("read", &add<Opcode::read>, nb::arg("buffer"), nb::arg("offsets"), nb::arg("sizes").none() = nb::none(),
           nb::arg("buffer_offsets").none() = nb::none(), nb::arg("durable") = false,
           "Adds reads: arguments as of `Batch.read`. Raises `ugds.Error`: EINVAL.")
      .def("write", &add<Opcode::write>, nb::arg("buffer"), nb::arg("offsets"), nb::arg("sizes").none() = nb::none(),
           nb::arg("buffer_offsets").none() = nb::none(), nb::arg("durable") = false,
           "Adds writes: arguments as of `Batch.write`. Raises `ugds.Error`: EINVAL.")
      .def("submit", &submit_group, "Submits what was added, once. Raises as `Device.read_async`.")
      .def(
          "done",
          [](const PyGroup& self) { return self.submitted && (self.result.get() == nullptr || self.result->done()); },
          "Whether it was submitted and has ended.")
      .def("result", &group_result, nb::arg("timeout").none() = nb::none(),
           "Waits until all of it has ended, and gives the bytes together. As `StreamOp.result`.")
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def(
          "__exit__",
          [](PyGroup& self, nb::handle type, nb::handle, nb::handle) {
            if (type.is_none()) submit_group(self);
          },
          nb::arg("type").none(), nb::arg("value").none(), nb::arg("traceback").none());
  m.def(
      "synchronize", &synchronize, nb::arg("stream").none() = nb::none(),
      "Waits until every operation of ours on the stream has ended, and raises the first error of one that nobody was\n"
      "told of. stream: as of `Device.read_async`. Thread-safe; Ctrl-C ends it.");
}

}  // namespace ugds::python
