// SPDX-License-Identifier: Apache-2.0
//
// HSA's functions for exporting memory, and the test's own.
#include <cstddef>
#include <cstring>

#include "state.hpp"

using namespace fake;

namespace {

constexpr int kHsaInvalidArgument = 0x1001, kHsaInvalidAllocation = 0x1003, kHsaInvalidAgent = 0x1004;

struct PointerInfo {
  std::uint32_t size;
  int type;
  void* agent_base;
  void* host_base;
  std::size_t bytes;
  void* user;
  std::uint64_t owner;
  std::uint32_t flags;
};

[[maybe_unused]] int export_range(const char* function, const void* address, std::size_t size, int* number,
                                  std::uint64_t* offset) {
  if (const int code = admit(function); code != 0) return code;
  if (address == nullptr || number == nullptr || offset == nullptr || size == 0) return kHsaInvalidArgument;
  std::lock_guard guard(state().lock);
  const auto found = state().find(address, size);
  if (found == nullptr) return kHsaInvalidAllocation;
  if (found->descriptor < 0) return kHsaInvalidAgent;
  *number = export_memory(*found);
  *offset = found->lead + (reinterpret_cast<std::uintptr_t>(address) - found->address);
  return 0;
}

}  // namespace

FAKE_API int hsa_init() { return admit("hsa_init"); }
FAKE_API int hsa_status_string(int code, const char** text) {
  if (code != kHsaInvalidAllocation) return kHsaInvalidArgument;
  *text = "the requested allocation is not valid";
  return 0;
}

#ifndef FAKE_HIP_OLD
FAKE_API int hsa_amd_pointer_info(const void* address, PointerInfo* info, void* (*)(std::size_t), std::uint32_t*,
                                  void**) {
  if (const int code = admit("hsa_amd_pointer_info"); code != 0) return code;
  if (address == nullptr || info == nullptr || info->size != sizeof *info) return kHsaInvalidArgument;
  std::lock_guard guard(state().lock);
  const auto found = state().find(address);
  *info = PointerInfo{sizeof *info, found != nullptr, nullptr, nullptr, 0, nullptr, 0, 0};
  if (found != nullptr) info->owner = found->agent;
  return 0;
}
FAKE_API int hsa_amd_portable_export_dmabuf(const void* address, std::size_t size, int* number, std::uint64_t* offset) {
  return export_range("hsa_amd_portable_export_dmabuf", address, size, number, offset);
}
FAKE_API int hsa_amd_portable_export_dmabuf_v2(const void* address, std::size_t size, int* number,
                                               std::uint64_t* offset, std::uint64_t flags) {
  if (flags > 1) return kHsaInvalidArgument;
  return export_range("hsa_amd_portable_export_dmabuf_v2", address, size, number, offset);
}
#endif

namespace {

class Knobs final : public FakeHip {
 public:
  void reset() override {
    std::lock_guard guard(state().lock);
    state().functions.clear();
    state().version = 60342134;
    state().devices = 2;
    state().can_wait = true;
    state().lead = state().exported_size = 0;
    state().exported_number = 0;
    state().migration = FakeMigration::none;
    for (auto& [handle, stream] : state().streams) stream->capture = 0;
    for (auto& [number, stream] : state().null_streams) stream->capture = 0;
    caller() = Caller{};
  }
  void fail(const char* function, int nth, int code) override {
    std::lock_guard guard(state().lock);
    Failing& entry = state().functions[function];
    entry.at = entry.calls + nth;
    entry.code = code;
  }
  int calls(const char* function) override {
    std::lock_guard guard(state().lock);
    return state().functions[function].calls;
  }
  void set_version(int version) override { set(state().version, version); }
  void set_devices(int count) override { set(state().devices, count); }
  void set_can_wait(bool can_wait) override { set(state().can_wait, can_wait); }
  void set_lead(std::uint64_t bytes) override { set(state().lead, bytes); }
  void set_migration(FakeMigration migration) override { set(state().migration, migration); }
  void set_exported_size(std::uint64_t bytes) override { set(state().exported_size, bytes); }
  void set_exported_number(int number) override { set(state().exported_number, number); }
  void set_capture(void* stream, int status) override {
    std::lock_guard guard(state().lock);
    state().stream(stream)->capture = status;
  }

  void* allocate(std::size_t bytes, int device) override {
    return reinterpret_cast<void*>(fake::allocate(bytes, device)->address);
  }
  void* allocate_managed(std::size_t bytes) override {
    const auto made = fake::allocate(bytes, 0);
    std::lock_guard guard(state().lock);
    made->type = kTypeManaged;
    return reinterpret_cast<void*>(made->address);
  }
  void free(void* address) override {
    std::shared_ptr<Allocation> freed;
    std::lock_guard guard(state().lock);
    const auto found = state().memory.find(reinterpret_cast<std::uintptr_t>(address));
    freed = found->second;
    state().memory.erase(found);
  }
  void read(std::uint64_t address, void* to, std::size_t bytes) override { std::memcpy(to, at(address, bytes), bytes); }
  void write(std::uint64_t address, const void* from, std::size_t bytes) override {
    std::memcpy(at(address, bytes), from, bytes);
  }

  int live_allocations() override { return size(state().memory); }
  int live_streams() override { return size(state().streams); }
  int live_pins() override { return size(state().pins); }
  int current_device() override { return caller().device; }
  int capture_mode() override { return caller().capture_mode; }
  int last_error() override { return caller().error; }

 private:
  template <class T>
  static void set(T& where, T value) {
    std::lock_guard guard(state().lock);
    where = value;
  }
  template <class Map>
  static int size(const Map& map) {
    std::lock_guard guard(state().lock);
    return static_cast<int>(map.size());
  }
  static unsigned char* at(std::uint64_t address, std::size_t bytes) {
    std::lock_guard guard(state().lock);
    const auto found = state().find(reinterpret_cast<void*>(address), bytes);
    return found->inside + (address - found->address);
  }
};

}  // namespace

FAKE_API FakeHip* fake_hip() {
  static Knobs knobs;
  return &knobs;
}
