// SPDX-License-Identifier: Apache-2.0
//
// Requests in stream order. What is given by pointers is read when the stream gets there, but for what the stream was
// registered to have fixed.
#include "engine/stream.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <utility>

#include "base/immortal.hpp"
#include "capi/cufile/buffers.hpp"
#include "capi/cufile/driver.hpp"
#include "capi/cufile/errors.hpp"
#include "capi/cufile/files.hpp"
#include "capi/cufile/fork.hpp"
#include "capi/cufile/run_page.hpp"
#include "capi/cufile/statistics.hpp"
#include "capi/cufile/transfer.hpp"
#include "engine/operation.hpp"
#include "engine/staged.hpp"
#include "engine/table.hpp"
#include "gpu/runtime.hpp"

namespace ugds::cufile {

namespace {

using engine::Stream;
using engine::StreamResult;
using engine::Table;
using memory::Reference;
using memory::Registry;
using nvme::Opcode;

constexpr unsigned kAllFlags = CU_FILE_STREAM_FIXED_BUF_OFFSET | CU_FILE_STREAM_FIXED_FILE_OFFSET |
                               CU_FILE_STREAM_FIXED_FILE_SIZE | CU_FILE_STREAM_PAGE_ALIGNED_INPUTS;
constexpr int kCudaNoDevice = 100;

/// What has become of a request on a stream is learned later, when somebody looks.
struct Pending {
  StreamResult* result = nullptr;
  Request request;
  FileUse file;  ///< until somebody has looked: it is not closed under the request
};
struct Streams {
  std::mutex lock;
  std::unordered_map<void*, unsigned>* flags = nullptr;
  std::list<Pending>* pending = nullptr;
};
constinit Immortal<Streams> the_streams;
Streams& streams() { return the_streams.value; }

void prepare_for_fork() {
  static const bool hooked = [] {
    streams().pending = new std::list<Pending>;
    at_fork({[] { streams().lock.lock(); }, [] { streams().lock.unlock(); },
             [] {
               streams().flags = nullptr;  // the parent's
               streams().pending = new std::list<Pending>;
               streams().lock.unlock();
             }});
    return true;
  }();
  static_cast<void>(hooked);
}

unsigned flags_of(void* stream) {
  const std::lock_guard guard(streams().lock);
  if (streams().flags == nullptr) return 0;
  const auto found = streams().flags->find(stream);
  return found == streams().flags->end() ? 0 : found->second;
}

void tell(Pending& one) {
  Request request = one.request;
  request.moved = one.result->result();
  if (one.result->failed()) static_cast<void>(one.result->look());  // its caller is told by *done
  one.result->release();
  RunPage& page = run_page();
  if (request.moved < 0) {
    count(page.errors);
  } else {
    count(request.write ? page.writes : page.reads);
    count(request.write ? page.written_bytes : page.read_bytes, static_cast<std::uint64_t>(request.moved));
  }
  statistics().count(request);
}

void look_at_pending() {
  const std::lock_guard guard(streams().lock);
  if (streams().pending == nullptr) return;
  std::erase_if(*streams().pending, [](Pending& one) {
    if (!one.result->done()) return false;
    tell(one);
    return true;
  });
}

CUfileError_t refuse_without_cuda(const char* operation, const std::string& why) {
  refuse(operation, CU_FILE_CUDA_DRIVER_ERROR, why.c_str(), "use cuFileRead and cuFileWrite, which need no GPU");
  return {CU_FILE_CUDA_DRIVER_ERROR, kCudaNoDevice};
}

struct Call {
  Opcode opcode;
  CUfileHandle_t file;
  const void* base;
  const std::size_t* size;
  const off_t* file_offset;
  const off_t* buffer_offset;
  ssize_t* done;
  void* stream;
};

/// Waits for the stream, and does it at once: what the engine cannot do in stream order is in order all the same.
CUfileError_t run_now(gpu::Runtime& runtime, const Call& call, const gpu::Place& place) {
  bool capturing = false;
  if (runtime.is_capturing(place, call.stream, capturing) != 0 || capturing) {
    return refuse("stream", CU_FILE_ASYNC_NOT_SUPPORTED, "the stream is being captured into a graph",
                  "submit requests outside of the capture");
  }
  if (const int code = runtime.synchronize(place, call.stream); code != 0) {
    refuse("stream", CU_FILE_CUDA_DRIVER_ERROR, runtime.words(code).c_str());
    return {CU_FILE_CUDA_DRIVER_ERROR, code};
  }
  *call.done = transfer({call.opcode, call.file, call.base, *call.size, *call.file_offset, *call.buffer_offset});
  return answer(CU_FILE_SUCCESS);
}

/// The registration that a request's memory lies in, or one for it alone.
class StreamMemory {
 public:
  StreamMemory(const Call& call, std::uint32_t device) {
    Registry& registry = Registry::instance();
    if ((reference_ = registry.find(call.base))) return;
    const auto base = reinterpret_cast<std::uintptr_t>(call.base);
    gpu::Allocation allocation;
    gpu::Runtime* const runtime = gpu::owner_of(call.base, allocation);
    is_ours_ = true;
    if (runtime != nullptr) {
      // The offset may be another one when the stream gets there.
      auto gpu = std::make_unique<memory::GpuBuffer>(*runtime, allocation, base);
      reference_ =
          registry.add_gpu_unlisted(base, allocation.base + allocation.size - base, false, std::move(gpu), device);
      return;
    }
    const auto most = static_cast<std::uint64_t>(*call.buffer_offset) + *call.size;
    reference_ = registry.add(const_cast<void*>(call.base), most, memory::Kind::host, false);
  }
  ~StreamMemory() {
    if (is_ours_ && reference_) Registry::instance().close_when_idle(reference_);
  }
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;
  const Reference& reference() const { return reference_; }

