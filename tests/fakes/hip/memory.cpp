// SPDX-License-Identifier: Apache-2.0
//
// HIP's functions for devices and memory.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "state.hpp"

using namespace fake;

namespace {
struct Attributes {
  int type;
  int device;
  void* device_pointer;
  void* host_pointer;
  int is_managed;
  unsigned flags;
};
/// Where kernels find pinned memory: elsewhere than the processor does.
constexpr std::uintptr_t kPinnedAt = std::uintptr_t{1} << 48;

/// What HIP does before memory is given back: it waits for whatever the GPU's streams were told.
void drain_all(int device) {
  std::vector<std::shared_ptr<Stream>> streams;
  {
    std::lock_guard guard(state().lock);
    for (const auto& [handle, stream] : state().streams) streams.push_back(stream);
    for (const auto& [number, stream] : state().null_streams) streams.push_back(stream);
  }
  for (const auto& stream : streams) {
    if (stream->device == device) stream->drain();
  }
}
}  // namespace

FAKE_API int hipInit(unsigned flags) {
  return call("hipInit", [&] { return flags == 0 ? kSuccess : kInvalidValue; });
}
FAKE_API int hipRuntimeGetVersion(int* version) {
  return call("hipRuntimeGetVersion", [&] {
    std::lock_guard guard(state().lock);
    *version = state().version;
    return kSuccess;
  });
}
FAKE_API int hipGetDeviceCount(int* count) {
  return call("hipGetDeviceCount", [&] {
    std::lock_guard guard(state().lock);
    *count = state().devices;
    return kSuccess;
  });
}
FAKE_API int hipDeviceGetName(char* name, int length, int device) {
  return call("hipDeviceGetName", [&] {
    std::lock_guard guard(state().lock);
    if (name == nullptr || length < 8 || device < 0 || device >= state().devices) return kInvalidDevice;
    std::strncpy(name, device == 0 ? "Fake 0" : "Fake 1", static_cast<std::size_t>(length));
    return kSuccess;
  });
}
FAKE_API int hipDeviceGetAttribute(int* value, int attribute, int device) {
  return call("hipDeviceGetAttribute", [&] {
    std::lock_guard guard(state().lock);
    if (device < 0 || device >= state().devices) return kInvalidDevice;
    if (attribute != 10013) return kInvalidValue;
    *value = state().can_wait;
    return kSuccess;
  });
}
FAKE_API int hipGetDevice(int* device) {
  return call("hipGetDevice", [&] {
    *device = caller().device;
    return kSuccess;
  });
}
FAKE_API int hipSetDevice(int device) {
  return call("hipSetDevice", [&] {
    std::lock_guard guard(state().lock);
    if (device < 0 || device >= state().devices) return kInvalidDevice;
    caller().device = device;
    return kSuccess;
  });
}
FAKE_API int hipPeekAtLastError() { return caller().error; }
FAKE_API int hipGetLastError() {
  const int error = caller().error;
  caller().error = kSuccess;
  return error;
}
FAKE_API const char* hipGetErrorName(int code) {
  switch (code) {
    case kSuccess: return "hipSuccess";
    case kInvalidValue: return "hipErrorInvalidValue";
    case kOutOfMemory: return "hipErrorOutOfMemory";
    case kNoDevice: return "hipErrorNoDevice";
    case kNotSupported: return "hipErrorNotSupported";
    default: return nullptr;
  }
}
FAKE_API const char* hipGetErrorString(int code) {
  switch (code) {
    case kInvalidValue: return "invalid argument";
    case kOutOfMemory: return "out of memory";
    case kNoDevice: return "no ROCm-capable device is detected";
    default: return nullptr;
  }
}

