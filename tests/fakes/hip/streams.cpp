// SPDX-License-Identifier: Apache-2.0
//
// HIP's functions for streams. Simplified: no stream waits for another, and none holds anything of the GPU's.
#include <atomic>
#include <chrono>
#include <cstring>

#include "state.hpp"

using namespace fake;

namespace {

/// Enqueues what `make` gives for a stream that is there, unless it is captured, which nothing here supports.
template <class Make>
int enqueue(const char* function, void* handle, Make make) {
  return call(function, [&] {
    std::shared_ptr<Stream> stream;
    std::function<void()> work;
    {
      std::lock_guard guard(state().lock);
      stream = state().stream(handle);
      if (stream == nullptr) return kInvalidHandle;
      if (stream->capture != 0) return kCaptureImplicit;
      if (const int code = make(work); code != kSuccess) return code;
    }
    stream->push(std::move(work));
    return kSuccess;
  });
}

/// Device memory of that many bytes, or nullptr. Under the lock.
std::shared_ptr<Allocation> device_memory(const void* address, std::size_t bytes) {
  auto found = state().find(address, bytes);
  return found != nullptr && found->inside != nullptr ? found : nullptr;
}

std::size_t offset_in(const Allocation& allocation, const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) - allocation.address;
}

}  // namespace

FAKE_API int hipStreamCreateWithFlags(void** handle, unsigned flags) {
  return call("hipStreamCreateWithFlags", [&] {
    if (handle == nullptr || flags > 1) return kInvalidValue;
    auto stream = std::make_shared<Stream>(caller().device);
    std::lock_guard guard(state().lock);
    *handle = stream.get();
    state().streams[stream.get()] = stream;
    return kSuccess;
  });
}
FAKE_API int hipStreamDestroy(void* handle) {
  return call("hipStreamDestroy", [&] {
    std::shared_ptr<Stream> destroyed;  // ended without the lock
    std::lock_guard guard(state().lock);
    const auto found = state().streams.find(handle);
    if (found == state().streams.end()) return kInvalidHandle;
    destroyed = found->second;
    state().streams.erase(found);
    return kSuccess;
  });
}
FAKE_API int hipStreamSynchronize(void* handle) {
  return call("hipStreamSynchronize", [&] {
    std::shared_ptr<Stream> stream;
    {
      std::lock_guard guard(state().lock);
      stream = state().stream(handle);
    }
    if (stream == nullptr) return kInvalidHandle;
    stream->drain();
    return kSuccess;
  });
}
FAKE_API int hipStreamIsCapturing(void* handle, int* status) {
  return call("hipStreamIsCapturing", [&] {
    std::lock_guard guard(state().lock);
    const auto stream = state().stream(handle);
    if (stream == nullptr) return kInvalidHandle;
    *status = stream->capture;
    return kSuccess;
  });
}
FAKE_API int hipMemcpyHtoDAsync(void* to, const void* from, std::size_t bytes, void* handle) {
  return enqueue("hipMemcpyHtoDAsync", handle, [&](std::function<void()>& work) {
    const auto found = device_memory(to, bytes);
    if (found == nullptr || device_memory(from, 1) != nullptr) return kInvalidValue;
    work = [found, at = offset_in(*found, to), from, bytes] { std::memcpy(found->inside + at, from, bytes); };
    return kSuccess;
  });
}
FAKE_API int hipMemcpyDtoHAsync(void* to, const void* from, std::size_t bytes, void* handle) {
  return enqueue("hipMemcpyDtoHAsync", handle, [&](std::function<void()>& work) {
    const auto found = device_memory(from, bytes);
    if (found == nullptr || device_memory(to, 1) != nullptr) return kInvalidValue;
    work = [found, at = offset_in(*found, from), to, bytes] { std::memcpy(to, found->inside + at, bytes); };
    return kSuccess;
  });
}
FAKE_API int hipLaunchHostFunc(void* handle, void (*function)(void*), void* context) {
  return enqueue("hipLaunchHostFunc", handle, [&](std::function<void()>& work) {
    if (function == nullptr) return kInvalidValue;
    work = [function, context] {
      caller().is_host_function = true;
      function(context);
      caller().is_host_function = false;
    };
    return kSuccess;
  });
}

#ifndef FAKE_HIP_OLD
FAKE_API int hipStreamWriteValue64(void* handle, void* word, std::uint64_t value, unsigned flags) {
  return enqueue("hipStreamWriteValue64", handle, [&](std::function<void()>& work) {
    const auto found = state().find(word, 8);
    if (found == nullptr || flags != 0) return kInvalidValue;
    void* at = found->is_signal ? word : found->inside + offset_in(*found, word);
    work = [found, at, value] {
      std::atomic_ref(*static_cast<std::uint64_t*>(at)).store(value, std::memory_order_release);
    };
    return kSuccess;
  });
}
FAKE_API int hipStreamWaitValue64(void* handle, void* word, std::uint64_t value, unsigned flags, std::uint64_t mask) {
  return enqueue("hipStreamWaitValue64", handle, [&](std::function<void()>& work) {
    const auto found = state().find(word, 8);
    if (found == nullptr || !found->is_signal || flags != 0 || mask != ~std::uint64_t{0}) return kInvalidValue;
    work = [found, word, value] {
      std::atomic_ref shared(*static_cast<std::uint64_t*>(word));
      while (static_cast<std::int64_t>(shared.load(std::memory_order_acquire)) < static_cast<std::int64_t>(value)) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    };
    return kSuccess;
  });
}
FAKE_API int hipThreadExchangeStreamCaptureMode(int* mode) {
  return call("hipThreadExchangeStreamCaptureMode", [&] {
    if (*mode < 0 || *mode > 2) return kInvalidValue;
    std::swap(*mode, caller().capture_mode);
    return kSuccess;
  });
}
#endif
