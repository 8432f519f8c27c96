// SPDX-License-Identifier: Apache-2.0
//
// What happens at the door of every driver function: it is counted, may be told to fail, is refused inside a host
// function, before cuInit and after fork, and finds the thread's current context.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>

#include "cuda_driver.h"

#define FAKE_EXPORT extern "C" __attribute__((visibility("default")))

namespace fake_cuda {

/// One T for the process, never destroyed: stream threads outlive static objects when the process exits.
template <class T>
T& immortal() {
  alignas(T) static std::byte room[sizeof(T)];
  static T* const the = ::new (room) T;
  return *the;
}

/// One driver function: how often it was called, and which call of it fails.
struct Entry {
  explicit Entry(const char* called);
  const char* name;
  std::atomic<std::uint64_t> calls{0};
  std::atomic<std::uint64_t> fails_in{0};  ///< the call that fails, from now; 0: none
  std::atomic<int> code{0};
  std::atomic<bool> always{false};
  Entry* next;

  /// The code of a fault that is due, or 0.
  int fault();
  static Entry* find(const char* name);
  static Entry* first();
};

template <std::size_t N>
struct Name {
  constexpr Name(const char (&from)[N]) { std::copy_n(from, N, text.begin()); }  // NOLINT: it is meant to convert
  std::array<char, N> text{};
};

template <Name name>
inline Entry entry{name.text.data()};

/// Traits that tests set. Plain words: any thread may read them at any time.
struct Settings {
  std::atomic<int> gpus, connections, driver_version;
  std::atomic<bool> stream_words, dmabuf, dmabuf_pcie, reuse_streams;
  std::atomic<int> dmabuf_descriptor;
  std::atomic<double> copy_bytes_per_second, copy_microseconds;
  Settings() { defaults(); }
  void defaults();
};
Settings& settings();

/// Notes what would corrupt or deadlock in silence, and gives the code back.
CUresult misuse(CUresult code, const std::string& what);
std::uint64_t misuse_count();
const char* misuse_text();
void forget_misuse();

/// Whether this thread runs a host function: then no driver function may be called.
extern thread_local bool in_host_function;

extern std::atomic<int> initialized_by;  ///< the process that called cuInit

/// What every function checks first.
CUresult admit(Entry& function, bool needs_init);

/// A function that needs no current context.
template <Name name, class Body>
CUresult plain(Body&& body) {
  const CUresult refused = admit(entry<name>, true);
  return refused != CUDA_SUCCESS ? refused : body();
}

}  // namespace fake_cuda
