// SPDX-License-Identifier: Apache-2.0
//
// Modes that are written in Python (ugds/mode.py). The engine asks them at opening, and then now and then in the thread
// of some waiter, which does not have the interpreter lock.
#include "engine/mode.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cmath>
#include <limits>
#include <memory>

#include "common.hpp"

namespace ugds::python {

namespace {

using engine::Observed;
using engine::Settings;

/// An object that is let go of under the lock, or never, where the interpreter is gone.
using Kept = std::shared_ptr<nb::object>;
Kept keep(nb::object object) {
  return {new nb::object(std::move(object)), [](nb::object* kept) {  // NOLINT: the deleter's
            if (is_ending()) return;
            const Locked lock;
            delete kept;
          }};
}

[[noreturn]] void refuse(const char* name, const std::string& values) {
  throw nb::value_error((std::string("Settings.") + name + " must be " + values).c_str());
}

std::uint32_t whole(nb::handle from, const char* name, std::uint32_t least) {
  const nb::object value = from.attr(name);
  std::uint32_t number = 0;
  if (PyBool_Check(value.ptr()) || !nb::try_cast(value, number) || number < least)
    refuse(name, "an int from " + std::to_string(least) + " to 2^32 - 1");
  return number;
}

double real(nb::handle from, const char* name, double most) {
  const double value = PyFloat_AsDouble(nb::object(from.attr(name)).ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (!(value >= 0 && value <= most)) refuse(name, "a number from 0 to " + std::to_string(most));
  return value;
}

bool truth(nb::handle from, const char* name) {
  const int value = PyObject_IsTrue(nb::object(from.attr(name)).ptr());
  if (value < 0) throw nb::python_error();
  return value != 0;
}

Settings settings_of(nb::handle from) {
  Settings settings;
  const nb::object waiting = from.attr("waiting");
  if (nb::len(waiting) != engine::kSizeClasses) refuse("waiting", "a Way for each of the 5 classes of sizes");
  for (unsigned i = 0; i < engine::kSizeClasses; ++i) {
    const nb::object way = waiting[i];
    settings.waiting[i] = {.sleeps = truth(way, "sleeps"), .explore = whole(way, "explore", 0)};
  }
  const nb::object pacing = from.attr("pacing");
  const auto in_256ths = [&](const char* name) {
    return static_cast<std::uint32_t>(std::lround(real(pacing, name, 1e6) * 256));
  };
  settings.pacing.latency_low = in_256ths("latency_low");
  settings.pacing.latency_high = in_256ths("latency_high");
  settings.pacing.background_share = in_256ths("background_share");
  settings.pacing.memory_ns = static_cast<std::uint64_t>(real(pacing, "memory", 1e6) * 1e9);
  settings.window = whole(from, "window", 1);
  settings.refill = whole(from, "refill", 1);
  settings.background_writes = truth(from, "background_writes");
  return settings;
}

nb::object observed_of(const Observed& observed) {
  const nb::module_ types = nb::module_::import_("ugds.mode");
  nb::list waiting;
  for (const engine::Waiting::Seen& seen : observed.waiting) {
    waiting.append(types.attr("Seen")(seen.requests, seen.polled, seen.slept, seen.polled_samples, seen.slept_samples));
  }
  return types.attr("Observed")(nb::tuple(waiting), observed.commands_in_flight, observed.large_in_flight,
                                observed.large_limit, observed.small_requests, observed.interrupts);
}

class ForeignMode final : public engine::Mode {
 public:
  explicit ForeignMode(Kept mode) : mode_(std::move(mode)) {
    if (!nb::hasattr(*mode_, "begin"))
      throw nb::type_error("a mode has a method begin() that returns Settings (see ugds.mode)");
    adjusts_ = nb::hasattr(*mode_, "adjust");
  }

  void plan(engine::Policy& policy) const override {
    const Locked lock;
    if (!nb::hasattr(*mode_, "plan")) return;
    const nb::object plan = mode_->attr("plan")();
    if (plan.is_none()) return;
    const nb::object interrupts = plan.attr("interrupts");
    if (policy.depth == 0 && !nb::object(plan.attr("depth")).is_none()) policy.depth = whole(plan, "depth", 2);
    if (policy.interrupts == engine::Interrupts::unsaid && !interrupts.is_none())
      policy.interrupts = truth(plan, "interrupts") ? engine::Interrupts::yes : engine::Interrupts::no;
  }

  Settings begin() const override {
    const Locked lock;
    return settings_of(mode_->attr("begin")());
  }

  bool adjust(const Observed& observed, Settings& settings) override {
    if (!adjusts_ || is_ending()) return false;
    const Locked lock;
    // The waiter's own exception, such as one that a signal handler left, is none of the mode's business.
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    const bool changed = ask(observed, settings);
    PyErr_Restore(type, value, trace);
    return changed;
  }

 private:
  bool ask(const Observed& observed, Settings& settings) noexcept {
    try {
      const nb::object wanted = mode_->attr("adjust")(observed_of(observed));
      if (wanted.is_none()) return false;
      settings = settings_of(wanted);
      return true;
    } catch (nb::python_error& error) {
      error.restore();
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    }
    PyErr_WriteUnraisable(mode_->ptr());
    return false;
  }

  const Kept mode_;
  bool adjusts_ = false;
};

}  // namespace

void define_modes(nb::module_& m) {
  m.def("modes", &engine::mode_names,
        "Names of the modes that `open` takes: the library's own, and those of `register_mode`. Thread-safe.");
  m.def(
      "register_mode",
      [](const std::string& name, nb::object factory) {
        if (PyCallable_Check(factory.ptr()) == 0) throw nb::type_error("the factory of a mode must be callable");
        if (name.empty()) raise_new(EINVAL, "register mode", "a mode without a name", "give it one");
        engine::register_mode(name, [made = keep(std::move(factory))]() -> std::unique_ptr<engine::Mode> {
          const Locked lock;
          return std::make_unique<ForeignMode>(keep((*made)()));
        });
      },
      nb::arg("name"), nb::arg("factory").none(),
      "Makes a mode of your own known by a name, in place of an earlier one of that name; devices that are open keep "
      "theirs.\n\n"
      "factory: called without arguments for each device that is opened with the mode; returns the mode (see "
      "`ugds.mode`).\n"
      "What it raises, or the mode's begin() or plan(), is raised by `open`. Raises `ugds.Error`: EEXIST for the name "
      "of one of\n"
      "the library's own, EINVAL. Thread-safe.");
}

}  // namespace ugds::python
