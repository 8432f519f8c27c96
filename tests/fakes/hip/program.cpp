// SPDX-License-Identifier: Apache-2.0
//
// What programs call themselves, so that the fake can also stand behind one: allocation, copies, and some of the test's
// side by plain functions.
#include <cstring>

#include "state.hpp"

using namespace fake;

FAKE_API int hipMemcpyHtoDAsync(void* to, const void* from, std::size_t bytes, void* handle);
FAKE_API int hipMemcpyDtoHAsync(void* to, const void* from, std::size_t bytes, void* handle);
FAKE_API int hipStreamSynchronize(void* handle);

FAKE_API int hipMalloc(void** address, std::size_t bytes) {
  return call("hipMalloc", [&] {
    if (address == nullptr || bytes == 0) return kInvalidValue;
    *address = reinterpret_cast<void*>(allocate(bytes, caller().device)->address);
    return kSuccess;
  });
}
FAKE_API int hipMallocManaged(void** address, std::size_t bytes, unsigned) {
  return call("hipMallocManaged", [&] {
    if (address == nullptr || bytes == 0) return kInvalidValue;
    *address = fake_hip()->allocate_managed(bytes);
    return kSuccess;
  });
}
FAKE_API int hipMemcpyHtoD(void* to, const void* from, std::size_t bytes) {
  const int code = hipMemcpyHtoDAsync(to, from, bytes, nullptr);
  return code != kSuccess ? code : hipStreamSynchronize(nullptr);
}
FAKE_API int hipMemcpyDtoH(void* to, const void* from, std::size_t bytes) {
  const int code = hipMemcpyDtoHAsync(to, from, bytes, nullptr);
  return code != kSuccess ? code : hipStreamSynchronize(nullptr);
}

FAKE_API void fake_hip_fail(const char* function, int nth, int code) { fake_hip()->fail(function, nth, code); }
FAKE_API void fake_hip_migrate(int migration) { fake_hip()->set_migration(static_cast<FakeMigration>(migration)); }
FAKE_API void fake_hip_reset() { fake_hip()->reset(); }
