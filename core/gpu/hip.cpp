// SPDX-License-Identifier: Apache-2.0
#include "gpu/hip.hpp"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "gpu/hip_scope.hpp"

namespace ugds::gpu {

namespace {

constexpr int kDefaultQueues = 4;  // GPU_MAX_HW_QUEUES, where the environment does not say

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

int errno_of(int code) {
  switch (code) {
    case hip_api::kInvalidValue: return EINVAL;
    case hip_api::kOutOfMemory: return ENOMEM;
    case hip_api::kNoDevice:
    case hip_api::kInvalidDevice: return ENODEV;
    case hip_api::kAlreadyRegistered: return EBUSY;
    case hip_api::kNotSupported: return EOPNOTSUPP;
    default: return EIO;
  }
}

/// The numbers that a list such as "0,2" names; false where it is no such list.
bool parse_list(std::string_view text, std::vector<int>& numbers) {
  while (true) {
    int number = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc{} || number < 0) return false;
    numbers.push_back(number);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    if (text.empty()) return true;
    if (text.front() != ',') return false;
    text.remove_prefix(1);
  }
}

}  // namespace

// --- Opening

std::unique_ptr<HipRuntime> HipRuntime::open(std::string& why) {
  std::unique_ptr<HipRuntime> runtime(new HipRuntime);
  hip_api::Api& api = runtime->api_;
  if (!api.load(why)) {
    why += "; install ROCm 6 or later, or name the library in UGDS_HIP_LIBRARY";
    return nullptr;
  }
  if (const int code = api.init(0); code != hip_api::kSuccess) {
    why = "hipInit failed: " + runtime->words(code);
    return nullptr;
  }
  if (const int code = api.runtime_version(&runtime->version_); code != hip_api::kSuccess) {
    why = "hipRuntimeGetVersion failed: " + runtime->words(code);
    return nullptr;
  }
  if (runtime->version_ < hip_api::kOldestVersion) {
    why = runtime->driver() + " is too old; install ROCm 6 or later";
    return nullptr;
  }
  if (!runtime->choose_devices(why)) return nullptr;
  // HIP has initialised HSA already: this only counts.
  if (api.hsa_init != nullptr && api.hsa_init() != 0) api.hsa_export = nullptr, api.hsa_export_v2 = nullptr;
  return runtime;
}

bool HipRuntime::choose_devices(std::string& why) {
  int count = 0;
  if (const int code = api_.device_count(&count); code != hip_api::kSuccess || count == 0) {
    why = code != hip_api::kSuccess ? "hipGetDeviceCount failed: " + words(code) : "HIP knows no GPU";
    return false;
  }
  for (int i = 0; i < count; ++i) idle_.push_back(std::make_unique<IdleStreams>());
  const char* named = environment("UGDS_GPUS");
  if (named == nullptr || *named == '\0') {
    for (int i = 0; i < count; ++i) devices_.push_back(i);
    return true;
  }
  if (!parse_list(named, devices_)) {
    why = std::string("UGDS_GPUS=") + named + " is no list of numbers such as 0,2";
    return false;
  }
  std::sort(devices_.begin(), devices_.end());
  devices_.erase(std::unique(devices_.begin(), devices_.end()), devices_.end());
  if (devices_.back() >= count) {
    why = std::string("UGDS_GPUS=") + named + " names a GPU that is not there: HIP knows " + std::to_string(count);
    return false;
  }
  return true;
}

HipRuntime::~HipRuntime() {
  for (const Word& word : spare_words_) static_cast<void>(api_.free(pointer(word.device)));
  for (std::size_t i = 0; i < idle_.size(); ++i) {
    for (StreamHandle stream : idle_[i]->streams) {
      if (stream != nullptr) destroy_stream(Place{static_cast<int>(i), nullptr}, stream);
    }
  }
}

bool HipRuntime::is_usable(int device) const { return std::binary_search(devices_.begin(), devices_.end(), device); }

// --- In words

std::string HipRuntime::driver() const {
  return "HIP " + std::to_string(version_ / 10000000) + "." + std::to_string(version_ / 100000 % 100) + "." +
         std::to_string(version_ % 100000);
}