 private:
  Reference reference_{};
  bool is_ours_ = false;
};

CUfileError_t enqueue(const Call& call, FileUse&& file, gpu::Runtime& cuda) {
  const Table::Use handle(Table::instance(), file->device);
  if (!handle) {
    Table::instance().explain_stale(file->device, "stream");
    return answer(CU_FILE_HANDLE_NOT_REGISTERED);
  }
  const std::uint64_t place = file->place;
  const StreamMemory memory(call, handle->geometry().number);
  const Reference& buffer = memory.reference();
  const std::uint64_t base = reinterpret_cast<std::uintptr_t>(call.base) - buffer.address;
  const unsigned flags = flags_of(call.stream);
  engine::Transfer t{.opcode = call.opcode, .buffer = buffer, .size = *call.size, .buffer_offset = base};
  engine::StreamCall request{.requests = std::span(&t, 1)};
  static_assert(sizeof(off_t) == sizeof(std::int64_t) && sizeof(std::size_t) == sizeof(std::int64_t));
  if ((flags & CU_FILE_STREAM_FIXED_FILE_OFFSET) != 0) {
    if (*call.file_offset < 0) return refuse("stream", CU_FILE_INVALID_VALUE, "a negative offset");
    if (file.fit(call.opcode, static_cast<std::uint64_t>(*call.file_offset), t.size) != 0)
      return answer(CU_FILE_INVALID_VALUE);
    t.offset = place + static_cast<std::uint64_t>(*call.file_offset);
  } else {
    request.late.offset = reinterpret_cast<const std::int64_t*>(call.file_offset);
    request.late.place = place;
  }
  if ((flags & CU_FILE_STREAM_FIXED_FILE_SIZE) == 0)
    request.late.size = reinterpret_cast<const std::int64_t*>(call.size);
  if ((flags & CU_FILE_STREAM_FIXED_BUF_OFFSET) != 0) {
    t.buffer_offset += static_cast<std::uint64_t>(*call.buffer_offset);
  } else {
    request.late.buffer_offset = reinterpret_cast<const std::int64_t*>(call.buffer_offset);
    request.late.base = base;
  }
  request.told = reinterpret_cast<std::int64_t*>(call.done);
  const Registry::GpuPlace gpu = Registry::instance().gpu_of(buffer);
  Stream& stream = gpu.runtime != nullptr ? Stream::of(*gpu.runtime, call.stream, gpu.place)
                                          : Stream::of(cuda, call.stream, cuda.place_of(0));
  const Request counted{.write = call.opcode == Opcode::write,
                        .staged = engine::is_staged_transfer(*handle, t),
                        .gpu = gpu.runtime != nullptr ? gpu.place.device : kHost};
  std::list<Pending> kept;
  kept.push_back({StreamResult::make(), counted, std::move(file)});
  request.result = kept.front().result;
  request.result->refer();
  const std::int64_t result = stream.submit(*handle, request, {});
  request.result->release();
  if (result < 0) {
    request.result->release();
    fail(static_cast<int>(-result), "stream", last_error().cause, last_error().hint);
  }
  const std::lock_guard guard(streams().lock);
  streams().pending->splice(streams().pending->end(), kept);
  return answer(CU_FILE_SUCCESS);
}

CUfileError_t submit(const Call& call) {
  const char* const name = engine::operation_name(call.opcode);
  if (call.file == nullptr || call.base == nullptr || call.size == nullptr || call.file_offset == nullptr ||
      call.buffer_offset == nullptr || call.done == nullptr) {
    return refuse(name, CU_FILE_INVALID_VALUE, "a null argument");
  }
  prepare_for_fork();
  look_at_pending();
  FileUse file(call.file);
  if (const int code = file.refuse(call.opcode); code != CU_FILE_SUCCESS) return answer(code);
  std::string why;
  gpu::Runtime* const cuda = gpu::cuda(&why);
  if (cuda == nullptr) return refuse_without_cuda(name, why);
  try {
    const CUfileError_t done = enqueue(call, std::move(file), *cuda);
    count(run_page().stream_requests);
    return done;
  } catch (const Failure& failure) {
    // Managed memory, and what is bound late where the GPU has no kernels of ours.
    if (failure.error().code != EOPNOTSUPP) throw;
    const CUfileError_t done = run_now(*cuda, call, cuda->place_of_stream(call.stream, cuda->place_of(0)));
    if (done.err == CU_FILE_SUCCESS) count(run_page().stream_requests);
    return done;
  }
}

CUfileError_t submit_guarded(const Call& call) {
  const CUfileError_t done = guarded("stream", [&] { return submit(call); });
  if (done.err != CU_FILE_SUCCESS) count(run_page().errors);
  return done;
}

}  // namespace

void count_ended_requests() { look_at_pending(); }

}  // namespace ugds::cufile

