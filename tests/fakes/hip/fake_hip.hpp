// SPDX-License-Identifier: Apache-2.0
//
// What a test asks of the fake HIP runtime besides HIP's functions: libfake_hip.so gives it by `fake_hip()`.
#pragma once

#include <cstddef>
#include <cstdint>

/// What becomes of memory that is exported.
enum class FakeMigration { none, to_host, to_managed, to_other_agent, to_other_device };

class FakeHip {
 public:
  /// Forgets all that was set below. Memory and streams stay.
  virtual void reset() = 0;
  /// The nth call of `function` from now on, 1 for the next, gives `code` and does nothing.
  virtual void fail(const char* function, int nth, int code) = 0;
  /// How often `function` was called since `reset`.
  virtual int calls(const char* function) = 0;

  virtual void set_version(int version) = 0;
  virtual void set_devices(int count) = 0;
  virtual void set_can_wait(bool can_wait) = 0;
  /// Later allocations begin so many bytes into what HSA allocated, and so into their DMA-BUF.
  virtual void set_lead(std::uint64_t bytes) = 0;
  virtual void set_migration(FakeMigration migration) = 0;
  /// Descriptors are of so many bytes instead of the memory's; 0 for the memory's.
  virtual void set_exported_size(std::uint64_t bytes) = 0;
  /// Exports report success and give -1, or a number that is not open.
  virtual void set_exported_number(int number) = 0;
  /// What hipStreamIsCapturing says of a stream.
  virtual void set_capture(void* stream, int status) = 0;

  virtual void* allocate(std::size_t bytes, int device) = 0;
  virtual void* allocate_managed(std::size_t bytes) = 0;
  virtual void free(void* address) = 0;
  /// What is in device memory, without any stream.
  virtual void read(std::uint64_t address, void* to, std::size_t bytes) = 0;
  virtual void write(std::uint64_t address, const void* from, std::size_t bytes) = 0;

  virtual int live_allocations() = 0;
  virtual int live_streams() = 0;
  virtual int live_pins() = 0;
  virtual int current_device() = 0;
  virtual int capture_mode() = 0;
  virtual int last_error() = 0;

 protected:
  ~FakeHip() = default;
};

extern "C" FakeHip* fake_hip();
