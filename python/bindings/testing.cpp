// SPDX-License-Identifier: Apache-2.0
//
// The emulated controller behind a device, and set-up steps, for `ugds.testing`.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/steps.hpp"
#include "base/text.hpp"
#include "common.hpp"
#include "device/emulated.hpp"
#include "engine/abort_limit.hpp"

namespace ugds::python {

namespace {

using emulator::Controller;
using emulator::Fault;
using engine::Table;

/// Of a device that is open here, or of one that is served.
struct PyEmulator {
  engine::HandleId id = 0;
  std::weak_ptr<serve::Server> server;
  bool served = false;
};

/// Runs `body` on the controller, without the interpreter lock.
template <class Body>
auto on(const PyEmulator& self, Body&& body) {
  return without_lock([&] {
    if (self.served) {
      const std::shared_ptr<serve::Server> server = self.server.lock();
      if (server == nullptr) fail(EBADF, "emulator", "the server is closed");
      return body(server->controller());
    }
    const Table::Use handle(Table::instance(), self.id);
    if (!handle) {
      Table::instance().explain_stale(self.id, "emulator");
      throw Failure(last_error());
    }
    return body(dynamic_cast<device::EmulatedDevice&>(handle->device()).controller());
  });
}

constexpr std::pair<const char*, Fault::Kind> kKinds[] = {
    {"status", Fault::Kind::status},
    {"hang", Fault::Kind::hang},
    {"late", Fault::Kind::late},
    {"late_write", Fault::Kind::late_write},
    {"duplicate", Fault::Kind::duplicate},
    {"unknown_id", Fault::Kind::unknown_id},
    {"corrupt", Fault::Kind::corrupt},
    {"ignored", Fault::Kind::ignored},
    {"wrong_sq_head", Fault::Kind::wrong_sq_head},
    {"never_ready", Fault::Kind::never_ready},
    {"never_stopped", Fault::Kind::never_stopped},
    {"fatal", Fault::Kind::fatal},
    {"remove", Fault::Kind::remove},
    {"lost_interrupt", Fault::Kind::lost_interrupt},
    {"reset_fails", Fault::Kind::reset_fails},
    {"lost", Fault::Kind::lost},
    {"wrong_phase", Fault::Kind::wrong_phase},
    {"torn", Fault::Kind::torn},
    {"result", Fault::Kind::result},
    {"identify", Fault::Kind::identify},
    {"abort_lies", Fault::Kind::abort_lies},
    {"abort_denies", Fault::Kind::abort_denies},
    {"double_interrupt", Fault::Kind::double_interrupt},
    {"spurious_interrupt", Fault::Kind::spurious_interrupt},
    {"all_ones", Fault::Kind::all_ones},
    {"reads_as", Fault::Kind::reads_as},
};

Fault::Kind kind_of(const std::string& name) {
  std::vector<std::string> all;
  for (const auto& [known, kind] : kKinds) {
    if (name == known) return kind;
    all.emplace_back(known);
  }
  const std::string near = nearest(name, all);
  raise_new(
      EINVAL, "inject", "there is no fault \"" + name + "\"",
      (near.empty() ? "" : "did you mean \"" + near + "\"? ") + std::string("ugds.testing.FAULTS has all of them"));
}

Fault fault_of(const std::string& kind, int opcode, bool admin, std::uint64_t skip, std::uint64_t count,
               std::uint16_t status, std::uint64_t delay_ns, std::uint64_t lba, std::optional<std::uint64_t> blocks,
               bool abortable, std::uint64_t value, std::optional<std::uint32_t> at, std::uint32_t width, int cns) {
  Fault fault;
  fault.kind = kind_of(kind);
  fault.opcode = opcode;
  fault.admin = admin;
  fault.skip = skip;
  fault.count = count;
  fault.status = status;
  fault.delay_ns = delay_ns;
  fault.lba = lba;
  if (blocks) fault.blocks = *blocks;
  fault.abortable = abortable;
  fault.value = value;
  if (at) fault.at = *at;
  fault.width = width;
  fault.cns = cns;
  return fault;
}

nb::dict counters(const PyEmulator& self) {
  const emulator::Counters c = on(self, [](Controller& x) { return x.counters(); });
  nb::dict d;
  d["commands"] = c.commands;
  d["reads"] = c.reads;
  d["writes"] = c.writes;
  d["flushes"] = c.flushes;
  d["bytes_read"] = c.bytes_read;
  d["bytes_written"] = c.bytes_written;
  d["doorbells"] = c.doorbells;
  d["wakeups"] = c.wakeups;
  d["turns"] = c.turns;
  d["mapped_bytes"] = c.mapped_bytes;
  d["mapped_ranges"] = c.mapped_ranges;
  d["resets"] = c.resets;
  d["aborts"] = c.aborts;
  d["interrupts"] = c.interrupts;
  return d;
}

}  // namespace

nb::object emulator_of(const std::shared_ptr<serve::Server>& server) { return nb::cast(PyEmulator{0, server, true}); }

void define_testing(nb::module_& m) {
  nb::class_<PyEmulator>(m, "Emulator", nb::is_final(), "The emulated controller behind a device (see `ugds.testing`).")
      .def("__reduce__",
           refuses_pickling<PyEmulator>("an Emulator cannot be pickled or copied: its controller is in this process"))
      .def(
          "violations",
          [](const PyEmulator& self) {
            std::vector<std::pair<std::string, std::string>> out;
            for (auto& v : on(self, [](Controller& c) { return c.violations(); })) out.emplace_back(v.rule, v.what);
            return out;
          },
          "What the driver did that no driver may, as (rule, what happened) pairs.")
      .def(
          "clear_violations", [](const PyEmulator& self) { on(self, [](Controller& c) { c.clear_violations(); }); },
          "Forgets the violations so far.")
      .def("counters", &counters, "What only the device can know, by name: commands, doorbells, mapped_bytes, ...")
      .def(
          "inject",
          [](const PyEmulator& self, const std::string& kind, int opcode, bool admin, std::uint64_t skip,
             std::uint64_t count, std::uint16_t status, std::uint64_t delay_ns, std::uint64_t lba,
             std::optional<std::uint64_t> blocks, bool abortable, std::uint64_t value, std::optional<std::uint32_t> at,
             std::uint32_t width, int cns) {
            const Fault fault = fault_of(kind, opcode, admin, skip, count, status, delay_ns, lba, blocks, abortable,
                                         value, at, width, cns);
            on(self, [&](Controller& c) { c.inject(fault); });
          },
          nb::arg("kind"), nb::kw_only(), nb::arg("opcode") = -1, nb::arg("admin") = false, nb::arg("skip") = 0,
          nb::arg("count") = 1, nb::arg("status") = 0, nb::arg("delay_ns") = 0, nb::arg("lba") = 0,
          nb::arg("blocks") = nb::none(), nb::arg("abortable") = true, nb::arg("value") = 0, nb::arg("at") = nb::none(),
          nb::arg("width") = 1, nb::arg("cns") = -1,
          "Plays the fault `kind` (`ugds.testing.FAULTS`) on the next `count` commands that match, after `skip` that "
          "match\n"
          "have passed. opcode: -1 is any, 1 write, 2 read. lba, blocks: commands that touch these blocks. abortable: "
          "whether\n"
          "an Abort ends a hang. value, at, width, cns: of the kinds that name them. Raises `ugds.Error` (EINVAL) for "
          "an unknown kind.")
      .def(
          "clear_faults", [](const PyEmulator& self) { on(self, [](Controller& c) { c.clear_faults(); }); },
          "Takes planted faults back that have not been played.")
      .def(
          "remove", [](const PyEmulator& self) { on(self, [](Controller& c) { c.remove(); }); },
          "Takes the device from the bus: its registers read as all ones, and every waiter is told.")
      .def(
          "plug", [](const PyEmulator& self) { on(self, [](Controller& c) { c.plug(); }); },
          "Brings it back, in its initial state. A handle that lost it must be opened again.")
      .def(
          "power_cut",
          [](const PyEmulator& self, double survive, std::uint64_t seed) {
            on(self, [&](Controller& c) { c.power_cut(survive, seed); });
          },
          nb::arg("survive") = 0.0, nb::arg("seed") = 1,
          "Takes the power away: the controller is reset, and of what was written and not made durable each block "
          "survives\n"
          "with probability `survive`. The next request finds the controller reset and raises ECANCELED; after that "
          "the\n"
          "handle works again.")
      .def(
          "peek",
          [](const PyEmulator& self, std::uint64_t offset, std::uint64_t size, std::uint32_t ns) {
            nb::bytes out = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
            if (!out.is_valid()) throw nb::python_error();
            on(self, [&](Controller& c) { c.peek(ns, offset, const_cast<char*>(out.c_str()), size); });
            return out;
          },
          nb::arg("offset"), nb::arg("size"), nb::arg("namespace") = 1,
          "Stored bytes, behind the protocol's back. Raises `ugds.Error` (ERANGE).")
      .def(
          "poke",
          [](const PyEmulator& self, std::uint64_t offset, nb::bytes data, std::uint32_t ns) {
            on(self, [&](Controller& c) { c.poke(ns, offset, data.c_str(), data.size()); });
          },
          nb::arg("offset"), nb::arg("data"), nb::arg("namespace") = 1,
          "Changes stored bytes, behind the protocol's back. Raises `ugds.Error` (ERANGE).")
      .def(
          "stored_bytes",
          [](const PyEmulator& self) { return on(self, [](Controller& c) { return c.stored_bytes(); }); },
          "Bytes of memory or file that the data takes up.")
      .def(
          "virtual_now_ns",
          [](const PyEmulator& self) { return on(self, [](Controller& c) { return c.virtual_now_ns(); }); },
          "With `clock=virtual`: the device's time, in nanoseconds.")
      .def(
          "advance_ns",
          [](const PyEmulator& self, std::uint64_t ns) { on(self, [&](Controller& c) { c.advance_ns(ns); }); },
          nb::arg("ns"), "With `clock=virtual`: moves the device's time on.");

  m.def(
      "emulator",
      [](const PyDevice& device) {
        const Table::Use handle(Table::instance(), device.id);
        if (!handle) {
          Table::instance().explain_stale(device.id, "emulator");
          raise_last();
        }
        if (dynamic_cast<device::EmulatedDevice*>(&handle->device()) == nullptr) {
          raise_new(EOPNOTSUPP, "emulator", device.uri + " is not an emulated device", "open emulated:SIZE");
        }
        return PyEmulator{device.id, {}, false};
      },
      nb::arg("device"));
  m.def("forget_subsystem", &emulator::forget_subsystem, nb::arg("name"));
  m.def("emulator_parameters", [] {
    std::vector<std::tuple<std::string, std::string, std::string>> out;
    for (const emulator::Parameter& p : emulator::parameters()) out.emplace_back(p.name, p.values, p.meaning);
    return out;
  });
  m.def(
      "inject_at_open",
      [](const std::string& kind, int opcode, bool admin, std::uint64_t skip, std::uint64_t count, std::uint16_t status,
         std::uint64_t delay_ns, std::uint64_t lba, std::optional<std::uint64_t> blocks, bool abortable,
         std::uint64_t value, std::optional<std::uint32_t> at, std::uint32_t width, int cns) {
        emulator::inject_at_open(fault_of(kind, opcode, admin, skip, count, status, delay_ns, lba, blocks, abortable,
                                          value, at, width, cns));
      },
      nb::arg("kind"), nb::kw_only(), nb::arg("opcode") = -1, nb::arg("admin") = false, nb::arg("skip") = 0,
      nb::arg("count") = 1, nb::arg("status") = 0, nb::arg("delay_ns") = 0, nb::arg("lba") = 0,
      nb::arg("blocks") = nb::none(), nb::arg("abortable") = true, nb::arg("value") = 0, nb::arg("at") = nb::none(),
      nb::arg("width") = 1, nb::arg("cns") = -1);
  m.def("clear_faults_at_open", &emulator::clear_faults_at_open);
  m.def(
      "set_abort_limit", [](double seconds) { engine::set_abort_limit(static_cast<std::uint64_t>(seconds * 1e9)); },
      nb::arg("seconds"));
  m.def("arm_step", &testing::arm_step, nb::arg("nth"));
  m.def("disarm_steps", &testing::disarm_steps);
  m.def("record_steps", &testing::record_steps);
  m.def("recorded_steps", &testing::recorded_steps);
  m.def("open_registrations", [] { return memory::Registry::instance().open_registrations(); });
}

}  // namespace ugds::python
