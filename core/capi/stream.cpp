// SPDX-License-Identifier: Apache-2.0
//
// Requests in stream order.
#include "engine/stream.hpp"

#include <cerrno>
#include <span>
#include <vector>

#include "capi/internal.hpp"
#include "engine/operation.hpp"
#include "engine/table.hpp"

namespace {

using ugds::last_error;
using ugds::capi::answer;
using ugds::capi::code_of;
using ugds::capi::guarded;
using ugds::capi::id_of;
using ugds::capi::refuse;
using ugds::engine::Stream;
using ugds::engine::Table;
using ugds::memory::Registry;
using ugds::nvme::Opcode;

/// The runtime of a backend's number, or any that there is. Throws Failure(EOPNOTSUPP).
ugds::gpu::Runtime& runtime_of(int backend) {
  std::string cuda, hip;
  ugds::gpu::Runtime* runtime = backend == 2 ? nullptr : ugds::gpu::cuda(&cuda);
  if (runtime == nullptr && backend != 1) runtime = ugds::gpu::hip(&hip);
  if (runtime == nullptr) {
    ugds::fail(EOPNOTSUPP, "stream", "there is no GPU: " + cuda + (cuda.empty() || hip.empty() ? "" : "; ") + hip,
               "use uGDSRead and uGDSWrite, which need none; UGDS_CUDA_LIBRARY and UGDS_HIP_LIBRARY name libraries");
  }
  return *runtime;
}

Stream& stream_of(const ugds::memory::Reference& buffer, void* stream) {
  const Registry::GpuPlace place = Registry::instance().gpu_of(buffer);
  if (place.runtime != nullptr) return Stream::of(*place.runtime, stream, place.place);
  ugds::gpu::Runtime& runtime = runtime_of(0);
  return Stream::of(runtime, stream, runtime.place_of(0));
}

/// The first error that nobody was told of becomes last_error(). The others have been in their `*done`.
uGDSError_t tell_errors(std::span<Stream* const> streams) {
  ugds::Error first;
  std::size_t others = 0;
  for (Stream* stream : streams) {
    while (ugds::engine::StreamResult* failed = stream->take_error()) {
      if (first.code == 0) {
        first = failed->error();
      } else {
        ++others;
      }
      failed->release();
    }
  }
  if (first.code == 0) return answer(UGDS_SUCCESS);
  ugds::Error& error = ugds::last_error() = first;
  if (others != 0) ugds::set_cause(error, "%s; further requests on the stream that failed: %zu", first.cause, others);
  return answer(code_of(error.code));
}

uGDSError_t submit(Opcode opcode, uGDSHandle_t fh, const void* buf, const size_t* size, const off_t* file_offset,
                   const off_t* buf_offset, ssize_t* done, void* stream) {
  static_assert(sizeof(off_t) == sizeof(std::int64_t) && sizeof(size_t) == sizeof(std::int64_t));
  const char* name = ugds::engine::operation_name(opcode);
  if (size == nullptr || file_offset == nullptr || buf_offset == nullptr || done == nullptr)
    return refuse(name, UGDS_INVALID_VALUE, EINVAL, "a null argument");
  return guarded(name, [&] {
    const Table::Use handle(Table::instance(), id_of(fh));
    if (!handle) {
      Table::instance().explain_stale(id_of(fh), name);
      return answer(UGDS_HANDLE_NOT_REGISTERED);
    }
    const ugds::memory::Reference buffer = Registry::instance().find(buf);
    if (!buffer) {
      return ugds::capi::refuse_unregistered(name, "call uGDSBufRegister() once, before the first I/O");
    }
    const ugds::engine::Transfer transfer{.opcode = opcode, .buffer = buffer, .size = *size};
    ugds::engine::StreamCall call{.requests = std::span(&transfer, 1)};
    call.late = {.offset = reinterpret_cast<const std::int64_t*>(file_offset),
                 .size = reinterpret_cast<const std::int64_t*>(size),
                 .buffer_offset = reinterpret_cast<const std::int64_t*>(buf_offset),
                 .base = reinterpret_cast<std::uintptr_t>(buf) - buffer.address};
    call.told = reinterpret_cast<std::int64_t*>(done);
    try {
      const std::int64_t result = stream_of(buffer, stream).submit(*handle, call, {});
      return answer(result < 0 ? code_of(static_cast<int>(-result)) : UGDS_SUCCESS);
    } catch (const ugds::Failure& failure) {
      ugds::Error& error = last_error() = failure.error();
      error.operation = name;
      set_device(error, handle->uri().c_str());
      return answer(code_of(error.code));
    }
  });
}

}  // namespace

extern "C" {

uGDSError_t uGDSReadAsync(uGDSHandle_t fh, void* buf, size_t* size, off_t* file_offset, off_t* buf_offset,
                          ssize_t* done, void* stream) {
  return submit(Opcode::read, fh, buf, size, file_offset, buf_offset, done, stream);
}

uGDSError_t uGDSWriteAsync(uGDSHandle_t fh, void* buf, size_t* size, off_t* file_offset, off_t* buf_offset,
                           ssize_t* done, void* stream) {
  return submit(Opcode::write, fh, buf, size, file_offset, buf_offset, done, stream);
}

uGDSError_t uGDSStreamRegister(void* stream) { return uGDSStreamRegisterEx(stream, 0); }

uGDSError_t uGDSStreamRegisterEx(void* stream, int backend) {
  if (backend < 0 || backend > 2) return refuse("stream register", UGDS_INVALID_VALUE, EINVAL, "an unknown backend");
  return guarded("stream register", [&] {
    ugds::gpu::Runtime& runtime = runtime_of(backend);
    Stream::of(runtime, stream, runtime.place_of(0));
    return answer(UGDS_SUCCESS);
  });
}

uGDSError_t uGDSStreamDeregister(void* stream) {
  return guarded("stream deregister", [&] {
    const std::vector<Stream*> streams = Stream::named(stream);
    if (streams.empty())
      return refuse("stream deregister", UGDS_INVALID_VALUE, EINVAL, "no request was ever made on this stream");
    for (Stream* one : streams) ugds::engine::wait_for(*one, {});
    return tell_errors(streams);
  });
}

}  // extern "C"
