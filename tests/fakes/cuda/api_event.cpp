// SPDX-License-Identifier: Apache-2.0
//
// The driver's functions for events.
#include "calls.hpp"
#include "capture.hpp"
#include "context.hpp"
#include "event.hpp"

using namespace fake_cuda;

namespace {

template <Name name, class Body>
CUresult with_event(CUevent handle, Body&& body) {
  return in_context<name>([&](Context& current) -> CUresult {
    const auto event = table<Event>().find(handle);
    if (event == nullptr) return misuse(CUDA_ERROR_INVALID_HANDLE, "an event was used that does not exist");
    return body(current, event);
  });
}

CUresult elapsed(float* milliseconds, const std::shared_ptr<Event>& start, CUevent end_handle) {
  const auto end = table<Event>().find(end_handle);
  if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (end == nullptr || ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) != 0) return CUDA_ERROR_INVALID_HANDLE;
  std::chrono::steady_clock::time_point times[2];
  for (int i = 0; i < 2; i++) {
    Event& event = *(i == 0 ? start : end);
    const std::scoped_lock hold(event.lock);
    if (event.recorded == 0) return CUDA_ERROR_INVALID_HANDLE;
    if (event.reached < event.recorded) return CUDA_ERROR_NOT_READY;
    times[i] = event.when;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(times[1] - times[0]).count();
  return CUDA_SUCCESS;
}

}  // namespace

FAKE_EXPORT CUresult cuEventCreate(CUevent* event, unsigned int flags) {
  return in_context<"cuEventCreate">([&](Context& current) -> CUresult {
    if (event == nullptr || flags > 7) return CUDA_ERROR_INVALID_VALUE;
    *event = table<Event>().add<CUevent>(std::make_shared<Event>(current, flags));
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuEventDestroy_v2(CUevent handle) {
  return with_event<"cuEventDestroy_v2">(handle, [&](Context&, const auto&) -> CUresult {
    table<Event>().take(handle);
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  return with_event<"cuEventRecord">(handle, [&](Context& current, const auto& event) -> CUresult {
    std::shared_ptr<Stream> stream;
    if (const CUresult code = find_stream(current, stream_handle, stream); code != CUDA_SUCCESS) return code;
    if (&stream->context != &event->context) {
      return misuse(CUDA_ERROR_INVALID_HANDLE, "an event was recorded on a stream of another context than its own");
    }
    Task task;
    task.kind = Task::Kind::mark;
    const auto capture = capture_of(*stream);
    if (capture == nullptr) {
      const std::scoped_lock hold(event->lock);
      event->capture = nullptr;
      task.run = [event, number = ++event->recorded] { event->reach(number); };
    } else {
      const std::scoped_lock hold(event->lock);
      event->capture = capture;
    }
    return stream->context.submit(*stream, std::move(task));
  });
}

FAKE_EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned int flags) {
  return on_stream<"cuStreamWaitEvent">(handle, [&](Context&, Stream& stream) -> CUresult {
    const auto event = table<Event>().find(event_handle);
    if (event == nullptr) return misuse(CUDA_ERROR_INVALID_HANDLE, "a stream waits for an event that does not exist");
    if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
    Task task;
    task.kind = Task::Kind::mark;
    std::shared_ptr<Capture> capture;
    {
      const std::scoped_lock hold(event->lock);
      capture = event->capture;
      task.run = [event, number = event->recorded] { event->wait(number); };
    }
    if (capture != nullptr) {
      if (const CUresult code = join_capture(stream, capture); code != CUDA_SUCCESS) return code;
    }
    return stream.context.submit(stream, std::move(task));
  });
}

FAKE_EXPORT CUresult cuEventQuery(CUevent handle) {
  return with_event<"cuEventQuery">(handle, [&](Context& current, const auto& event) -> CUresult {
    if (const CUresult code = unsafe_call(); code != CUDA_SUCCESS) return code;
    const std::scoped_lock hold(event->lock);
    if (event->capture != nullptr) return CUDA_ERROR_CAPTURED_EVENT;
    return event->reached < event->recorded ? CUresult{CUDA_ERROR_NOT_READY} : current.error.load();
  });
}

FAKE_EXPORT CUresult cuEventSynchronize(CUevent handle) {
  return with_event<"cuEventSynchronize">(handle, [&](Context& current, const auto& event) -> CUresult {
    std::unique_lock hold(event->lock);
    if (event->capture != nullptr) return CUDA_ERROR_CAPTURED_EVENT;
    const std::uint64_t number = event->recorded;
    hold.unlock();
    event->wait(number);
    return current.error;
  });
}

FAKE_EXPORT CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return with_event<"cuEventElapsedTime">(
      start, [&](Context&, const auto& event) { return elapsed(milliseconds, event, end); });
}

FAKE_EXPORT CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  return with_event<"cuEventElapsedTime_v2">(
      start, [&](Context&, const auto& event) { return elapsed(milliseconds, event, end); });
}
