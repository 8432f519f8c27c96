// SPDX-License-Identifier: Apache-2.0
//
// `ugds.serve`: an emulated device for other processes.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <tuple>
#include <vector>

#include "base/immortal.hpp"
#include "common.hpp"

namespace ugds::python {

namespace {

using serve::Event;
using serve::Server;

struct PyServer {
  std::shared_ptr<Server> server;
  std::string uri, path;
};

std::shared_ptr<Server> open_server(const PyServer& self) {
  if (self.server == nullptr) raise_new(EBADF, "serve", "the server is closed");
  return self.server;
}

struct Running {
  std::mutex lock;
  std::vector<std::weak_ptr<Server>> servers;
};
constinit Immortal<Running> running;

PyServer start(const std::string& uri, const std::string& path, unsigned mode) {
  if (mode > 0777) raise_new(EINVAL, "serve", "the mode is not within 0o777", "0o600 lets only this user in");
  PyServer made;
  made.server = without_lock([&] { return std::make_shared<Server>(uri, path, static_cast<mode_t>(mode)); });
  made.uri = made.server->uri();
  made.path = made.server->path();
  const std::lock_guard guard(running.value.lock);
  std::erase_if(running.value.servers, [](const std::weak_ptr<Server>& one) { return one.expired(); });
  running.value.servers.push_back(made.server);
  return made;
}

void close(PyServer& self) {
  std::shared_ptr<Server> last = std::move(self.server);
  self.server = nullptr;
  if (last == nullptr) return;
  without_lock([&] {
    last->stop();
    last.reset();
  });
}

const char* name_of(Event::Kind kind) {
  switch (kind) {
    case Event::Kind::connected: return "connected";
    case Event::Kind::disconnected: return "disconnected";
    case Event::Kind::refused: return "refused";
  }
  return "";
}

}  // namespace

void stop_servers() noexcept {
  std::vector<std::shared_ptr<Server>> left;
  {
    const std::lock_guard guard(running.value.lock);
    for (const std::weak_ptr<Server>& one : running.value.servers)
      if (std::shared_ptr<Server> server = one.lock()) left.push_back(std::move(server));
  }
  for (const std::shared_ptr<Server>& server : left) server->stop();
}

void define_serve(nb::module_& m) {
  nb::class_<PyServer>(m, "Server", nb::is_final(), "An emulated device that other processes drive (see `ugds.serve`).")
      .def("__reduce__",
           refuses_pickling<PyServer>("a Server cannot be pickled or copied: it serves a device of this process"))
      .def_ro("uri", &PyServer::uri)
      .def_ro("path", &PyServer::path, "Where clients find it.")
      .def_prop_ro("closed", [](const PyServer& self) { return self.server == nullptr; })
      .def_prop_ro(
          "clients", [](const PyServer& self) { return open_server(self)->clients(); },
          "Clients since the start, those that were refused not among them.")
      .def_prop_ro(
          "connected", [](const PyServer& self) { return open_server(self)->connected(); }, "Whether there is one now.")
      .def_prop_ro(
          "emulator", [](const PyServer& self) { return emulator_of(open_server(self)); },
          "The controller, as `ugds.testing.emulator` gives one: violations, counters, faults.")
      .def(
          "events",
          [](const PyServer& self) {
            std::vector<std::tuple<std::string, int, std::string>> out;
            for (const Event& event : open_server(self)->take_events())
              out.emplace_back(name_of(event.kind), event.process, event.reason);
            return out;
          },
          "What happened since the last call, as (event, process, reason): connected, disconnected or refused. "
          "process\n"
          "is the client's, or 0 where it cannot be seen from here.")
      .def(
          "fileno", [](const PyServer& self) { return open_server(self)->event_descriptor(); },
          "A descriptor that is readable while there are events, for `select`.")
      .def("close", &close, "Disconnects the client and removes the socket. Closing again does nothing.")
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def(
          "__exit__", [](PyServer& self, nb::handle, nb::handle, nb::handle) { close(self); }, nb::arg("type").none(),
          nb::arg("value").none(), nb::arg("traceback").none());
  m.def(
      "serve", &start, nb::arg("uri"), nb::arg("socket"), nb::kw_only(), nb::arg("mode") = 0600,
      "Serves an emulated device to other processes, by the vfio-user protocol, at the path `socket` (`cntrl` in it,\n"
      "where that is a folder), in a thread of this process and until the `Server` is closed. One client at a time;\n"
      "when one ends the controller is reset, and the data stays. `mode` is the socket's: who may connect. Raises\n"
      "`ugds.Error`: EADDRINUSE where another server is there, ENOENT for a missing folder, ENAMETOOLONG (107 bytes),\n"
      "and what opening the device raises.");
}

}  // namespace ugds::python