std::string HipRuntime::device_name(int device) const {
  char name[256] = "";
  if (!is_usable(device)) {
    fail(ENODEV, "name GPU", "no GPU " + std::to_string(device) + " of HIP may be used", "see UGDS_GPUS");
  }
  if (const int code = api_.device_name(name, sizeof name, device); code != hip_api::kSuccess) {
    refuse(code, "name GPU", "hipDeviceGetName");
  }
  return name;
}

std::string HipRuntime::words(int code) const {
  const char* name = api_.error_name(code);
  const char* text = api_.error_string(code);
  return std::string(name != nullptr ? name : "an unknown error") + " (" + std::to_string(code) + ")" +
         (text != nullptr ? std::string(": ") + text : "");
}

void HipRuntime::refuse(int code, const char* operation, const char* function, const std::string& hint) const {
  fail(errno_of(code), operation, std::string(function) + " failed: " + words(code), hint);
}

// --- Memory

std::optional<Allocation> HipRuntime::find(Address address) {
  Scope scope(api_);
  hip_api::PointerAttributes attributes{};
  const int code = api_.pointer_attributes(&attributes, pointer(address));
  if (code == hip_api::kInvalidValue) return std::nullopt;  // how releases before 6.0 said: none of mine
  if (code != hip_api::kSuccess) refuse(code, "find memory", "hipPointerGetAttributes");
  if (attributes.is_managed != 0 || attributes.type == hip_api::kTypeManaged) {
    fail(EOPNOTSUPP, "find memory", "the memory is managed by HIP: it moves between the GPU and the host",
         "allocate it with hipMalloc");
  }
  if (attributes.type != hip_api::kTypeDevice) return std::nullopt;
  if (!is_usable(attributes.device)) {
    fail(ENODEV, "find memory",
         "the memory is that of GPU " + std::to_string(attributes.device) + ", which UGDS_GPUS leaves out",
         "name that GPU in UGDS_GPUS too");
  }
  void* base = nullptr;
  std::size_t size = 0;
  if (const int range = api_.address_range(&base, &size, pointer(address)); range != hip_api::kSuccess) {
    refuse(range, "find memory", "hipMemGetAddressRange");
  }
  // Releases differ in whether they write 4 or 8 bytes.
  std::uint64_t id = 0;
  if (api_.pointer_attribute(&id, hip_api::kPointerBufferId, pointer(address)) != hip_api::kSuccess) id = 0;
  return Allocation{reinterpret_cast<Address>(base), size, id, Place{attributes.device, nullptr}};
}

bool HipRuntime::is_alive(const Allocation& allocation, Address address) noexcept {
  Scope scope(api_);
  hip_api::PointerAttributes attributes{};
  if (api_.pointer_attributes(&attributes, pointer(address)) != hip_api::kSuccess) return false;
  if (attributes.type != hip_api::kTypeDevice || attributes.device != allocation.place.device) return false;
  void* base = nullptr;
  std::size_t size = 0;
  if (api_.address_range(&base, &size, pointer(address)) != hip_api::kSuccess) return false;
  if (reinterpret_cast<Address>(base) != allocation.base || size != allocation.size) return false;
  if (allocation.id == 0) return true;
  std::uint64_t id = 0;
  return api_.pointer_attribute(&id, hip_api::kPointerBufferId, pointer(address)) == hip_api::kSuccess &&
         id == allocation.id;
}

Address HipRuntime::pin(void* address, std::uint64_t size) {
  Scope scope(api_);
  if (const int code = api_.host_register(address, size, hip_api::kRegisterPortableMapped); code != hip_api::kSuccess) {
    refuse(code, "pin memory", "hipHostRegister");
  }
  void* device = nullptr;
  if (const int code = api_.host_device_pointer(&device, address, 0); code != hip_api::kSuccess) {
    static_cast<void>(api_.host_unregister(address));
    refuse(code, "pin memory", "hipHostGetDevicePointer");
  }
  return reinterpret_cast<Address>(device);
}

void HipRuntime::unpin(void* address) noexcept {
  Scope scope(api_);
  static_cast<void>(api_.host_unregister(address));
}

