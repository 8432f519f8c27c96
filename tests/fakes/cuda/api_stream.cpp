// SPDX-License-Identifier: Apache-2.0
//
// The driver's functions for streams, the words that they write and wait for, host functions and captures.
#include <atomic>
#include <cstddef>
#include <span>

#include "calls.hpp"
#include "capture.hpp"
#include "context.hpp"
#include "memory.hpp"

using namespace fake_cuda;

// As in the driver's own header.
static_assert(sizeof(CUstreamBatchMemOpParams) == 48);
static_assert(offsetof(CUstreamBatchMemOpParams, word.address) == 8);
static_assert(offsetof(CUstreamBatchMemOpParams, word.value64) == 16);
static_assert(offsetof(CUstreamBatchMemOpParams, word.flags) == 24);
static_assert(offsetof(CUstreamBatchMemOpParams, word.alias) == 32);

namespace {

CUresult create(Context& current, CUstream* stream, unsigned flags) {
  if (stream == nullptr || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  const auto type = flags == CU_STREAM_NON_BLOCKING ? Stream::Type::non_blocking : Stream::Type::blocking;
  *stream = table<Stream>().add<CUstream>(current.make_stream(type, flags), settings().reuse_streams);
  return CUDA_SUCCESS;
}

/// The driver runs kernels and word operations only on streams of the current context.
CUresult check_context(const Context& current, const Stream& stream, const char* what) {
  if (&stream.context == &current) return CUDA_SUCCESS;
  return misuse(CUDA_ERROR_INVALID_HANDLE, std::string(what) + " on a stream of another context than the current one");
}

CUresult make_word_task(Context& context, const CUstreamBatchMemOpParams& op, Task& task) {
  const bool is_wait = op.operation == CU_STREAM_MEM_OP_WAIT_VALUE_32 || op.operation == CU_STREAM_MEM_OP_WAIT_VALUE_64;
  const bool is_write =
      op.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32 || op.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64;
  if (!is_wait && !is_write) return CUDA_ERROR_NOT_SUPPORTED;
  const bool is_64 = op.operation == CU_STREAM_MEM_OP_WAIT_VALUE_64 || op.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64;
  const std::uint64_t address = op.word.address, bytes = is_64 ? 8 : 4, value = op.word.value64;
  // What would flush the writes of other devices is not offered; nor does the H200.
  if (op.word.flags > (is_wait ? 3U : 1U)) return CUDA_ERROR_NOT_SUPPORTED;
  if (address % bytes != 0 || !memory().find(address, bytes)) {
    return misuse(CUDA_ERROR_INVALID_VALUE, "a stream's word is not aligned, or in no memory of the driver's");
  }
  if (is_wait) {
    task.kind = Task::Kind::wait;
    task.word = {address, value, op.word.flags, is_64};
    return CUDA_SUCCESS;
  }
  task.run = [&context, address, value, is_64] {
    std::byte* at = memory().reach(address, is_64 ? 8 : 4);
    if (at == nullptr) return context.fail(CUDA_ERROR_ILLEGAL_ADDRESS);
    // Release: whoever sees the value sees all that the stream did before.
    if (is_64) {
      std::atomic_ref(*reinterpret_cast<std::uint64_t*>(at)).store(value, std::memory_order_release);
    } else {
      std::atomic_ref(*reinterpret_cast<std::uint32_t*>(at))
          .store(static_cast<std::uint32_t>(value), std::memory_order_release);
    }
  };
  return CUDA_SUCCESS;
}

CUresult enqueue_words(Context& current, Stream& stream, std::span<const CUstreamBatchMemOpParams> ops) {
  if (!settings().stream_words) return CUDA_ERROR_NOT_SUPPORTED;
  if (const CUresult code = check_context(current, stream, "a word operation"); code != CUDA_SUCCESS) return code;
  std::vector<Task> tasks(ops.size());
  for (std::size_t i = 0; i < ops.size(); i++) {
    if (const CUresult code = make_word_task(current, ops[i], tasks[i]); code != CUDA_SUCCESS) return code;
  }
  return current.submit(stream, std::move(tasks));
}

CUresult enqueue_word(Context& current, Stream& stream, int operation, CUdeviceptr address, std::uint64_t value,
                      unsigned flags) {
  CUstreamBatchMemOpParams op{};
  op.word = {operation, address, value, flags, 0};
  return enqueue_words(current, stream, std::span(&op, 1));
}

/// What waits for the legacy stream waits for all that the legacy stream waits for.
Point end_of(Stream& stream) {
  if (stream.type == Stream::Type::legacy) {
    Task nothing;
    nothing.kind = Task::Kind::mark;
    nothing.run = [] {};
    stream.context.submit(stream, std::move(nothing));
  }
  return stream.tail();
}

}  // namespace

FAKE_EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned int flags) {
  return in_context<"cuStreamCreate">([&](Context& current) { return create(current, stream, flags); });
}

