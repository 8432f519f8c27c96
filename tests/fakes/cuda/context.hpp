// SPDX-License-Identifier: Apache-2.0
//
// Contexts, which are the primary ones of the GPUs, the threads' current ones, and the handles of everything in them.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "calls.hpp"
#include "memory.hpp"
#include "stream.hpp"

namespace fake_cuda {

/// A handle that was never given out before and that nobody can follow: a stale one is found out.
std::uint64_t next_handle();

/// Objects by handle.
template <class T>
class Table {
 public:
  /// `again`: under the handle that was given back last, where there is one.
  template <class Handle>
  Handle add(std::shared_ptr<T> object, bool again = false) {
    const std::scoped_lock hold(lock_);
    const std::uint64_t free = std::exchange(given_back_, 0);
    const std::uint64_t handle = again && free != 0 ? free : next_handle();
    objects_.emplace(handle, std::move(object));
    return reinterpret_cast<Handle>(handle);
  }
  template <class Handle>
  std::shared_ptr<T> find(Handle handle) const {
    const std::scoped_lock hold(lock_);
    const auto found = objects_.find(reinterpret_cast<std::uint64_t>(handle));
    return found == objects_.end() ? nullptr : found->second;
  }
  template <class Handle>
  std::shared_ptr<T> take(Handle handle) {
    const std::scoped_lock hold(lock_);
    const auto found = objects_.find(reinterpret_cast<std::uint64_t>(handle));
    if (found == objects_.end()) return nullptr;
    auto object = std::move(found->second);
    given_back_ = found->first;
    objects_.erase(found);
    return object;
  }
  template <class Which>
  void remove_if(Which&& which) {
    const std::scoped_lock hold(lock_);
    std::erase_if(objects_, [&](const auto& entry) { return which(*entry.second); });
  }
  std::size_t size() const {
    const std::scoped_lock hold(lock_);
    return objects_.size();
  }

 private:
  mutable std::mutex lock_;
  std::map<std::uint64_t, std::shared_ptr<T>> objects_;
  std::uint64_t given_back_ = 0;  ///< a handle that is nobody's now; 0: none
};

template <class T>
Table<T>& table() {
  return immortal<Table<T>>();
}

struct Context {
  int gpu = 0;
  CUcontext handle = nullptr;
  std::atomic<int> retained{0};
  std::atomic<int> error{0};  ///< a kernel went wrong: every call says so from then on, as with the driver

  /// Held while work is enqueued, so that the order of streams is one order.
  std::mutex order;
  std::shared_ptr<Stream> legacy;
  std::map<std::thread::id, std::shared_ptr<Stream>> of_threads;
  std::vector<std::shared_ptr<Stream>> streams;  ///< all but legacy; destroyed ones while they have work

  void fail(int code) { error = code; }
  std::shared_ptr<Stream> make_stream(Stream::Type type, unsigned flags);
  /// Where all of its streams are now, destroyed ones too.
  std::vector<Point> tails();
  CUresult submit(Stream& stream, std::vector<Task>&& tasks);
  CUresult submit(Stream& stream, Task&& task);
  void destroy();

 private:
  std::shared_ptr<Stream> add_stream(Stream::Type type, unsigned with);
  friend CUresult find_stream(Context&, CUstream, std::shared_ptr<Stream>&);
};

/// The primary context of a GPU.
Context& primary(int gpu);
Context* find_context(CUcontext handle);
CUresult retain(int gpu, CUcontext& handle);
CUresult release(int gpu);
std::size_t live_contexts();

/// The stream of a handle: the context's legacy one for 0 and 1, the thread's for 2.
CUresult find_stream(Context& current, CUstream handle, std::shared_ptr<Stream>& stream);

/// The thread's contexts; the last is current.
std::vector<Context*>& context_stack();

CUresult usable(Context* context);

/// A function that needs a current context.
template <Name name, class Body>
CUresult in_context(Body&& body) {
  if (const CUresult refused = admit(entry<name>, true); refused != CUDA_SUCCESS) return refused;
  const auto& stack = context_stack();
  Context* const current = stack.empty() ? nullptr : stack.back();
  const CUresult refused = usable(current);
  return refused != CUDA_SUCCESS ? refused : body(*current);
}

/// A function that needs a current context and a stream.
template <Name name, class Body>
CUresult on_stream(CUstream handle, Body&& body) {
  return in_context<name>([&](Context& current) -> CUresult {
    std::shared_ptr<Stream> stream;
    const CUresult refused = find_stream(current, handle, stream);
    return refused != CUDA_SUCCESS ? refused : body(current, *stream);
  });
}

}  // namespace fake_cuda