Word HipRuntime::make_word() {
  Scope scope(api_, devices_.front());
  if (scope.code() != hip_api::kSuccess) refuse(scope.code(), "make a word", "hipSetDevice");
  std::lock_guard guard(words_lock_);
  Word word;
  if (!spare_words_.empty()) {
    word = spare_words_.back();
    spare_words_.pop_back();
  } else {
    word = allocate_word();
  }
  word.host->store(0, std::memory_order_release);
  return word;
}

Word HipRuntime::allocate_word() {
  if (api_.malloc_with_flags == nullptr) {
    fail(EOPNOTSUPP, "make a word", driver() + " has no hipExtMallocWithFlags", "install a newer ROCm");
  }
  spare_words_.reserve(words_ + 1);  // room for each of them to come back
  void* memory = nullptr;
  // The value of an HSA signal, and such a signal has its cache line to itself.
  if (const int code = api_.malloc_with_flags(&memory, sizeof(std::uint64_t), hip_api::kSignalMemory);
      code != hip_api::kSuccess) {
    refuse(code, "make a word", "hipExtMallocWithFlags");
  }
  ++words_;
  return {static_cast<std::atomic<std::uint64_t>*>(memory), reinterpret_cast<Address>(memory)};
}

void HipRuntime::free_word(const Word& word) noexcept {
  if (word.host == nullptr) return;
  // hipFree would wait until all streams of the GPU are done, those that wait for other words too.
  std::lock_guard guard(words_lock_);
  spare_words_.push_back(word);
}

// --- Streams: set-up

Place HipRuntime::place_of(int device) {
  if (!is_usable(device)) {
    fail(ENODEV, "find GPU", "no GPU " + std::to_string(device) + " of HIP may be used", "see UGDS_GPUS");
  }
  return Place{device, nullptr};
}

StreamHandle HipRuntime::make_stream(const Place& place) {
  Scope scope(api_, place.device);
  if (scope.code() != hip_api::kSuccess) refuse(scope.code(), "make a stream", "hipSetDevice");
  StreamHandle stream = nullptr;
  if (const int code = api_.stream_create(&stream, hip_api::kStreamNonBlocking); code != hip_api::kSuccess) {
    refuse(code, "make a stream", "hipStreamCreateWithFlags");
  }
  return stream;
}

void HipRuntime::destroy_stream(const Place& place, StreamHandle stream) noexcept {
  Scope scope(api_, place.device);
  static_cast<void>(api_.stream_destroy(stream));
}

bool HipRuntime::has_words(int device) {
  if (api_.malloc_with_flags == nullptr || api_.write_value == nullptr || api_.wait_value == nullptr) return false;
  Scope scope(api_);
  int can = 0;
  return api_.device_attribute(&can, hip_api::kAttributeCanWaitValue, device) == hip_api::kSuccess && can != 0;
}

int HipRuntime::connections(int) {
  const char* named = runtime_environment("GPU_MAX_HW_QUEUES");
  const int queues = named != nullptr ? std::atoi(named) : kDefaultQueues;
  return queues > 0 ? queues : kDefaultQueues;
}

void HipRuntime::load_kernels(const Place&) {
  fail(EOPNOTSUPP, "load the copy kernel",
       "late-bound requests that are staged are not there for HIP, which has no copy kernel here",
       "give offsets and sizes as numbers, or use memory with a direct route");
}

// --- Streams: requests

int HipRuntime::enqueue_words(const Place& place, StreamHandle stream, std::span<const WordOp> ops) noexcept {
  if (api_.write_value == nullptr || api_.wait_value == nullptr) return hip_api::kNotSupported;
  Scope scope(api_, place.device);
  int code = scope.code();
  for (const WordOp& op : ops) {
    if (code != hip_api::kSuccess) break;
    // HSA compares signals as signed numbers: beyond that a wait would go on at once, or never.
    if (op.value > INT64_MAX) return hip_api::kInvalidValue;
    code = op.kind == WordOp::Kind::write
               ? api_.write_value(stream, pointer(op.word), op.value, 0)
               : api_.wait_value(stream, pointer(op.word), op.value, hip_api::kWaitAtLeast, ~std::uint64_t{0});
  }
  return code;
}

