// SPDX-License-Identifier: Apache-2.0
//
// The fake's state, under one lock, which is never held while something is waited for.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "fake_hip.hpp"

namespace fake {

inline constexpr int kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNoDevice = 100, kInvalidDevice = 101,
                     kInvalidHandle = 400, kNotFound = 500, kAlreadyRegistered = 712, kNotRegistered = 713,
                     kNotSupported = 801, kCaptureImplicit = 906, kUnknown = 999;
inline constexpr int kTypeUnregistered = 0, kTypeHost = 1, kTypeDevice = 2, kTypeManaged = 3;

struct Allocation {
  std::uintptr_t address = 0;
  std::size_t size = 0;
  int type = kTypeDevice;
  int device = 0;
  std::uint32_t id = 0;
  std::uint64_t agent = 0;
  bool is_signal = false;
  int descriptor = -1;  ///< of device memory, which begins `lead` bytes into it
  std::uint64_t lead = 0;
  unsigned char* inside = nullptr;  ///< where the fake itself reaches it
  std::size_t mapped = 0;           ///< bytes at `address` that nobody reaches
  Allocation() = default;
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  ~Allocation();
};

struct Stream {
  explicit Stream(int of) : device(of), thread([this] { run(); }) {}
  ~Stream();
  void run();
  void push(std::function<void()> work);
  void drain();

  const int device;
  int capture = 0;
  std::mutex lock;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  bool is_busy = false, is_ending = false;
  std::thread thread;
};

struct Failing {
  int calls = 0;
  int at = 0;
  int code = 0;
};

struct State {
  std::mutex lock;
  std::map<std::uintptr_t, std::shared_ptr<Allocation>> memory;
  std::map<std::uintptr_t, std::size_t> pins;
  std::map<void*, std::shared_ptr<Stream>> streams;
  std::map<int, std::shared_ptr<Stream>> null_streams;
  std::map<std::string, Failing> functions;
  std::uint32_t last_id = 0;
  int version = 60342134, devices = 2;
  bool can_wait = true;
  std::uint64_t lead = 0, exported_size = 0;
  int exported_number = 0;
  FakeMigration migration = FakeMigration::none;

  /// The allocation that holds [address, address + bytes). Under the lock.
  std::shared_ptr<Allocation> find(const void* address, std::size_t bytes = 1);
  /// The stream, or nullptr. Under the lock.
  std::shared_ptr<Stream> stream(void* handle);
};

State& state();
struct Caller {
  int device = 0, error = 0, capture_mode = 0;
  bool is_host_function = false;
};
Caller& caller();

/// Counts the call and gives what was asked to fail; also whatever a host function calls.
int admit(const char* function);
int note(int code);

template <class Body>
int call(const char* function, Body body) {
  int code = admit(function);
  if (code == kSuccess) code = body();
  return note(code);
}

std::shared_ptr<Allocation> allocate(std::size_t bytes, int device);
/// A descriptor of the whole memory, after which it may be elsewhere. Under the lock.
int export_memory(Allocation& allocation);

}  // namespace fake

#define FAKE_API extern "C" __attribute__((visibility("default")))
