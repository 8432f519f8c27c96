// SPDX-License-Identifier: Apache-2.0
#include "state.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace fake {

namespace {
constexpr std::size_t kAlignment = 2u << 20, kPage = 4096;
std::size_t whole_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
}  // namespace

State& state() {
  static State* all = new State;  // streams run until the process ends
  return *all;
}

Caller& caller() {
  thread_local Caller mine;
  return mine;
}

int note(int code) {
  if (code != kSuccess) caller().error = code;
  return code;
}

int admit(const char* function) {
  if (caller().is_host_function) return kUnknown;
  std::lock_guard guard(state().lock);
  Failing& entry = state().functions[function];
  ++entry.calls;
  return entry.at == entry.calls ? entry.code : kSuccess;
}

std::shared_ptr<Allocation> State::find(const void* address, std::size_t bytes) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  auto found = memory.upper_bound(at);
  if (found == memory.begin()) return nullptr;
  --found;
  const Allocation& allocation = *found->second;
  if (at - allocation.address >= allocation.size || bytes > allocation.size - (at - allocation.address)) return nullptr;
  return found->second;
}

std::shared_ptr<Stream> State::stream(void* handle) {
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  if (number <= 2) {
    std::shared_ptr<Stream>& stream = null_streams[caller().device * 3 + static_cast<int>(number)];
    if (stream == nullptr) stream = std::make_shared<Stream>(caller().device);
    return stream;
  }
  const auto found = streams.find(handle);
  return found != streams.end() ? found->second : nullptr;
}

Allocation::~Allocation() {
  if (inside != nullptr && descriptor >= 0) munmap(inside - lead, lead + mapped);
  if (mapped != 0) munmap(reinterpret_cast<void*>(address), mapped);
  if (descriptor >= 0) close(descriptor);
  if (is_signal) std::free(reinterpret_cast<void*>(address));
}

std::shared_ptr<Allocation> allocate(std::size_t bytes, int device) {
  auto made = std::make_shared<Allocation>();
  State& all = state();
  {
    std::lock_guard guard(all.lock);
    made->lead = all.lead;
    made->id = ++all.last_id;
  }
  made->size = bytes;
  made->device = device;
  made->agent = 0x1000 + static_cast<std::uint64_t>(device);
  const std::size_t mapped = whole_pages(bytes);
  made->descriptor = memfd_create("fake device memory", MFD_CLOEXEC);
  if (made->descriptor < 0 || ftruncate(made->descriptor, static_cast<off_t>(made->lead + mapped)) != 0) std::abort();
  void* inside = mmap(nullptr, made->lead + mapped, PROT_READ | PROT_WRITE, MAP_SHARED, made->descriptor, 0);
  auto* room = static_cast<unsigned char*>(
      mmap(nullptr, mapped + kAlignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (inside == MAP_FAILED || room == MAP_FAILED) std::abort();
  made->inside = static_cast<unsigned char*>(inside) + made->lead;
  const auto from = reinterpret_cast<std::uintptr_t>(room);
  const std::uintptr_t aligned = (from + kAlignment - 1) / kAlignment * kAlignment;
  if (aligned != from) munmap(room, aligned - from);
  if (aligned != from + kAlignment) munmap(reinterpret_cast<void*>(aligned + mapped), from + kAlignment - aligned);
  if (mmap(reinterpret_cast<void*>(aligned), mapped, PROT_NONE, MAP_SHARED | MAP_FIXED, made->descriptor,
           static_cast<off_t>(made->lead)) == MAP_FAILED) {
    std::abort();
  }
  made->address = aligned;
  made->mapped = mapped;
  std::lock_guard guard(all.lock);
  all.memory[aligned] = made;
  return made;
}

int export_memory(Allocation& allocation) {
  State& all = state();
  if (all.exported_number != 0) return all.exported_number;
  int number = fcntl(allocation.descriptor, F_DUPFD, 3);  // without close-on-exec, as some releases do
  if (all.exported_size != 0) {
    close(number);
    number = memfd_create("fake export", 0);
    if (ftruncate(number, static_cast<off_t>(all.exported_size)) != 0) std::abort();
  }
  switch (all.migration) {
    case FakeMigration::none: break;
    case FakeMigration::to_host: allocation.type = kTypeHost; break;
    case FakeMigration::to_managed: allocation.type = kTypeManaged; break;
    case FakeMigration::to_other_agent: allocation.agent = 1; break;
    case FakeMigration::to_other_device: allocation.device ^= 1; break;
  }
  return number;
}

// --- Streams

Stream::~Stream() {
  drain();
  {
    std::lock_guard guard(lock);
    is_ending = true;
    changed.notify_all();
  }
  thread.join();
}

void Stream::run() {
  std::unique_lock guard(lock);
  while (true) {
    changed.wait(guard, [this] { return is_ending || !work.empty(); });
    if (work.empty()) return;
    std::function<void()> next = std::move(work.front());
    work.pop_front();
    is_busy = true;
    guard.unlock();
    next();
    next = nullptr;
    guard.lock();
    is_busy = false;
    changed.notify_all();
  }
}

void Stream::push(std::function<void()> next) {
  std::lock_guard guard(lock);
  work.push_back(std::move(next));
  changed.notify_all();
}

void Stream::drain() {
  std::unique_lock guard(lock);
  changed.wait(guard, [this] { return work.empty() && !is_busy; });
}

}  // namespace fake
