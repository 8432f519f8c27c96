// SPDX-License-Identifier: Apache-2.0
//
// `ugds.open`, and what its arguments may be.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "base/text.hpp"
#include "common.hpp"

namespace ugds::python {

namespace {

using engine::Table;

/// A URI, or a path as its own type says it.
std::string uri_argument(nb::handle place) {
  if (PyUnicode_Check(place.ptr())) return nb::cast<std::string>(place);
  const nb::object path = nb::steal(PyOS_FSPath(place.ptr()));
  if (!path.is_valid()) nb::raise_python_error();
  const auto text = nb::cast<std::string>(nb::module_::import_("os").attr("fsdecode")(path));
  const bool is_path = text.starts_with("/") || text.starts_with("./") || text.starts_with("../");
  return is_path ? text : std::string("./").append(text);
}

/// What `create=` and `direct=` say of a file, in its URI. Throws Failure(EINVAL) for what is no file.
std::string with_file_options(const std::string& place, bool create, const std::optional<std::string>& direct) {
  if (!create && !direct) return place;
  std::string uri = place;
  if (place.starts_with("/") || place.starts_with("./") || place.starts_with("../")) {
    uri = "file:";
    for (const char c : place) {
      const auto byte = static_cast<unsigned char>(c);
      const bool plain = std::isalnum(byte) != 0 || c == '/' || c == '.' || c == '-' || c == '_';
      char coded[4];
      std::snprintf(coded, sizeof coded, plain ? "%c" : "%%%02X", byte);
      uri.append(coded);
    }
  } else if (!place.starts_with("file:")) {
    raise_new(EINVAL, "open", place + " is no file, and create and direct are said of files",
              "leave them out, or name a file by its path");
  }
  char separator = uri.find('?') == std::string::npos ? '?' : '&';
  if (create) uri.append(1, separator).append("create=1");
  if (create) separator = '&';
  if (direct) uri.append(1, separator).append("direct=").append(*direct);
  return uri;
}

/// Nanoseconds; 0: left out.
std::uint64_t deadline_argument(nb::handle value) {
  if (value.is_none()) return 0;
  if (PyUnicode_Check(value.ptr())) {
    std::uint64_t ns = 0;
    try {
      ns = parse_duration_ns(nb::cast<std::string>(value), "deadline");
    } catch (Failure& failure) {
      failure.error().operation = "open";
      throw Failure(failure.error());
    }
    if (ns == 0) raise_new(EINVAL, "open", "a deadline of 0", "give a time, such as \"30s\"");
    return ns;
  }
  if (!PyFloat_Check(value.ptr()) && !PyIndex_Check(value.ptr()))
    throw nb::type_error("deadline must be a number of seconds, or text such as \"500ms\"");
  const double seconds = PyFloat_AsDouble(value.ptr());
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  const auto ns = seconds > 0 ? static_cast<std::uint64_t>(std::min(seconds, 1e9) * 1e9) : 0;
  if (ns == 0) raise_new(EINVAL, "open", "a deadline that is not positive", "give seconds");
  return ns;
}

std::optional<std::uint32_t> retry_argument(nb::handle value) {
  if (value.is_none()) return std::nullopt;
  if (!PyIndex_Check(value.ptr()) || PyBool_Check(value.ptr())) throw nb::type_error("retry must be a whole number");
  int beyond = 0;
  const long long retry = PyLong_AsLongLongAndOverflow(nb::steal(PyNumber_Index(value.ptr())).ptr(), &beyond);
  if (beyond != 0 || retry < 0 || retry > engine::kMostRetries)
    raise_new(EINVAL, "open", nb::cast<std::string>(nb::str(value)) + " retries", "use 0 to 16");
  return static_cast<std::uint32_t>(retry);
}

}  // namespace

void define_open(nb::module_& m) {
  m.def(
      "open",
      [](nb::handle place, std::optional<std::string> mode, std::uint32_t ns, std::uint32_t queues, std::uint32_t depth,
         nb::handle deadline, std::optional<bool> interrupts, nb::handle retry, bool create,
         std::optional<std::string> direct) {
        const std::string uri = with_file_options(uri_argument(place), create, direct);
        collect_retired();
        prepare_to_log();
        engine::Policy policy{.mode = mode.value_or(""), .namespace_id = ns, .queues = queues, .depth = depth};
        policy.deadline_ns = deadline_argument(deadline);
        policy.retry = retry_argument(retry);
        if (interrupts) policy.interrupts = *interrupts ? engine::Interrupts::yes : engine::Interrupts::no;
        auto device = std::make_unique<PyDevice>();
        device->uri = uri;
        device->id = without_lock([&] { return Table::instance().open(uri, policy); });
        const Table::Use handle(Table::instance(), device->id);
        device->uri = handle->uri();  // of a descriptor the path that it was opened by
        device->transport = device::transport_name(handle->device().transport());
        return device.release();  // Python's now
      },
      nb::arg("uri"), nb::arg("mode") = nb::none(), nb::kw_only(), nb::arg("namespace") = 0, nb::arg("queues") = 0,
      nb::arg("depth") = 0, nb::arg("deadline") = nb::none(), nb::arg("interrupts") = nb::none(),
      nb::arg("retry") = nb::none(), nb::arg("create") = false, nb::arg("direct") = nb::none(),
      "Opens a device by URI, such as \"pci:0000:65:00.0\" or \"emulated:1GiB\", and brings its controller up; or a "
      "file or\n"
      "block device, by a `pathlib.Path`, a path that begins with \"/\", \"./\" or \"../\", or \"file:PATH\" "
      "(docs/files.md).\n\n"
      "mode: what it is to be good at, one of `ugds.modes()`; left out: as the URI says (`?mode=`), else \"latency\", "
      "and of a\n"
      "file \"throughput\" (docs/modes.md). create: a file is made where it is missing. direct: of a file, \"auto\", "
      "\"on\" or\n"
      "\"off\": whether it is read and written past the page cache.\n"
      "namespace: its identifier, 0 for the first. queues, depth: I/O queue pairs and their entries, 0 for the "
      "library's\n"
      "choice; clamped to what the device grants. deadline: seconds (or text such as \"500ms\") after which a command "
      "is\n"
      "aborted, and the controller reset if that does not end it; left out: as the URI says (`?deadline=5s`), else 30 "
      "s.\n"
      "interrupts: whether a wait sleeps until the controller interrupts, instead of "
      "polling;\n"
      "left out: as the URI says (`?interrupts=1`), else the environment (UGDS_INTERRUPT_MODE=1), else no. "
      "`info.completion`\n"
      "says what became of it. retry: how often a read or write that a reset of the controller ended is submitted\n"
      "again, 0 to 16; left out: as the URI says (`?retry=2`), else never (docs/failures.md).\n\n"
      "Raises `ugds.Error`: EINVAL (URI, parameter), ENODEV, ENXIO (not bound to a driver for user space), EBUSY (in "
      "use),\n"
      "EACCES, EIO (the controller fails), EOPNOTSUPP (its format), "
      "ENOMEM,\n"
      "EMFILE. Thread-safe.");
}

}  // namespace ugds::python
