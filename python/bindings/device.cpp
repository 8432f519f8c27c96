// SPDX-License-Identifier: Apache-2.0
//
// Device: the synchronous way in. A short read polls for a few microseconds with the interpreter lock before it lets go
// of it: dropping and taking the lock costs more than many a completion.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <iterator>

#include "arguments.hpp"
#include "base/clock.hpp"
#include "batch.hpp"
#include "common.hpp"
#include "engine/one_command.hpp"
#include "engine/unaligned.hpp"
#include "stream.hpp"

namespace ugds::python {

namespace {

using engine::OneCommand;
using engine::Priority;
using engine::Table;
using engine::Transfer;
using nvme::Opcode;

constexpr std::uint64_t kPollWithLock = 15'000;  // ns
constexpr unsigned kTurnsWithLock = 4;           // at least: a turn may be a controller's, with `pump=caller`

[[noreturn]] void raise_stale(const PyDevice& device, const char* operation) {
  Table::instance().explain_stale(device.id, operation);
  set_device(last_error(), device.uri.c_str());
  raise_last();
}

/// A number of bytes as almost every caller gives it; anything else goes the long way.
inline std::uint64_t bytes_argument(PyObject* value, const char* name, const char* operation) {
  if (PyLong_CheckExact(value)) [[likely]] {
    const unsigned long long bytes = PyLong_AsUnsignedLongLong(value);
    if (bytes != static_cast<unsigned long long>(-1)) [[likely]]
      return bytes;
    PyErr_Clear();
  }
  return size_argument(value, name, operation);
}

/// Where a request's bytes are in its registration, and how many there are.
struct Range {
  memory::Reference buffer;
  std::uint64_t offset = 0, size = 0;
};

/// For memory that is not a Registration, but lies inside of one.
[[gnu::cold, gnu::noinline]] Range range_in_view(PyObject* object, std::uint64_t offset, PyObject* size,
                                                 const char* name, Temporary& temporary) {
  const View view = view_of(object, name, &temporary);
  if (offset > view.size) raise_new(EINVAL, name, "buffer_offset lies beyond the buffer", "give a smaller one");
  const std::uint64_t bytes = size == nullptr ? view.size - offset : bytes_argument(size, "size", name);
  if (bytes > view.size - offset) {
    raise_new(EINVAL, name, "the range reaches beyond the buffer that was given", "give a smaller size");
  }
  return {view.buffer, view.offset + offset, bytes};
}

[[noreturn, gnu::cold]] void raise_closed_registration(const char* name) {
  raise_new(ESTALE, name, "the registration is closed", "register the buffer again");
}

[[noreturn, gnu::cold]] void raise_beyond(const PyRegistration& registration, std::uint64_t at, const char* name) {
  raise_new(EINVAL, name,
            "buffer_offset, " + std::to_string(at) + ", lies beyond the buffer, which has " +
                std::to_string(registration.reference.size) + " bytes",
            "give a smaller one");
}

inline Range range_of(PyObject* object, PyObject* offset, PyObject* size, const char* name) {
  const std::uint64_t at = offset == nullptr ? 0 : bytes_argument(offset, "buffer_offset", name);
  const PyRegistration& registration = *nb::inst_ptr<PyRegistration>(object);
  if (registration.closed) [[unlikely]]
    raise_closed_registration(name);
  if (at > registration.reference.size) [[unlikely]]
    raise_beyond(registration, at, name);
  const std::uint64_t rest = registration.reference.size - at;
  return {registration.reference, at, size == nullptr ? rest : bytes_argument(size, "size", name)};
}

/// What is not one command that can be staged at once.
[[gnu::cold, gnu::noinline]] std::int64_t transfer_any(engine::Handle& handle, const Transfer& transfer,
                                                       bool unaligned) {
  return without_lock([&] { return engine::run_any(handle, transfer, unaligned, python_interrupt()); });
}

/// Polls with the lock for a short while, then without it.
inline std::int64_t wait(engine::Handle& handle, OneCommand& command, const Transfer& transfer) {
  static const std::uint64_t patience = ns_to_ticks(kPollWithLock);
  const std::uint64_t start = ticks();
  for (unsigned turns = 0; turns < kTurnsWithLock || (ticks() - start < patience && !handle.interrupts()); ++turns) {
    if (!command.turn(handle.turn())) continue;
    if (!command.failed()) [[likely]]
      return static_cast<std::int64_t>(transfer.size);
    break;
  }
  return without_lock([&] { return command.resume(handle, transfer, python_interrupt()); });
}

[[noreturn, gnu::cold]] void raise_result() {
  check_interrupt();
  raise_last();
}

// `read` and `write` are plain methods of the C API, not nanobind's: their calls are the cost of a request in Python.

enum Argument { kBuffer, kOffset, kSize, kPlace, kPriority, kDurable, kUnaligned, kArguments };
constexpr const char* kNames[kArguments] = {"buffer",   "offset",  "size",     "buffer_offset",
                                            "priority", "durable", "unaligned"};
Names<kArguments>* names;

template <Opcode opcode>
[[gnu::always_inline]] inline std::int64_t transfer_in(const PyDevice& device, PyObject* const* a, const Range& range) {
  constexpr const char* name = opcode == Opcode::read ? "read" : "write";
  const Transfer t{opcode,
                   range.buffer,
                   a[kOffset] == nullptr ? 0 : bytes_argument(a[kOffset], "offset", name),
                   range.size,
                   range.offset,
                   opcode == Opcode::write && flag(a[kDurable]),
                   a[kPriority] == nullptr ? Priority::unsaid : priority_argument(a[kPriority], name)};
  const bool unaligned = opcode == Opcode::read || flag(a[kUnaligned]);
  const Table::Use handle(Table::instance(), device.id);
  if (!handle) [[unlikely]]
    raise_stale(device, name);
  OneCommand command;
  std::int64_t result;
  if (!t.durable && t.priority != Priority::background && !handle->rings_may_block() &&
      command.start(*handle, handle.caller(), opcode, t.buffer, t.offset, t.size, t.buffer_offset)) [[likely]] {
    result = wait(*handle, command, t);
  } else {
    result = transfer_any(*handle, t, unaligned);
  }
  if (result < 0) [[unlikely]]
    raise_result();
  return result;
}

/// Memory that is not a Registration: it lies inside of one, or is GPU memory that gets one for this call.
template <Opcode opcode>
[[gnu::cold, gnu::noinline]] std::int64_t transfer_view(const PyDevice& device, PyObject* const* a) {
  constexpr const char* name = opcode == Opcode::read ? "read" : "write";
  const Table::Use handle(Table::instance(), device.id);
  if (!handle) raise_stale(device, name);
  Temporary temporary{.device = handle->geometry().number, .registration = {}};
  const std::uint64_t at = a[kPlace] == nullptr ? 0 : bytes_argument(a[kPlace], "buffer_offset", name);
  const Range range = range_in_view(a[kBuffer], at, a[kSize] == Py_None ? nullptr : a[kSize], name, temporary);
  return transfer_in<opcode>(device, a, range);
}

template <Opcode opcode>
std::int64_t transfer(const PyDevice& device, PyObject* const* a) {
  constexpr const char* name = opcode == Opcode::read ? "read" : "write";
  if (anything_retired()) [[unlikely]]
    collect_retired();
  if (a[kBuffer] == nullptr) throw nb::type_error("missing argument: buffer");
  if (!is_registration(a[kBuffer])) [[unlikely]]
    return transfer_view<opcode>(device, a);
  return transfer_in<opcode>(device, a,
                             range_of(a[kBuffer], a[kPlace], a[kSize] == Py_None ? nullptr : a[kSize], name));
}

template <Opcode opcode>
PyObject* method(PyObject* self, PyObject* const* args, Py_ssize_t positional, PyObject* keywords) {
  try {
    PyObject* arguments[kArguments] = {};
    names->parse(args, static_cast<std::size_t>(positional), keywords, opcode == Opcode::read ? kDurable : kArguments,
                 arguments);
    if (!nb::inst_ready(self)) [[unlikely]]
      throw nb::type_error("a Device is made by ugds.open()");
    return PyLong_FromLongLong(transfer<opcode>(*nb::inst_ptr<PyDevice>(self), arguments));
  } catch (...) {
    return translate(nb::inst_ptr<PyDevice>(self)->uri.c_str());
  }
}

PyMethodDef methods[] = {
    {"read", method_pointer(&method<Opcode::read>), METH_FASTCALL | METH_KEYWORDS,
     "read($self, buffer, offset=0, size=None, buffer_offset=0, *, priority=None)\n--\n\n"
     "Reads `size` bytes at `offset` of the device into a registered buffer, at `buffer_offset`; returns `size`.\n\n"
     "buffer: a Registration, or a view of memory inside of one. Offsets and size are bytes (an int, or text such as\n"
     "\"1MiB\"); size defaults to the rest of the buffer. Whole blocks into memory at a multiple of 4 bytes go "
     "direct;\n"
     "other edges go through a buffer of ours. priority: \"background\" is behind every other request, \"normal\" is "
     "not;\n"
     "without it the device's mode says.\n\n"
     "Raises `ugds.Error`: EINVAL (arguments, buffer not registered), ERANGE (beyond the device), EACCES (read-only\n"
     "buffer), EIO and others by NVMe status, ETIMEDOUT, ENODEV, EBADF (closed). Thread-safe. The interpreter lock is\n"
     "released where the wait is longer than some 15 microseconds; Ctrl-C ends it."},
    {"write", method_pointer(&method<Opcode::write>), METH_FASTCALL | METH_KEYWORDS,
     "write($self, buffer, offset=0, size=None, buffer_offset=0, *, priority=None, durable=False, "
     "unaligned=False)\n--\n\n"
     "Writes `size` bytes of a registered buffer, from `buffer_offset`, to `offset` of the device; returns `size`.\n\n"
     "As `read`. `durable=True`: on the medium when it returns, else after `flush()`. `unaligned=True` allows partial\n"
     "blocks, whose other bytes are read and rewritten, not atomically against other writers of the same blocks;\n"
     "without it they raise EINVAL."},
};

void flush(const PyDevice& device) {
  const Table::Use handle(Table::instance(), device.id);
  if (!handle) raise_stale(device, "flush");
  const auto result = without_lock([&] { return engine::run(*handle, {.opcode = Opcode::flush}, python_interrupt()); });
  if (result >= 0) return;
  check_interrupt();
  raise_last();
}

void discard(const PyDevice& device, nb::handle offset, nb::handle size) {
  const std::uint64_t at = size_argument(offset, "offset", "discard"), bytes = size_argument(size, "size", "discard");
  const Table::Use handle(Table::instance(), device.id);
  if (!handle) raise_stale(device, "discard");
  const auto result = without_lock([&] { return engine::discard(*handle, at, bytes, python_interrupt()); });
  if (result >= 0) return;
  check_interrupt();
  raise_last();
}

std::optional<engine::State> state_of(engine::HandleId id) {
  const Table::Use handle(Table::instance(), id);
  return handle ? std::optional(handle->state()) : std::nullopt;
}

bool is_closed(const PyDevice& device) {
  const Table::Use handle(Table::instance(), device.id);
  return !handle;
}

/// The device is closed, and some requests of batches have failed while nobody looked.
[[noreturn]] void raise_lost(const PyDevice& device, const Table::Lost& lost) {
  Error error = lost.first;
  set_device(error, device.uri.c_str());
  const std::string first = lost.first.cause;
  set_cause(error, "requests of batches that failed, whose results nobody has collected: %llu; the first: %s",
            static_cast<unsigned long long>(lost.count), first.c_str());
  set_hint(error, "the device is closed; collect the results of a batch, or leave its `with` block, before that");
  raise(error);
}

void close(PyDevice& device, double drain) {
  if (!(drain >= 0)) raise_new(EINVAL, "close", "a negative time", "give seconds");
  auto& table = Table::instance();
  const auto limit = static_cast<std::uint64_t>(std::min(drain, 1e9) * 1e9);
  std::string held;
  Table::Lost lost;
  bool wedged = false;
  collect_retired();
  const int code = without_lock([&] {
    const std::uint64_t start = monotonic_ns();
    device.drain_progress(limit);
    const std::uint64_t left = limit - std::min(limit, monotonic_ns() - start);
    int result = table.close(device.id, Table::Mode::bounded, left, &held, &lost);
    if (result == EBUSY && state_of(device.id) == engine::State::wedged) {
      // A wedged controller is reset from outside; what even that does not stop stays as it is.
      wedged = true;
      result = table.close(device.id, Table::Mode::force, limit, &held, &lost);
    }
    device.end_progress(result == EBUSY);
    return result;
  });
  collect_retired();
  if (code != EBUSY && lost.count != 0) raise_lost(device, lost);
  if (code != EBUSY) return;  // closed now, or before
  Error error;
  error.code = EBUSY;
  error.operation = "close";
  set_device(error, device.uri.c_str());
  set_cause(error, "%s", held.c_str());
  set_hint(error, wedged
                      ? "its function was reset just now, in vain; close() tries that again, and else the device is to "
                        "be reset or unplugged from outside"
                      : "wait for the requests, or give drain= more seconds");
  raise(error);
}

const char* state(const PyDevice& device) {
  const auto now = state_of(device.id);
  return now ? engine::state_name(*now) : "closed";
}

/// The end of a `with` block. An exception that leaves it is not replaced: what else there is to say is noted on it.
void leave(PyDevice& device, const nb::args& exception) {
  if (exception.size() < 2 || exception[1].is_none()) return close(device, 5.0);
  try {
    close(device, 5.0);
  } catch (const Failure& failure) {
    const nb::object raised = exception[1];
    if (nb::hasattr(raised, "add_note")) raised.attr("add_note")(error_object(failure.error()).attr("strerror"));
  }
}

/// Looks at the controller, as whoever waits for a request does.
const char* check(const PyDevice& device) {
  without_lock([&] {
    const Table::Use handle(Table::instance(), device.id);
    if (handle) handle->check_controller();
  });
  return state(device);
}

nb::dict recoveries(const PyDevice& device) {
  const Table::Use handle(Table::instance(), device.id);
  if (!handle) raise_stale(device, "stats");
  nb::dict counts;
  counts["state"] = engine::state_name(handle->state());
  counts["resets"] = handle->resets();
  counts["aborts"] = handle->aborts();
  return counts;
}

nb::dict info(const PyDevice& device) {
  const Table::Use handle(Table::instance(), device.id);
  if (!handle) raise_stale(device, "info");
  const engine::Identity& identity = handle->identity();
  nb::dict fields;
  fields["uri"] = device.uri;
  fields["transport"] = device.transport;
  fields["model"] = identity.model;
  fields["serial"] = identity.serial;
  fields["firmware"] = identity.firmware;
  fields["capacity"] = handle->capacity();
  fields["block_size"] = identity.block_size;
  fields["namespace"] = identity.namespace_id;
  fields["max_transfer"] = identity.max_transfer;
  fields["queues"] = handle->queues().size();
  fields["depth"] = handle->queues()[0]->depth();
  fields["batch_depth"] = handle->batch_pair().depth();
  fields["batch_memory"] = handle->batch_memory();
  fields["mode"] = handle->scheduler().mode();
  fields["volatile_write_cache"] = identity.volatile_write_cache;
  fields["shadow_doorbells"] = handle->shadow_doorbells();
  fields["completion"] = handle->completion();
  fields["retry"] = handle->retries();
  fields["state"] = engine::state_name(handle->state());
  const device::Medium medium = handle->device().medium();
  fields["medium"] = medium.kind;
  fields["io"] = medium.io;
  fields["why_buffered"] = medium.why_buffered;
  std::string access = medium.kind.empty() ? "" : "reading and writing";
  if (!medium.why_one_way.empty()) access = medium.why_one_way;
  if (medium.write_unit != 1) {
    access = "written in whole blocks of ";
    access.append(std::to_string(medium.write_unit)).append(": ").append(medium.why_whole);
  }
  fields["access"] = access;
  return fields;
}

/// The engine's buckets are of ticks; these are of nanoseconds, four to each doubling.
constexpr unsigned kNsBuckets = 160;

nb::list latency_histogram(const queue::Statistics& statistics) {
  std::uint64_t counts[kNsBuckets] = {};
  const double ns_per_tick = 1e9 / static_cast<double>(ticks_per_second());
  for (unsigned i = 0; i < queue::kLatencyBuckets; ++i) {
    const std::uint64_t count = statistics.latency[i].get();
    if (count == 0) continue;
    const double middle = (queue::latency_bucket_floor(i) + queue::latency_bucket_floor(i + 1)) / 2 * ns_per_tick;
    const double bucket = middle <= 1 ? 0 : std::floor(4 * std::log2(middle));
    counts[std::min(kNsBuckets - 1, static_cast<unsigned>(bucket))] += count;
  }
  nb::list list;
  for (const std::uint64_t count : counts) list.append(count);
  return list;
}

nb::list queue_stats(const PyDevice& device) {
  const Table::Use handle(Table::instance(), device.id);
  if (!handle) raise_stale(device, "stats");
  nb::list list;
  for (const auto& pair : handle->queues()) {
    const queue::Statistics& s = pair->statistics();
    nb::dict row;
    row["queue"] = pair->id();
    row["role"] = pair == handle->queues().back() && handle->queues().size() > 1 ? "batch" : "shared";
    row["mode"] = handle->scheduler().mode();
    row["depth"] = pair->depth();
    const queue::Wakeup* wakeup = pair->wakeup();
    row["completion"] = wakeup != nullptr && wakeup->armed() ? "interrupt" : "polling";
    row["wakeups"] = wakeup != nullptr ? wakeup->woken() : 0;
    row["requests"] = s.requests();
    row["read_bytes"] = s.bytes[0].get();
    row["write_bytes"] = s.bytes[1].get();
    row["commands"] = s.commands();
    row["doorbells"] = pair->doorbells();
    row["errors"] = s.errors.get();
    row["protocol_errors"] = s.protocol_errors.get();
    row["retries"] = s.retries.get();
    row["in_flight"] = pair->load();
    row["latency_ns_histogram"] = latency_histogram(s);
    list.append(row);
  }
  return list;
}

std::uint64_t staged_bytes(const PyDevice& device) {
  const Table::Use handle(Table::instance(), device.id);
  if (!handle) raise_stale(device, "stats");
  return handle->staged_bytes();
}

/// Of those read and written, what went through the page cache.
std::uint64_t buffered_bytes(const PyDevice& device) {
  const Table::Use handle(Table::instance(), device.id);
  if (!handle) raise_stale(device, "stats");
  return handle->device().medium().buffered_bytes;
}

/// Of those read and written past the page cache, what went through memory of the library's.
std::uint64_t bounced_bytes(const PyDevice& device) {
  const Table::Use handle(Table::instance(), device.id);
  if (!handle) raise_stale(device, "stats");
  return handle->device().medium().bounced_bytes;
}

std::uint64_t property(const PyDevice& device, const char* name, std::uint64_t (*get)(const engine::Identity&)) {
  const Table::Use handle(Table::instance(), device.id);
  if (!handle) raise_stale(device, name);
  return get(handle->identity());
}

}  // namespace

void define_device(nb::module_& m) {
  auto type =
      nb::class_<PyDevice>(
          m, "Device", nb::is_final(),
          "An open device. Made by `ugds.open`; a context manager. Thread-safe: any number of threads may use it.")
          .def_prop_ro(
              "uri", [](const PyDevice& d) { return d.uri; }, "What was opened.")
          .def_prop_ro(
              "transport", [](const PyDevice& d) { return d.transport; }, "How the controller is reached.")
          .def_prop_ro("state", &state,
                       "\"ready\", \"recovering\", \"wedged\" (the controller could not be stopped: buffers of its "
                       "commands stay\n"
                       "held), \"failed\", \"lost\" or \"closed\".")
          .def("check", &check,
               "Looks at the controller's status, and recovers where that asks for it, as a request that waits would; "
               "returns\n"
               "`state`. Moves no data: it finds a device that has gone, was reset or reports a fatal status, and not "
               "one "
               "that\n"
               "does not complete commands, for which there is a read. Thread-safe.")
          .def_prop_ro("closed", &is_closed, "Whether the device is closed.")
          .def_prop_ro(
              "capacity",
              [](const PyDevice& d) {
                const Table::Use handle(Table::instance(), d.id);
                if (!handle) raise_stale(d, "capacity");
                return handle->capacity();
              },
              "Bytes of the namespace.")
          .def_prop_ro(
              "block_size",
              [](const PyDevice& d) {
                return property(d, "block_size", [](const engine::Identity& i) { return std::uint64_t{i.block_size}; });
              },
              "Bytes of a block.")
          .def_prop_ro(
              "max_transfer",
              [](const PyDevice& d) {
                return property(d, "max_transfer", [](const engine::Identity& i) { return i.max_transfer; });
              },
              "Bytes of the largest command; larger requests are cut.")
          .def_prop_ro("info_fields", &info)
          .def("flush", &flush,
               "Makes every completed write durable. Raises as `read`; and EIO, once, where a reset of the controller "
               "may\n"
               "have lost writes that had completed: write again what was written since the last flush that succeeded "
               "(see\n"
               "docs/failures.md). Thread-safe.")
          .def("discard", &discard, nb::arg("offset"), nb::arg("size"),
               "Deallocates whole blocks: their content is given up. Raises as `read`, and EOPNOTSUPP. Thread-safe.")
          .def("queue_stats", &queue_stats)
          .def("recoveries", &recoveries)
          .def("staged_bytes", &staged_bytes)
          .def("buffered_bytes", &buffered_bytes)
          .def("bounced_bytes", &bounced_bytes)
          .def("batch", &open_batch, nb::arg("depth") = 128, nb::kw_only(), nb::arg("priority").none() = nb::none(),
               nb::sig("def batch(self, depth: int = 128, *, priority: str | None = None) -> Batch"),
               "A `Batch` of requests of which up to `depth` (1 to 1048576) are in flight, or ended and not collected, "
               "at once.\n"
               "priority: of all of them, \"normal\" or \"background\"; without it the device's mode says. Raises "
               "`ugds.Error`:\n"
               "EINVAL, EMFILE (more than 256 batches are open on the device), ENOMEM, EBADF. Thread-safe.")
          .def("close", &close, nb::arg("drain") = 5.0,
               "Waits for at most `drain` seconds for requests that run, then closes. Raises `ugds.Error` (EBUSY) if "
               "they do not\n"
               "end, or if the device is wedged and cannot be reset. What is overdue meanwhile is aborted. Where "
               "requests "
               "of\n"
               "batches have failed whose results nobody has collected, the device is closed, and the first of their "
               "errors is\n"
               "raised. Does nothing the second time.")
          .def("__enter__", [](nb::object self) { return self; })
          .def("__exit__", [](PyDevice& self, nb::args exception) { leave(self, exception); })
          .def("__reduce__",
               [](const PyDevice&) -> nb::object {
                 throw nb::type_error("a Device cannot be pickled or copied: open its URI in the other process");
               })
          .def("__repr__",
               [](const PyDevice& d) { return "<ugds.Device " + d.uri + (is_closed(d) ? " (closed)>" : ">"); });

  define_stream_methods(type);
  names = new Names<kArguments>(kNames, kPriority,
                                "buffer, offset, size, buffer_offset, priority, and for write durable, unaligned");
  add_methods(type, methods);
}

}  // namespace ugds::python
