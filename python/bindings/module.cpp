// SPDX-License-Identifier: Apache-2.0
//
// The extension module `ugds._core`. It links libugds.so, the file that C programs load.
#include <dlfcn.h>
#include <nanobind/stl/string.h>

#include "batch.hpp"
#include "common.hpp"
#include "progress.hpp"
#include "ugds.h"

namespace {

std::string version() {
  const int v = uGDSVersion();
  return std::to_string(v / 10000) + "." + std::to_string(v / 100 % 100) + "." + std::to_string(v % 100);
}

std::string library_path() {
  Dl_info info;
  return dladdr(reinterpret_cast<void*>(&uGDSVersion), &info) != 0 ? info.dli_fname : "";
}

/// Devices that are open when the interpreter ends are closed while everything they need is still there.
void close_all() {
  ugds::python::stop_servers();
  auto& table = ugds::engine::Table::instance();
  while (const auto id = table.nth(0)) table.abandon(id);
  ugds::python::stop_progress();
}

}  // namespace

NB_MODULE(_core, m) {
  using namespace ugds::python;
  nb::set_leak_warnings(false);
  m.doc() = "The native part of ugds; use the package `ugds`.";
  define_errors(m);
  define_log(m);
  define_registration(m);
  define_device(m);
  define_open(m);
  define_batch(m);
  define_streams(m);
  define_progress(m);
  define_modes(m);
  define_testing(m);
  define_serve(m);
  define_measure(m);
  define_trace(m);
  define_simulate(m);
  m.def("version", &version);
  m.def("library_path", &library_path);
  m.def("close_all", [] { ugds::python::without_lock([] { close_all(); }); });
  m.def("stop_logging", [] { ugds::python::stop_logging(); });
  // The last registered comes first: closing has events of its own.
  nb::module_::import_("atexit").attr("register")(m.attr("stop_logging"));
  nb::module_::import_("atexit").attr("register")(m.attr("close_all"));
}