FAKE_EXPORT CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned int flags, int) {
  return in_context<"cuStreamCreateWithPriority">([&](Context& current) { return create(current, stream, flags); });
}

FAKE_EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
  return in_context<"cuStreamDestroy_v2">([&](Context&) -> CUresult {
    const auto stream = table<Stream>().take(handle);
    if (stream == nullptr) return misuse(CUDA_ERROR_INVALID_HANDLE, "a stream was destroyed that does not exist");
    forget_capture(*stream);
    stream->close();
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuStreamSynchronize(CUstream handle) {
  return on_stream<"cuStreamSynchronize">(handle, [&](Context&, Stream& stream) -> CUresult {
    if (const CUresult code = refuse_captured(stream); code != CUDA_SUCCESS) return code;
    end_of(stream).wait();
    return stream.context.error;
  });
}

FAKE_EXPORT CUresult cuStreamQuery(CUstream handle) {
  return on_stream<"cuStreamQuery">(handle, [&](Context&, Stream& stream) -> CUresult {
    if (const CUresult code = refuse_captured(stream); code != CUDA_SUCCESS) return code;
    return stream.is_idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

FAKE_EXPORT CUresult cuStreamGetFlags(CUstream handle, unsigned int* flags) {
  return on_stream<"cuStreamGetFlags">(handle, [&](Context&, Stream& stream) -> CUresult {
    if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *flags = stream.flags;
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
  return on_stream<"cuStreamGetCtx">(handle, [&](Context&, Stream& stream) -> CUresult {
    if (context == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *context = stream.context.handle;
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuStreamBatchMemOp_v2(CUstream handle, unsigned int count, CUstreamBatchMemOpParams* ops,
                                           unsigned int flags) {
  return on_stream<"cuStreamBatchMemOp_v2">(handle, [&](Context& current, Stream& stream) -> CUresult {
    if (count == 0 || count > 256 || ops == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    return enqueue_words(current, stream, std::span(ops, count));
  });
}

FAKE_EXPORT CUresult cuStreamWriteValue64_v2(CUstream handle, CUdeviceptr address, uint64_t value, unsigned int flags) {
  return on_stream<"cuStreamWriteValue64_v2">(handle, [&](Context& current, Stream& stream) {
    return enqueue_word(current, stream, CU_STREAM_MEM_OP_WRITE_VALUE_64, address, value, flags);
  });
}

FAKE_EXPORT CUresult cuStreamWaitValue64_v2(CUstream handle, CUdeviceptr address, uint64_t value, unsigned int flags) {
  return on_stream<"cuStreamWaitValue64_v2">(handle, [&](Context& current, Stream& stream) {
    return enqueue_word(current, stream, CU_STREAM_MEM_OP_WAIT_VALUE_64, address, value, flags);
  });
}

FAKE_EXPORT CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* user_data) {
  return on_stream<"cuLaunchHostFunc">(handle, [&](Context&, Stream& stream) -> CUresult {
    if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
    Task task;
    task.kind = Task::Kind::call;
    task.run = [function, user_data] { function(user_data); };
    return stream.context.submit(stream, std::move(task));
  });
}

FAKE_EXPORT CUresult cuStreamBeginCapture_v2(CUstream handle, int mode) {
  return on_stream<"cuStreamBeginCapture_v2">(handle,
                                              [&](Context&, Stream& stream) { return begin_capture(stream, mode); });
}

FAKE_EXPORT CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  return on_stream<"cuStreamEndCapture">(handle, [&](Context&, Stream& stream) -> CUresult {
    if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *graph = nullptr;
    std::shared_ptr<Graph> made;
    const CUresult code = end_capture(stream, made);
    if (code == CUDA_SUCCESS) *graph = table<Graph>().add<CUgraph>(made);
    return code;
  });
}

FAKE_EXPORT CUresult cuStreamIsCapturing(CUstream handle, int* status) {
  return on_stream<"cuStreamIsCapturing">(handle, [&](Context&, Stream& stream) -> CUresult {
    return status == nullptr ? CUresult{CUDA_ERROR_INVALID_VALUE} : capture_status(stream, *status);
  });
}

FAKE_EXPORT CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  return plain<"cuThreadExchangeStreamCaptureMode">([&]() -> CUresult {
    if (mode == nullptr || *mode < 0 || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    *mode = exchange_mode(*mode);
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuGraphDestroy(CUgraph graph) {
  return plain<"cuGraphDestroy">(
      [&]() -> CUresult { return table<Graph>().take(graph) == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; });
}