FAKE_API int hipPointerGetAttributes(Attributes* attributes, const void* address) {
  return call("hipPointerGetAttributes", [&] {
    if (attributes == nullptr || address == nullptr) return kInvalidValue;
    std::lock_guard guard(state().lock);
    *attributes = Attributes{kTypeUnregistered, -2, nullptr, nullptr, 0, 0};
    const auto found = state().find(address);
    if (found == nullptr) return kSuccess;
    attributes->type = found->type;
    attributes->device = found->device;
    attributes->is_managed = found->type == kTypeManaged;
    return kSuccess;
  });
}
FAKE_API int hipPointerGetAttribute(void* data, int attribute, void* address) {
  return call("hipPointerGetAttribute", [&] {
    std::lock_guard guard(state().lock);
    const auto found = state().find(address);
    if (attribute != 7 || found == nullptr) return kInvalidValue;
    std::memcpy(data, &found->id, sizeof found->id);  // 4 bytes alone
    return kSuccess;
  });
}
FAKE_API int hipMemGetAddressRange(void** base, std::size_t* size, void* address) {
  return call("hipMemGetAddressRange", [&] {
    std::lock_guard guard(state().lock);
    const auto found = state().find(address);
    if (found == nullptr) return kNotFound;
    *base = reinterpret_cast<void*>(found->address);
    *size = found->size;
    return kSuccess;
  });
}

FAKE_API int hipHostRegister(void* address, std::size_t size, unsigned flags) {
  return call("hipHostRegister", [&] {
    if (address == nullptr || size == 0 || flags != 3) return kInvalidValue;
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    std::lock_guard guard(state().lock);
    for (const auto& [begin, bytes] : state().pins) {
      if (at < begin + bytes && begin < at + size) return kAlreadyRegistered;
    }
    state().pins[at] = size;
    return kSuccess;
  });
}
FAKE_API int hipHostUnregister(void* address) {
  return call("hipHostUnregister", [&] {
    drain_all(caller().device);
    std::lock_guard guard(state().lock);
    return state().pins.erase(reinterpret_cast<std::uintptr_t>(address)) == 1 ? kSuccess : kNotRegistered;
  });
}
FAKE_API int hipHostGetDevicePointer(void** device, void* address, unsigned flags) {
  return call("hipHostGetDevicePointer", [&] {
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    std::lock_guard guard(state().lock);
    if (flags != 0 || state().pins.count(at) == 0) return kInvalidValue;
    *device = reinterpret_cast<void*>(at + kPinnedAt);
    return kSuccess;
  });
}
FAKE_API int hipFree(void* address) {
  return call("hipFree", [&] {
    int device = 0;
    {
      std::lock_guard guard(state().lock);
      const auto found = state().memory.find(reinterpret_cast<std::uintptr_t>(address));
      if (found == state().memory.end()) return kInvalidValue;
      device = found->second->device;
    }
    drain_all(device);
    fake_hip()->free(address);
    return kSuccess;
  });
}

#ifndef FAKE_HIP_OLD
FAKE_API int hipExtMallocWithFlags(void** address, std::size_t size, unsigned flags) {
  return call("hipExtMallocWithFlags", [&] {
    if (flags != 2 || size != 8) return kInvalidValue;
    auto made = std::make_shared<Allocation>();
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, 64) != 0) return kOutOfMemory;
    std::memset(memory, 0xff, 64);  // as nobody may count on
    made->address = reinterpret_cast<std::uintptr_t>(memory);
    made->size = 8;
    made->type = kTypeHost;
    made->is_signal = true;
    made->device = caller().device;
    std::lock_guard guard(state().lock);
    made->id = ++state().last_id;
    state().memory[made->address] = made;
    *address = memory;
    return kSuccess;
  });
}
FAKE_API int hipMemGetHandleForAddressRange(int* number, void* address, std::size_t size, int kind,
                                            unsigned long long flags) {
  return call("hipMemGetHandleForAddressRange", [&] {
    std::lock_guard guard(state().lock);
    const auto found = state().find(address, size);
    if (found == nullptr || found->descriptor < 0 || kind != 1 || flags > 1) return kInvalidValue;
    *number = export_memory(*found);
    return kSuccess;
  });
}
#endif
