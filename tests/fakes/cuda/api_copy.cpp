// SPDX-License-Identifier: Apache-2.0
//
// The driver's functions that copy and set memory.
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "calls.hpp"
#include "capture.hpp"
#include "context.hpp"
#include "memory.hpp"

using namespace fake_cuda;

namespace {

std::uint64_t number(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

void take_time(std::uint64_t bytes) {
  const double rate = settings().copy_bytes_per_second, each = settings().copy_microseconds;
  const double seconds = each / 1e6 + (rate > 0 ? static_cast<double>(bytes) / rate : 0);
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

/// The GPU's side of a copy: memory that the driver knows, all of it in one allocation.
CUresult check_known(std::uint64_t address, std::uint64_t bytes, const char* what) {
  if (memory().find(address, bytes)) return CUDA_SUCCESS;
  const bool over = memory().find(address).has_value();
  return misuse(CUDA_ERROR_INVALID_VALUE,
                std::string(what) + (over ? " goes over the end of its allocation" : " is no memory of the driver's"));
}

/// The program's side of a copy that the stream makes later.
CUresult check_pinned(std::uint64_t address, std::uint64_t bytes, const char* what) {
  const auto block = memory().find(address, bytes);
  if (!block) return misuse(CUDA_ERROR_INVALID_VALUE, std::string(what) + " of an asynchronous copy is not pinned");
  if (block->kind != Kind::device) return CUDA_SUCCESS;
  return misuse(CUDA_ERROR_INVALID_VALUE, std::string(what) + " of a copy with the host is GPU memory");
}

/// The program's side of a copy that is made before the call returns: any memory of the process.
CUresult check_host(std::uint64_t address, const char* what) {
  const auto block = memory().find(address);
  if (!block || block->kind != Kind::device) return CUDA_SUCCESS;
  return misuse(CUDA_ERROR_INVALID_VALUE, std::string(what) + " of a copy with the host is GPU memory");
}

/// `pageable`: that address is the program's, whether or not the driver knows it.
Task copy_task(Context& context, std::uint64_t to, std::uint64_t from, std::uint64_t bytes, std::uint64_t pageable) {
  Task task;
  task.run = [&context, to, from, bytes, pageable] {
    take_time(bytes);
    const auto reach = [&](std::uint64_t address) {
      std::byte* at = memory().reach(address, bytes);
      return at == nullptr && address == pageable ? reinterpret_cast<std::byte*>(address) : at;
    };
    std::byte* target = reach(to);
    const std::byte* source = reach(from);
    if (target == nullptr || source == nullptr) return context.fail(CUDA_ERROR_ILLEGAL_ADDRESS);
    std::memmove(target, source, bytes);
  };
  return task;
}

/// A copy on the legacy stream, which is over when this returns.
CUresult copy_now(Context& current, std::uint64_t to, std::uint64_t from, std::uint64_t bytes, std::uint64_t pageable) {
  std::shared_ptr<Stream> legacy;
  if (const CUresult code = find_stream(current, nullptr, legacy); code != CUDA_SUCCESS) return code;
  if (const CUresult code = refuse_captured(*legacy); code != CUDA_SUCCESS) return code;
  if (const CUresult code = unsafe_call(); code != CUDA_SUCCESS) return code;
  const CUresult code = current.submit(*legacy, copy_task(current, to, from, bytes, pageable));
  if (code != CUDA_SUCCESS) return code;
  legacy->tail().wait();
  return current.error;
}

Task set_task(Context& context, std::uint64_t to, unsigned char value, std::uint64_t bytes) {
  Task task;
  task.run = [&context, to, value, bytes] {
    take_time(bytes);
    std::byte* target = memory().reach(to, bytes);
    if (target == nullptr) return context.fail(CUDA_ERROR_ILLEGAL_ADDRESS);
    std::memset(target, value, bytes);
  };
  return task;
}

}  // namespace

FAKE_EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t size) {
  return in_context<"cuMemcpyHtoD_v2">([&](Context& current) -> CUresult {
    if (size == 0) return CUDA_SUCCESS;
    if (const CUresult code = check_known(to, size, "the destination"); code != CUDA_SUCCESS) return code;
    if (const CUresult code = check_host(number(from), "the source"); code != CUDA_SUCCESS) return code;
    return copy_now(current, to, number(from), size, number(from));
  });
}

FAKE_EXPORT CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t size) {
  return in_context<"cuMemcpyDtoH_v2">([&](Context& current) -> CUresult {
    if (size == 0) return CUDA_SUCCESS;
    if (const CUresult code = check_known(from, size, "the source"); code != CUDA_SUCCESS) return code;
    if (const CUresult code = check_host(number(to), "the destination"); code != CUDA_SUCCESS) return code;
    return copy_now(current, number(to), from, size, number(to));
  });
}

FAKE_EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t size, CUstream handle) {
  return on_stream<"cuMemcpyHtoDAsync_v2">(handle, [&](Context& current, Stream& stream) -> CUresult {
    if (size == 0) return CUDA_SUCCESS;
    if (const CUresult code = check_known(to, size, "the destination"); code != CUDA_SUCCESS) return code;
    if (const CUresult code = check_pinned(number(from), size, "the source"); code != CUDA_SUCCESS) return code;
    return stream.context.submit(stream, copy_task(current, to, number(from), size, 0));
  });
}

FAKE_EXPORT CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t size, CUstream handle) {
  return on_stream<"cuMemcpyDtoHAsync_v2">(handle, [&](Context& current, Stream& stream) -> CUresult {
    if (size == 0) return CUDA_SUCCESS;
    if (const CUresult code = check_known(from, size, "the source"); code != CUDA_SUCCESS) return code;
    if (const CUresult code = check_pinned(number(to), size, "the destination"); code != CUDA_SUCCESS) return code;
    return stream.context.submit(stream, copy_task(current, number(to), from, size, 0));
  });
}

FAKE_EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream handle) {
  return on_stream<"cuMemcpyDtoDAsync_v2">(handle, [&](Context& current, Stream& stream) -> CUresult {
    if (size == 0) return CUDA_SUCCESS;
    if (const CUresult code = check_known(to, size, "the destination"); code != CUDA_SUCCESS) return code;
    if (const CUresult code = check_known(from, size, "the source"); code != CUDA_SUCCESS) return code;
    return stream.context.submit(stream, copy_task(current, to, from, size, 0));
  });
}

FAKE_EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t size) {
  return on_stream<"cuMemsetD8_v2">(nullptr, [&](Context& current, Stream& legacy) -> CUresult {
    if (size == 0) return CUDA_SUCCESS;
    if (const CUresult code = check_known(to, size, "the destination"); code != CUDA_SUCCESS) return code;
    // As the driver: it returns before the memory is set.
    return current.submit(legacy, set_task(current, to, value, size));
  });
}

FAKE_EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t size, CUstream handle) {
  return on_stream<"cuMemsetD8Async">(handle, [&](Context& current, Stream& stream) -> CUresult {
    if (size == 0) return CUDA_SUCCESS;
    if (const CUresult code = check_known(to, size, "the destination"); code != CUDA_SUCCESS) return code;
    return stream.context.submit(stream, set_task(current, to, value, size));
  });
}
