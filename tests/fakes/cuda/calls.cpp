// SPDX-License-Identifier: Apache-2.0
#include "calls.hpp"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

namespace fake_cuda {

namespace {

constinit Entry* entries = nullptr;

std::mutex misuse_lock;
std::uint64_t misuses = 0;
const char* last_misuse = "";

int number(const char* variable, int otherwise, int least, int most) {
  const char* text = std::getenv(variable);
  return text == nullptr || *text == '\0' ? otherwise : std::clamp(std::atoi(text), least, most);
}

}  // namespace

thread_local bool in_host_function = false;
std::atomic<int> initialized_by{0};

Entry::Entry(const char* called) : name(called), next(entries) { entries = this; }

Entry* Entry::first() { return entries; }

Entry* Entry::find(const char* name) {
  Entry* e = entries;
  while (e != nullptr && std::strcmp(e->name, name) != 0) e = e->next;
  return e;
}

int Entry::fault() {
  if (always.load(std::memory_order_acquire)) return code.load(std::memory_order_relaxed);
  std::uint64_t left = fails_in.load(std::memory_order_acquire);
  while (left != 0 && !fails_in.compare_exchange_weak(left, left - 1)) {
  }
  return left == 1 ? code.load(std::memory_order_relaxed) : 0;
}

void Settings::defaults() {
  gpus = number("FAKE_CUDA_GPUS", 2, 0, 8);
  connections = number("CUDA_DEVICE_MAX_CONNECTIONS", 8, 1, 32);
  driver_version = 13000;
  stream_words = dmabuf = true;
  dmabuf_pcie = reuse_streams = false;
  dmabuf_descriptor = -1;
  copy_bytes_per_second = copy_microseconds = 0;
}

Settings& settings() { return immortal<Settings>(); }

CUresult misuse(CUresult code, const std::string& what) {
  const std::scoped_lock hold(misuse_lock);
  // Kept, so that a reader's pointer stays good.
  last_misuse = immortal<std::set<std::string>>().insert(what).first->c_str();
  misuses++;
  return code;
}

std::uint64_t misuse_count() {
  const std::scoped_lock hold(misuse_lock);
  return misuses;
}

const char* misuse_text() {
  const std::scoped_lock hold(misuse_lock);
  return last_misuse;
}

void forget_misuse() {
  const std::scoped_lock hold(misuse_lock);
  misuses = 0;
  last_misuse = "";
}

CUresult admit(Entry& function, bool needs_init) {
  function.calls.fetch_add(1, std::memory_order_relaxed);
  if (in_host_function) {
    return misuse(CUDA_ERROR_UNKNOWN, std::string(function.name) + " was called inside a host function");
  }
  if (const int code = function.fault(); code != 0) return code;
  // A child has no GPU: the driver's state does not survive fork.
  if (needs_init && initialized_by.load(std::memory_order_acquire) != ::getpid()) return CUDA_ERROR_NOT_INITIALIZED;
  return CUDA_SUCCESS;
}

}  // namespace fake_cuda