int HipRuntime::enqueue_to_device(const Place& place, StreamHandle stream, Address to, const void* from,
                                  std::uint64_t bytes) noexcept {
  Scope scope(api_, place.device);
  if (scope.code() != hip_api::kSuccess) return scope.code();
  return api_.copy_to_device(pointer(to), const_cast<void*>(from), bytes, stream);
}

int HipRuntime::enqueue_from_device(const Place& place, StreamHandle stream, void* to, Address from,
                                    std::uint64_t bytes) noexcept {
  Scope scope(api_, place.device);
  if (scope.code() != hip_api::kSuccess) return scope.code();
  return api_.copy_from_device(to, pointer(from), bytes, stream);
}

int HipRuntime::enqueue_copies(const Place&, StreamHandle, Address, std::uint32_t, std::uint64_t) noexcept {
  return hip_api::kNotSupported;
}

int HipRuntime::enqueue_call(const Place& place, StreamHandle stream, void (*function)(void*), void* context) noexcept {
  Scope scope(api_, place.device);
  if (scope.code() != hip_api::kSuccess) return scope.code();
  return api_.launch_host(stream, function, context);
}

int HipRuntime::is_capturing(const Place& place, StreamHandle stream, bool& capturing) noexcept {
  Scope scope(api_, place.device);
  if (scope.code() != hip_api::kSuccess) return scope.code();
  int status = hip_api::kCaptureNone;
  const int code = api_.stream_is_capturing(stream, &status);
  capturing = code == hip_api::kCaptureImplicit || status != hip_api::kCaptureNone;
  return code == hip_api::kCaptureImplicit ? hip_api::kSuccess : code;
}

int HipRuntime::synchronize(const Place& place, StreamHandle stream) noexcept {
  Scope scope(api_, place.device);
  if (scope.code() != hip_api::kSuccess) return scope.code();
  return api_.stream_synchronize(stream);
}

// --- Copies in the calling thread

StreamHandle HipRuntime::take_stream(int device, int& code) noexcept {
  IdleStreams& idle = *idle_[static_cast<std::size_t>(device)];
  {
    std::lock_guard guard(idle.lock);
    for (StreamHandle& stream : idle.streams) {
      if (stream != nullptr) return std::exchange(stream, nullptr);
    }
  }
  StreamHandle stream = nullptr;
  code = api_.stream_create(&stream, hip_api::kStreamNonBlocking);
  return stream;
}

void HipRuntime::give_stream(int device, StreamHandle stream) noexcept {
  IdleStreams& idle = *idle_[static_cast<std::size_t>(device)];
  {
    std::lock_guard guard(idle.lock);
    for (StreamHandle& free : idle.streams) {
      if (free == nullptr) {
        free = stream;
        return;
      }
    }
  }
  static_cast<void>(api_.stream_destroy(stream));
}

template <class Enqueue>
int HipRuntime::copy_now(const Place& place, Enqueue enqueue) noexcept {
  Scope scope(api_, place.device);
  int code = scope.code();
  if (code != hip_api::kSuccess) return code;
  const StreamHandle stream = take_stream(place.device, code);
  if (code != hip_api::kSuccess) return code;
  code = enqueue(stream);
  const int ended = api_.stream_synchronize(stream);
  give_stream(place.device, stream);
  return code != hip_api::kSuccess ? code : ended;
}

int HipRuntime::copy_to_device(const Place& place, Address to, const void* from, std::uint64_t bytes) noexcept {
  return copy_now(place, [&](StreamHandle stream) {
    return api_.copy_to_device(pointer(to), const_cast<void*>(from), bytes, stream);
  });
}

int HipRuntime::copy_from_device(const Place& place, void* to, Address from, std::uint64_t bytes) noexcept {
  return copy_now(place, [&](StreamHandle stream) { return api_.copy_from_device(to, pointer(from), bytes, stream); });
}

// --- The process's

Runtime* hip(std::string* why) {
  struct Tried {
    std::string why;
    HipRuntime* runtime = HipRuntime::open(why).release();
  };
  static const Tried* tried = new Tried;  // never destroyed: other threads may be inside until the process ends
  if (tried->runtime == nullptr && why != nullptr) *why = tried->why;
  return tried->runtime;
}

}  // namespace ugds::gpu
