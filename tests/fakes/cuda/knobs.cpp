// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <cmath>
#include <cstring>

#include "calls.hpp"
#include "capture.hpp"
#include "context.hpp"
#include "event.hpp"
#include "fake_cuda.h"
#include "kernels.hpp"
#include "memory.hpp"
#include "stream.hpp"

using namespace fake_cuda;

namespace {

struct Trait {
  const char* name;
  double (*get)();
  void (*set)(double value);
};

constexpr Trait traits[] = {
    {"gpus", [] { return double(settings().gpus); },
     [](double v) { settings().gpus = std::clamp(static_cast<int>(v), 0, most_gpus); }},
    {"connections", [] { return double(settings().connections); },
     [](double v) { settings().connections = std::clamp(static_cast<int>(v), 1, 32); }},
    {"stream_words", [] { return double(settings().stream_words); },
     [](double v) { settings().stream_words = v != 0; }},
    {"dmabuf", [] { return double(settings().dmabuf); }, [](double v) { settings().dmabuf = v != 0; }},
    {"dmabuf_pcie", [] { return double(settings().dmabuf_pcie); }, [](double v) { settings().dmabuf_pcie = v != 0; }},
    {"reuse_streams", [] { return double(settings().reuse_streams); },
     [](double v) { settings().reuse_streams = v != 0; }},
    {"dmabuf_descriptor", [] { return double(settings().dmabuf_descriptor); },
     [](double v) { settings().dmabuf_descriptor = static_cast<int>(v); }},
    {"copy_bytes_per_second", [] { return settings().copy_bytes_per_second.load(); },
     [](double v) { settings().copy_bytes_per_second = v; }},
    {"copy_microseconds", [] { return settings().copy_microseconds.load(); },
     [](double v) { settings().copy_microseconds = v; }},
    {"driver_version", [] { return double(settings().driver_version); },
     [](double v) { settings().driver_version = static_cast<int>(v); }},
};

const Trait* find_trait(const char* name) {
  for (const Trait& trait : traits) {
    if (std::strcmp(trait.name, name) == 0) return &trait;
  }
  return nullptr;
}

void look_again() {
  for (int gpu = 0; gpu < most_gpus; gpu++) gate(gpu).again();
}

std::size_t over_gpus(std::size_t (Gate::*count)() const) {
  std::size_t n = 0;
  for (int gpu = 0; gpu < most_gpus; gpu++) n += (gate(gpu).*count)();
  return n;
}

struct Living {
  const char* name;
  std::uint64_t (*count)();
};

constexpr Living living[] = {
    {"allocations", [] { return memory().count(Kind::device) + memory().count(Kind::managed); }},
    {"host_allocations", [] { return memory().count(Kind::host); }},
    {"pins", [] { return memory().count(Kind::registered); }},
    {"streams", [] { return std::uint64_t{table<Stream>().size()}; }},
    {"events", [] { return std::uint64_t{table<Event>().size()}; }},
    {"modules", [] { return std::uint64_t{table<Module>().size()}; }},
    {"graphs", [] { return std::uint64_t{table<Graph>().size()}; }},
    {"contexts", [] { return std::uint64_t{live_contexts()}; }},
    {"exports", [] { return exports.load(); }},
    {"waiting", [] { return std::uint64_t{over_gpus(&Gate::waiting)}; }},
    {"calling", [] { return std::uint64_t{over_gpus(&Gate::calling)}; }},
};

}  // namespace

FAKE_EXPORT int fake_cuda_set(const char* name, double value) {
  const Trait* trait = find_trait(name);
  if (trait == nullptr || std::isnan(value)) return -1;
  trait->set(value);
  look_again();
  return 0;
}

FAKE_EXPORT double fake_cuda_get(const char* name) {
  const Trait* trait = find_trait(name);
  return trait == nullptr ? -1 : trait->get();
}

FAKE_EXPORT int fake_cuda_fail(const char* name, uint64_t nth, int code) {
  Entry* function = Entry::find(name);
  if (function == nullptr) return -1;
  function->code = code;
  function->always.store(nth == 0, std::memory_order_release);
  function->fails_in.store(nth, std::memory_order_release);
  return 0;
}

FAKE_EXPORT uint64_t fake_cuda_calls(const char* name) {
  if (name != nullptr) {
    const Entry* function = Entry::find(name);
    return function == nullptr ? UINT64_MAX : function->calls.load();
  }
  std::uint64_t all = 0;
  for (const Entry* e = Entry::first(); e != nullptr; e = e->next) all += e->calls;
  return all;
}

FAKE_EXPORT uint64_t fake_cuda_live(const char* name) {
  for (const Living& kind : living) {
    if (std::strcmp(kind.name, name) == 0) return kind.count();
  }
  return UINT64_MAX;
}

FAKE_EXPORT uint64_t fake_cuda_misuse(void) { return misuse_count(); }

FAKE_EXPORT const char* fake_cuda_misuse_text(void) { return misuse_text(); }

FAKE_EXPORT int fake_cuda_peek(void* to, uint64_t device, size_t size) {
  if (size == 0) return 0;
  const std::byte* from = memory().reach(device, size);
  if (from == nullptr) return -1;
  std::memcpy(to, from, size);
  return 0;
}

FAKE_EXPORT int fake_cuda_poke(uint64_t device, const void* from, size_t size) {
  if (size == 0) return 0;
  std::byte* to = memory().reach(device, size);
  if (to == nullptr) return -1;
  std::memcpy(to, from, size);
  return 0;
}

FAKE_EXPORT void fake_cuda_release_waits(void) { release_waits(); }

FAKE_EXPORT const char* fake_cuda_path(void) {
  Dl_info found{};
  return ::dladdr(reinterpret_cast<void*>(&fake_cuda_path), &found) == 0 ? "" : found.dli_fname;
}

FAKE_EXPORT void fake_cuda_reset(void) {
  settings().defaults();
  for (Entry* e = const_cast<Entry*>(Entry::first()); e != nullptr; e = e->next) {
    e->always = false;
    e->fails_in = 0;
    e->calls = 0;
  }
  forget_misuse();
  exports = 0;
  look_again();
}
