// SPDX-License-Identifier: Apache-2.0
//
// The native half of `await ssd.aread(…)`; `ugds._aio` has the other.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <mutex>
#include <vector>

#include "arguments.hpp"
#include "columns.hpp"
#include "progress.hpp"

namespace ugds::python {

namespace {

using nvme::Opcode;

std::mutex all_lock;
std::vector<std::weak_ptr<Progress>>& all() {
  static auto* list = new std::vector<std::weak_ptr<Progress>>;  // NOLINT: outlives the interpreter's own teardown
  return *list;
}

[[noreturn]] void raise_stale(const PyDevice& device) {
  engine::Table::instance().explain_stale(device.id, "await");
  set_device(last_error(), device.uri.c_str());
  raise_last();
}

/// The device's own, made by the first who asks.
std::shared_ptr<Progress> progress_of(PyDevice& device) {
  {
    const engine::Table::Use handle(engine::Table::instance(), device.id);
    if (!handle) raise_stale(device);  // of a fork's parent, for one: its locks are not for us
  }
  return without_lock([&] {
    std::lock_guard guard(device.progress_lock);
    if (!device.progress) {
      device.progress = std::make_shared<Progress>(device.id);
      std::lock_guard all_guard(all_lock);
      std::erase_if(all(), [](const auto& one) { return one.expired(); });
      all().push_back(device.progress);
    }
    return device.progress;
  });
}

std::uint64_t submit(PyDevice& device, std::shared_ptr<Channel> channel, const std::string& operation,
                     nb::handle buffer, nb::handle offset, nb::handle size, nb::handle buffer_offset, bool durable) {
  const bool is_write = operation == "write";
  const char* name = is_write ? "write" : "read";
  if (anything_retired()) collect_retired();
  const View view = buffer_argument(buffer.ptr(), name);
  const std::uint64_t at = size_argument(buffer_offset, "buffer_offset", name);
  if (at > view.size) raise_new(EINVAL, name, "buffer_offset lies beyond the buffer", "give a smaller one");
  const std::uint64_t bytes = size.is_none() ? view.size - at : size_argument(size, "size", name);
  if (bytes > view.size - at) {
    raise_new(EINVAL, name, "the range reaches beyond the buffer that was given", "give a smaller size");
  }
  Wish wish{.channel = std::move(channel), .buffer = view.buffer};
  wish.wanted.offset = size_argument(offset, "offset", name);
  wish.wanted.size = bytes;
  wish.wanted.buffer_offset = view.offset + at;
  wish.wanted.write = is_write ? 1 : 0;
  wish.wanted.durable = durable;
  return progress_of(device)->submit(std::move(wish));
}

std::uint64_t flush(PyDevice& device, std::shared_ptr<Channel> channel) {
  return progress_of(device)->submit({.channel = std::move(channel), .is_flush = true});
}

bool forget(PyDevice& device, std::uint64_t token) {
  const engine::Table::Use handle(engine::Table::instance(), device.id);
  return handle && device.progress && device.progress->forget(token);
}

/// What was told: tokens, with bytes or an error each.
nb::list take(Channel& channel) {
  nb::list list;
  for (const Channel::Told& told : channel.take()) {
    list.append(nb::make_tuple(told.token, told.result,
                               told.failed ? error_object(told.failed->error) : nb::object(nb::none())));
  }
  return list;
}

}  // namespace

void PyDevice::drain_progress(std::uint64_t limit_ns) {
  std::shared_ptr<Progress> mine;
  if (fork_generation() == opened_in) {
    std::lock_guard guard(progress_lock);
    mine = progress;
  }
  if (mine) mine->drain(limit_ns);
}

void PyDevice::end_progress(bool stays) {
  if (fork_generation() != opened_in) {
    if (progress) static_cast<void>(new std::shared_ptr<Progress>(std::move(progress)));  // NOLINT: no thread is here
    return;
  }
  std::shared_ptr<Progress> mine;
  {
    std::lock_guard guard(progress_lock);
    mine = stays ? progress : std::move(progress);
  }
  if (mine && stays) mine->resume();
  if (mine && !stays) mine->stop();
}

void stop_progress() noexcept {
  std::vector<std::shared_ptr<Progress>> left;
  {
    std::lock_guard guard(all_lock);
    for (const auto& one : all()) {
      if (auto progress = one.lock()) left.push_back(std::move(progress));
    }
  }
  for (const auto& progress : left) {
    if (!progress->is_forked()) {
      progress->stop();
    } else {
      static_cast<void>(new std::shared_ptr<Progress>(progress));  // NOLINT: its thread is not here
    }
  }
}

void define_progress(nb::module_& m) {
  nb::class_<Channel>(m, "Channel", nb::is_final())
      .def(nb::init<>())
      .def("__reduce__", refuses_pickling<Channel>("a Channel cannot be pickled or copied: it is an event loop's"))
      .def("fileno", &Channel::descriptor)
      .def("take", &take);
  m.def("await_transfer", &submit, nb::arg("device"), nb::arg("channel"), nb::arg("operation"), nb::arg("buffer"),
        nb::arg("offset"), nb::arg("size").none(), nb::arg("buffer_offset"), nb::arg("durable"));
  m.def("await_flush", &flush);
  m.def("await_forget", &forget);
}

}  // namespace ugds::python