using namespace ugds::cufile;  // NOLINT
using ugds::nvme::Opcode;      // NOLINT

extern "C" {

CUfileError_t cuFileReadAsync(CUfileHandle_t fh, void* base, size_t* size, off_t* file_offset, off_t* buffer_offset,
                              ssize_t* done, void* stream) {
  return submit_guarded({Opcode::read, fh, base, size, file_offset, buffer_offset, done, stream});
}

CUfileError_t cuFileWriteAsync(CUfileHandle_t fh, void* base, size_t* size, off_t* file_offset, off_t* buffer_offset,
                               ssize_t* done, void* stream) {
  return submit_guarded({Opcode::write, fh, base, size, file_offset, buffer_offset, done, stream});
}

CUfileError_t cuFileStreamRegister(void* stream, unsigned flags) {
  return guarded("stream register", [&] {
    if ((flags & ~kAllFlags) != 0) return refuse("stream register", CU_FILE_INVALID_VALUE, "unknown flags");
    prepare_for_fork();
    Driver::instance().need();
    std::string why;
    ugds::gpu::Runtime* const cuda = ugds::gpu::cuda(&why);
    if (cuda == nullptr) return refuse_without_cuda("stream register", why);
    ugds::engine::Stream::of(*cuda, stream, cuda->place_of(0));
    const std::lock_guard guard(streams().lock);
    if (streams().flags == nullptr) streams().flags = new std::unordered_map<void*, unsigned>;
    (*streams().flags)[stream] = flags;
    return answer(CU_FILE_SUCCESS);
  });
}

CUfileError_t cuFileStreamDeregister(void* stream) {
  return guarded("stream deregister", [&] {
    const auto known = ugds::engine::Stream::named(stream);
    if (known.empty()) {
      return refuse("stream deregister", CU_FILE_INVALID_VALUE, "the stream is not registered, and has had no request",
                    "register it by cuFileStreamRegister()");
    }
    for (ugds::engine::Stream* one : known) ugds::engine::wait_for(*one, {});
    look_at_pending();
    const std::lock_guard guard(streams().lock);
    if (streams().flags != nullptr) streams().flags->erase(stream);
    return answer(CU_FILE_SUCCESS);
  });
}

}  // extern "C"
