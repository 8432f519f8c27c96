// SPDX-License-Identifier: Apache-2.0
#include "capture.hpp"

#include <algorithm>
#include <atomic>
#include <vector>

#include "context.hpp"

namespace fake_cuda {

namespace {

struct Captures {
  std::mutex lock;
  std::vector<std::shared_ptr<Capture>> active;
  std::vector<Stream*> streams;  ///< that take part
  std::atomic<std::size_t> count{0};
};

Captures& captures() { return immortal<Captures>(); }

thread_local int thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

/// The captures' lock is held. What may not be in any captured stream of the legacy stream's context spoils it.
bool spoil_implicit(const Stream& legacy) {
  bool found = false;
  for (Stream* other : captures().streams) {
    if (&other->context != &legacy.context || other->type != Stream::Type::blocking) continue;
    other->capture->is_spoiled = found = true;
  }
  return found;
}

}  // namespace

CUresult begin_capture(Stream& stream, int mode) {
  if (stream.type == Stream::Type::legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (mode < 0 || mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
  const std::scoped_lock hold(captures().lock);
  if (stream.capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  stream.capture = std::make_shared<Capture>();
  stream.capture->origin = &stream;
  stream.capture->mode = mode;
  stream.capture->thread = std::this_thread::get_id();
  captures().active.push_back(stream.capture);
  captures().streams.push_back(&stream);
  captures().count = captures().active.size();
  return CUDA_SUCCESS;
}

CUresult end_capture(Stream& stream, std::shared_ptr<Graph>& graph) {
  const std::scoped_lock hold(captures().lock);
  const auto capture = stream.capture;
  if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  if (capture->origin != &stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != std::this_thread::get_id()) {
    return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  }
  std::erase_if(captures().streams, [&](Stream* member) {
    if (member->capture != capture) return false;
    member->capture = nullptr;
    return true;
  });
  std::erase(captures().active, capture);
  captures().count = captures().active.size();
  if (capture->is_spoiled) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  graph = std::make_shared<Graph>(Graph{capture->nodes});
  return CUDA_SUCCESS;
}

CUresult capture_status(Stream& stream, int& status) {
  status = CU_STREAM_CAPTURE_STATUS_NONE;
  const std::scoped_lock hold(captures().lock);
  if (stream.type == Stream::Type::legacy) {
    const bool implicit = std::any_of(captures().streams.begin(), captures().streams.end(), [&](const Stream* other) {
      return &other->context == &stream.context && other->type == Stream::Type::blocking;
    });
    return implicit ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
  }
  if (stream.capture != nullptr) {
    status = stream.capture->is_spoiled ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  }
  return CUDA_SUCCESS;
}

bool record(Stream& stream, std::size_t nodes, CUresult& code) {
  if (captures().count == 0) return false;
  const std::scoped_lock hold(captures().lock);
  if (stream.type == Stream::Type::legacy && spoil_implicit(stream)) {
    code = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    return true;
  }
  if (stream.capture == nullptr) return false;
  stream.capture->nodes += nodes;
  code = stream.capture->is_spoiled ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
  return true;
}

std::shared_ptr<Capture> capture_of(const Stream& stream) {
  if (captures().count == 0) return nullptr;
  const std::scoped_lock hold(captures().lock);
  return stream.capture;
}

CUresult join_capture(Stream& stream, const std::shared_ptr<Capture>& capture) {
  const std::scoped_lock hold(captures().lock);
  if (stream.capture == capture) return CUDA_SUCCESS;
  const bool over = std::find(captures().active.begin(), captures().active.end(), capture) == captures().active.end();
  if (over || stream.capture != nullptr || stream.type == Stream::Type::legacy) return CUDA_ERROR_CAPTURED_EVENT;
  stream.capture = capture;
  captures().streams.push_back(&stream);
  return CUDA_SUCCESS;
}

void forget_capture(Stream& stream) {
  const std::scoped_lock hold(captures().lock);
  if (stream.capture == nullptr) return;
  stream.capture->is_spoiled = true;
  if (stream.capture->origin == &stream) std::erase(captures().active, stream.capture);
  captures().count = captures().active.size();
  std::erase(captures().streams, &stream);
  stream.capture = nullptr;
}

CUresult refuse_captured(Stream& stream) {
  if (captures().count == 0) return CUDA_SUCCESS;
  const std::scoped_lock hold(captures().lock);
  if (stream.type == Stream::Type::legacy && spoil_implicit(stream)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  if (stream.capture == nullptr) return CUDA_SUCCESS;
  stream.capture->is_spoiled = true;
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult unsafe_call() {
  if (captures().count == 0 || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  const std::scoped_lock hold(captures().lock);
  CUresult code = CUDA_SUCCESS;
  for (const auto& capture : captures().active) {
    const bool mine = capture->thread == std::this_thread::get_id() && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    const bool anybodys =
        thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (!mine && !anybodys) continue;
    capture->is_spoiled = true;
    code = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return code;
}

int exchange_mode(int mode) { return std::exchange(thread_mode, mode); }

}  // namespace fake_cuda
