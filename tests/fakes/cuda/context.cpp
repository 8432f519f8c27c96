// SPDX-License-Identifier: Apache-2.0
#include "context.hpp"

#include <array>

#include "capture.hpp"
#include "event.hpp"
#include "kernels.hpp"

namespace fake_cuda {

namespace {

struct Contexts {
  std::array<Context, most_gpus> all;
  std::mutex lifetime;
  Contexts() {
    for (int gpu = 0; gpu < most_gpus; gpu++) {
      all[static_cast<std::size_t>(gpu)].gpu = gpu;
      all[static_cast<std::size_t>(gpu)].handle = reinterpret_cast<CUcontext>(next_handle());
    }
  }
};

Contexts& contexts() { return immortal<Contexts>(); }

}  // namespace

std::uint64_t next_handle() {
  // Above what a processor can address: whoever takes a handle for a pointer crashes.
  static std::atomic<std::uint64_t> last{std::uint64_t{0x00c0} << 48};
  return last += 16;
}

Context& primary(int gpu) { return contexts().all[static_cast<std::size_t>(gpu)]; }

Context* find_context(CUcontext handle) {
  for (Context& context : contexts().all) {
    if (context.handle == handle) return &context;
  }
  return nullptr;
}

std::size_t live_contexts() {
  std::size_t n = 0;
  for (const Context& context : contexts().all) n += context.retained.load() > 0;
  return n;
}

CUresult retain(int gpu, CUcontext& handle) {
  const std::scoped_lock hold(contexts().lifetime);
  Context& context = primary(gpu);
  if (context.retained == 0) {
    const std::scoped_lock order(context.order);
    context.error = 0;
    context.legacy = Stream::start(context, Stream::Type::legacy, CU_STREAM_DEFAULT);
  }
  context.retained++;
  handle = context.handle;
  return CUDA_SUCCESS;
}

CUresult release(int gpu) {
  const std::scoped_lock hold(contexts().lifetime);
  Context& context = primary(gpu);
  if (context.retained == 0) return misuse(CUDA_ERROR_INVALID_CONTEXT, "a primary context was released too often");
  if (--context.retained == 0) context.destroy();
  return CUDA_SUCCESS;
}

void Context::destroy() {
  const auto points = tails();
  for (const Point& point : points) {
    forget_capture(*point.stream);
    point.stream->cancel();
  }
  for (const Point& point : points) point.wait();
  const auto mine = [this](const auto& object) { return &object.context == this; };
  table<Stream>().remove_if(mine);
  table<Event>().remove_if(mine);
  table<Function>().remove_if(mine);
  table<Module>().remove_if(mine);
  memory().release_all(handle);
  const std::scoped_lock hold(order);
  legacy = nullptr;
  of_threads.clear();
  streams.clear();
}

std::vector<Context*>& context_stack() {
  thread_local std::vector<Context*> stack;
  return stack;
}

CUresult usable(Context* context) {
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  if (context->retained.load() == 0) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  return context->error.load();
}

std::shared_ptr<Stream> Context::add_stream(Stream::Type type, unsigned with) {
  // Destroyed streams that have come to their end are forgotten here.
  std::erase_if(streams, [](const auto& s) { return s->is_over(); });
  return streams.emplace_back(Stream::start(*this, type, with));
}

std::shared_ptr<Stream> Context::make_stream(Stream::Type type, unsigned with) {
  const std::scoped_lock hold(order);
  return add_stream(type, with);
}

std::vector<Point> Context::tails() {
  const std::scoped_lock hold(order);
  std::vector<Point> points;
  for (const auto& stream : streams) points.push_back(stream->tail());
  if (legacy != nullptr) points.push_back(legacy->tail());
  return points;
}

CUresult Context::submit(Stream& stream, std::vector<Task>&& tasks) {
  if (tasks.empty()) return CUDA_SUCCESS;
  const std::scoped_lock hold(order);
  CUresult code = CUDA_SUCCESS;
  if (record(stream, tasks.size(), code)) return code;
  // The legacy stream waits for all blocking ones, and they for it.
  auto& after = tasks.front().after;
  if (stream.type == Stream::Type::blocking && !legacy->is_idle()) after.push_back(legacy->tail());
  if (stream.type == Stream::Type::legacy) {
    for (const auto& other : streams) {
      if (other->type == Stream::Type::blocking && !other->is_idle()) after.push_back(other->tail());
    }
  }
  stream.push(std::move(tasks));
  return CUDA_SUCCESS;
}

CUresult Context::submit(Stream& stream, Task&& task) {
  std::vector<Task> tasks;
  tasks.push_back(std::move(task));
  return submit(stream, std::move(tasks));
}

CUresult find_stream(Context& current, CUstream handle, std::shared_ptr<Stream>& stream) {
  const auto number = reinterpret_cast<std::uint64_t>(handle);
  if (number > 2) {
    stream = table<Stream>().find(handle);
    if (stream == nullptr) return misuse(CUDA_ERROR_INVALID_HANDLE, "a stream was used that does not exist");
    return usable(&stream->context);
  }
  const std::scoped_lock hold(current.order);
  stream = current.legacy;
  if (number == 2) {
    auto& mine = current.of_threads[std::this_thread::get_id()];
    if (mine == nullptr) mine = current.add_stream(Stream::Type::blocking, CU_STREAM_DEFAULT);
    stream = mine;
  }
  return CUDA_SUCCESS;
}

}  // namespace fake_cuda
