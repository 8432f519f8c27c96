// SPDX-License-Identifier: Apache-2.0
//
// `core/simulation` for benchmarks and tests: actors as dictionaries, latencies as bytes of native 64-bit integers.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <vector>

#include "common.hpp"
#include "engine/mode.hpp"
#include "simulation/simulation.hpp"

namespace ugds::python {

namespace {

using simulation::Actor;
using simulation::Outcome;

engine::Priority priority_of(const std::string& name) {
  if (name == "normal") return engine::Priority::normal;
  if (name == "background") return engine::Priority::background;
  if (name.empty()) return engine::Priority::unsaid;
  raise_new(EINVAL, "simulate", "there is no priority \"" + name + "\"", "use normal, background, or none");
}

nvme::Opcode opcode_of(const std::string& name) {
  if (name == "read") return nvme::Opcode::read;
  if (name == "write") return nvme::Opcode::write;
  raise_new(EINVAL, "simulate", "there is no operation \"" + name + "\"", "use read or write");
}

Actor actor_of(nb::handle item) {
  Actor actor;
  for (auto [key, value] : nb::cast<nb::dict>(item)) {
    const auto name = nb::cast<std::string>(key);
    if (name == "operation") {
      actor.opcode = opcode_of(nb::cast<std::string>(value));
    } else if (name == "size") {
      actor.size = size_argument(value, "size", "simulate");
    } else if (name == "depth") {
      actor.depth = nb::cast<std::uint32_t>(value);
    } else if (name == "priority") {
      actor.priority = priority_of(nb::cast<std::string>(value));
    } else if (name == "pause_ns") {
      actor.pause_ns = nb::cast<std::uint64_t>(value);
    } else if (name == "holds_queue") {
      actor.holds_queue = nb::cast<bool>(value);
    } else {
      raise_new(EINVAL, "simulate", "an actor has no \"" + name + "\"",
                "use operation, size, depth, priority, pause_ns and holds_queue");
    }
  }
  return actor;
}

nb::list run(const PyDevice& device, const PyRegistration& buffer, nb::list list, std::uint64_t duration_ns,
             std::uint64_t warm_up_ns, std::uint64_t seed) {
  std::vector<Actor> actors;
  for (nb::handle item : list) actors.push_back(actor_of(item));
  const engine::Table::Use handle(engine::Table::instance(), device.id);
  if (!handle) {
    engine::Table::instance().explain_stale(device.id, "simulate");
    raise_last();
  }
  const std::vector<Outcome> outcomes = without_lock([&] {
    return simulation::run(*handle, buffer.reference, actors, {warm_up_ns, duration_ns, seed});
  });
  nb::list made;
  for (const Outcome& outcome : outcomes) {
    nb::dict one;
    one["requests"] = outcome.latencies.size();
    one["bytes"] = outcome.bytes;
    one["latencies_ns"] =
        nb::bytes(outcome.latencies.data(), outcome.latencies.size() * sizeof(outcome.latencies.front()));
    made.append(one);
  }
  return made;
}

}  // namespace

void define_simulate(nb::module_& m) {
  m.def("simulate", &run, nb::arg("device"), nb::arg("buffer"), nb::arg("actors"), nb::kw_only(),
        nb::arg("duration_ns"), nb::arg("warm_up_ns") = 0, nb::arg("seed") = 1,
        "Runs actors, each a closed loop of requests, in this thread and in the device's virtual time "
        "(pump=caller&clock=virtual).\n"
        "For benchmarks and tests; see ugds.bench.simulation. Raises `ugds.Error`. The device must be nobody else's.");
  m.def("register_control_mode", &simulation::register_control_mode,
        "Makes the mode \"unpaced\" known, in which nothing bounds what large requests have in flight.");
}

}  // namespace ugds::python
