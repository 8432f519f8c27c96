// SPDX-License-Identifier: Apache-2.0
//
// CUDA by its driver API.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "base/units.hpp"
#include "gpu/cuda_driver.hpp"
#include "gpu/owner.hpp"
#include "gpu/runtime.hpp"
#include "gpu/visible.hpp"
#include "gpu/word_pool.hpp"

namespace ugds::gpu {

namespace {

constexpr const char* kOverride = "UGDS_CUDA_LIBRARY";
constexpr unsigned kCopyBlocks = 32, kCopyThreads = 256;
/// Of the kernel of pieces: more fill no bus, and would need a processor of the GPU's that nothing else runs on.
constexpr std::uint64_t kPieceThreads = 512;
/// One turn of a block's threads, 16 bytes each.
constexpr std::uint64_t kBytesOfBlock = kCopyThreads * 16;
/// Word operations that are enqueued by one call.
constexpr std::size_t kMostWords = 8;
/// Copies in callers' threads that may run at once on one GPU.
constexpr std::size_t kCopyStreams = 8;
/// What such a copy goes through: memory of the program need not be pinned.
constexpr std::uint64_t kCopyBytes = 1024 * 1024;

class CudaRuntime;

/// Makes a context current in the calling thread for as long as it lives. Nothing is done where it is already.
class Entered {
 public:
  Entered(const CudaDriver& driver, CuContext context) : driver_(driver), outer_(inside_) {
    CuContext now = nullptr;
    if (context == nullptr || context == inside_) return;
    if (driver_.context_current(&now) != 0 || now != context) {
      code_ = driver_.context_push(context);
      pushed_ = code_ == 0;
    }
    if (code_ == 0) inside_ = context;
  }
  ~Entered() {
    CuContext popped = nullptr;
    if (pushed_) driver_.context_pop(&popped);
    inside_ = outer_;
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  /// 0, or why the context could not be entered.
  CuResult code() const { return code_; }

 private:
  /// What is current because of an outer one of these: nothing of the program's runs before that has ended.
  static thread_local CuContext inside_;
  const CudaDriver& driver_;
  const CuContext outer_;
  CuResult code_ = 0;
  bool pushed_ = false;
};
thread_local CuContext Entered::inside_ = nullptr;

std::string words_of(const CudaDriver& driver, CuResult code) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.error_name(code, &name) != 0 || name == nullptr) name = "CUDA error";
  if (driver.error_string(code, &text) != 0 || text == nullptr) text = "unknown to this driver";
  return std::string(name) + " (" + std::to_string(code) + "): " + text;
}

class CudaRuntime final : public Runtime {
 public:
  CudaRuntime(const CudaDriver& driver, int devices, int version)
      : driver_(driver), devices_(devices), version_(version), gpus_(static_cast<std::size_t>(devices)) {}

  Backend backend() const override { return Backend::cuda; }
  const char* name() const override { return "cuda"; }
  std::string driver() const override {
    return "CUDA driver " + std::to_string(version_ / 1000) + "." + std::to_string(version_ % 1000 / 10);
  }
  int device_count() const override { return devices_; }
  std::string device_name(int device) const override {
    CuDevice id = 0;
    char name[128] = "";
    if (driver_.device_get(&id, device) != 0 || driver_.device_name(name, sizeof name, id) != 0) return "unknown GPU";
    return name;
  }
  std::string words(int code) const override { return words_of(driver_, code); }

  std::optional<Allocation> find(Address address) override;
  bool is_alive(const Allocation& allocation, Address address) noexcept override;
  Descriptor export_dmabuf(const Place& place, Address address, std::uint64_t size, bool pcie) override;
  Address pin(void* address, std::uint64_t size) override;
  void unpin(void* address) noexcept override { driver_.host_unregister(address); }
  Word make_word() override { return words_.take(*this); }
  void free_word(const Word& word) noexcept override { words_.give_back(word); }

  Place place_of(int device) override { return {device, primary(device)}; }
  Place place_of_stream(StreamHandle stream, const Place& otherwise) override;
  StreamHandle make_stream(const Place& place) override;
  void destroy_stream(const Place& place, StreamHandle stream) noexcept override {
    const Entered entered(driver_, place.context);
    driver_.stream_destroy(stream);
  }
  bool has_words(int device) override {
    return driver_.batch_words != nullptr && attribute(device, kCuCan64BitWords) != 0;
  }
  int connections(int) override {
    const char* text = runtime_environment("CUDA_DEVICE_MAX_CONNECTIONS");
    const long number = text != nullptr ? std::strtol(text, nullptr, 10) : 0;
    return number >= 1 && number <= 32 ? static_cast<int>(number) : 8;
  }
  void load_kernels(const Place& place) override;
  bool kernels_see_devices(int device) override { return attribute(device, kCuCanFlushRemoteWrites) == 0; }

  void within(const Place& place, void (*body)(void*), void* context) override {
    const Entered entered(driver_, place.context);
    body(context);
  }
  int enqueue_words(const Place& place, StreamHandle stream, std::span<const WordOp> ops) noexcept override;
  int enqueue_to_device(const Place& place, StreamHandle stream, Address to, const void* from,
                        std::uint64_t bytes) noexcept override {
    return in(place, [&] { return driver_.to_device(to, from, bytes, stream); });
  }
  int enqueue_from_device(const Place& place, StreamHandle stream, void* to, Address from,
                          std::uint64_t bytes) noexcept override {
    return in(place, [&] { return driver_.from_device(to, from, bytes, stream); });
  }
  int enqueue_copies(const Place& place, StreamHandle stream, Address orders, std::uint32_t count,
                     std::uint64_t most) noexcept override;
  int enqueue_pieces(const Place& place, StreamHandle stream, const Pieces& pieces) noexcept override;
  int enqueue_call(const Place& place, StreamHandle stream, void (*function)(void*), void* context) noexcept override {
    return in(place, [&] { return driver_.host_function(stream, function, context); });
  }
  int is_capturing(const Place& place, StreamHandle stream, bool& capturing) noexcept override {
    int status = 0;
    const int code = in(place, [&] { return driver_.stream_capturing(stream, &status); });
    capturing = status != 0;
    return code;
  }
  bool is_idle(const Place& place, StreamHandle stream) noexcept override {
    if (driver_.stream_flags == nullptr || driver_.stream_query == nullptr) return false;
    return in(place, [&] {
             // Any other stream waits for what is pending on the legacy one.
             unsigned flags = 0;
             if (const int code = driver_.stream_flags(stream, &flags); code != 0) return code;
             return (flags & kCuStreamNonBlocking) == 0 ? kCuInvalidValue : driver_.stream_query(stream);
           }) == 0;
  }
  int poll(const Place& place, StreamHandle stream, bool& ended) noexcept override {
    ended = false;
    if (driver_.stream_query == nullptr) return 0;
    const int code = in(place, [&] { return driver_.stream_query(stream); });
    ended = code == 0;
    return code == kCuNotReady ? 0 : code;
  }
  int synchronize(const Place& place, StreamHandle stream) noexcept override {
    return in(place, [&] { return driver_.stream_synchronize(stream); });
  }
  int copy_to_device(const Place& place, Address to, const void* from, std::uint64_t bytes) noexcept override {
    return copy(place, bytes, [&](CopyStream& one, std::uint64_t at, std::uint64_t size) {
      std::memcpy(one.bounce, static_cast<const std::byte*>(from) + at, size);
      const int code = driver_.to_device(to + at, one.bounce, size, one.stream);
      return code != 0 ? code : driver_.stream_synchronize(one.stream);
    });
  }
  int copy_from_device(const Place& place, void* to, Address from, std::uint64_t bytes) noexcept override {
    return copy(place, bytes, [&](CopyStream& one, std::uint64_t at, std::uint64_t size) {
      int code = driver_.from_device(one.bounce, from + at, size, one.stream);
      if (code == 0) code = driver_.stream_synchronize(one.stream);
      if (code == 0) std::memcpy(static_cast<std::byte*>(to) + at, one.bounce, size);
      return code;
    });
  }

 private:
  /// What is made once for a GPU, or once for a context of it.
  struct Gpu {
    std::mutex lock;
    CuContext primary = nullptr;
    std::array<std::atomic<int>, 2> attributes{-1, -1};  ///< -1: not asked for yet
  };
  struct Kernels {
    CuFunction copy = nullptr, pieces = nullptr;
  };
  struct CopyStream {
    std::mutex lock;
    CuStream stream = nullptr;
    std::byte* bounce = nullptr;
  };
  using CopyStreams = std::array<CopyStream, kCopyStreams>;

  template <class Body>
  int in(const Place& place, Body&& body) const noexcept {
    const Entered entered(driver_, place.context);
    return entered.code() != 0 ? entered.code() : body();
  }
  template <class Body>
  int copy(const Place& place, std::uint64_t bytes, Body&& body) noexcept {
    CopyStreams* streams = copy_streams(place);
    if (streams == nullptr) return kCuInvalidValue;
    std::unique_lock<std::mutex> taken;
    CopyStream* mine = nullptr;
    for (CopyStream& one : *streams) {
      taken = std::unique_lock(one.lock, std::try_to_lock);
      mine = &one;
      if (taken) break;
    }
    if (!taken) taken = std::unique_lock(mine->lock);
    return in(place, [&] {
      int code = 0;
      for (std::uint64_t at = 0; at < bytes && code == 0; at += kCopyBytes) {
        code = body(*mine, at, std::min(bytes - at, kCopyBytes));
      }
      return code;
    });
  }

  int first_visible() const {
    int first = 0;
    while (first + 1 < devices_ && !is_visible(first)) ++first;
    return first;
  }
  CuContext primary(int device);
  int attribute(int device, CuDeviceAttribute attribute);
  CopyStreams* copy_streams(const Place& place) noexcept;
  Kernels kernels_of(const Place& place) noexcept;
  int launch(CuFunction kernel, CuStream stream, const Pieces& pieces) const noexcept;
  [[noreturn]] void refuse(CuResult code, const char* operation, const std::string& what,
                           const std::string& hint = "") const {
    const bool memory = code == 2;
    fail(memory ? ENOMEM : EOPNOTSUPP, operation, what + ": " + words(code), hint);
  }

  const CudaDriver driver_;
  const int devices_, version_;
  std::vector<Gpu> gpus_;
  std::mutex loading_lock_, contexts_lock_;
  std::map<CuContext, Kernels> kernels_;
  std::map<CuContext, std::unique_ptr<CopyStreams>> copy_streams_;
  WordPool words_;
};

CuContext CudaRuntime::primary(int device) {
  if (device < 0 || device >= devices_)
    fail(ENODEV, "gpu", "there is no GPU " + std::to_string(device) + ": " + std::to_string(devices_) + " are there",
         "number them from 0");
  require_visible(device);
  Gpu& gpu = gpus_[static_cast<std::size_t>(device)];
  const std::lock_guard guard(gpu.lock);
  if (gpu.primary == nullptr) {
    CuDevice id = 0;
    CuContext made = nullptr;
    CuResult code = driver_.device_get(&id, device);
    if (code == 0) code = driver_.primary_retain(&made, id);
    if (code != 0) refuse(code, "gpu", "no context on GPU " + std::to_string(device));
    gpu.primary = made;
  }
  return gpu.primary;
}

int CudaRuntime::attribute(int device, CuDeviceAttribute attribute) {
  if (device < 0 || device >= devices_) return 0;
  Gpu& gpu = gpus_[static_cast<std::size_t>(device)];
  std::atomic<int>& known = gpu.attributes[attribute == kCuCan64BitWords];
  if (const int value = known.load(std::memory_order_relaxed); value >= 0) return value;
  CuDevice id = 0;
  int value = 0;
  if (driver_.device_get(&id, device) != 0 || driver_.device_attribute(&value, attribute, id) != 0) value = 0;
  known.store(value, std::memory_order_relaxed);
  return value;
}

std::optional<Allocation> CudaRuntime::find(Address address) {
  unsigned type = 0;
  if (driver_.pointer_attribute(&type, kCuPointerMemoryType, address) != 0 || type == 0) return std::nullopt;
  unsigned managed = 0;
  if (driver_.pointer_attribute(&managed, kCuPointerIsManaged, address) == 0 && managed != 0) {
    fail(EOPNOTSUPP, "register", "the buffer is managed memory, which moves between the processor and the GPU",
         "use memory of cudaMalloc (torch.empty(..., device=\"cuda\"))");
  }
  if (type != kCuMemoryTypeDevice) return std::nullopt;
  Allocation found;
  int device = 0;
  if (driver_.pointer_attribute(&device, kCuPointerDevice, address) != 0) device = 0;
  require_visible(device);
  found.place.device = device;
  // Held for ever, so that our streams in it outlive the program's own use of it.
  CuContext held = primary(device);
  // Memory of a pool is no context's; the primary one reaches it.
  if (driver_.pointer_attribute(&found.place.context, kCuPointerContext, address) != 0 ||
      found.place.context == nullptr) {
    found.place.context = held;
  }
  // Pinned now: once a stream waits, pinning does.
  static_cast<void>(copy_streams(found.place));
  const Entered entered(driver_, found.place.context);
  CuPointer base = 0;
  std::size_t size = 0;
  if (const CuResult code = driver_.address_range(&base, &size, address); code != 0)
    refuse(code, "register", "the driver does not say where the allocation begins");
  found.base = base;
  found.size = size;
  unsigned long long id = 0;
  if (driver_.pointer_attribute(&id, kCuPointerBufferId, address) == 0) found.id = id;
  return found;
}

bool CudaRuntime::is_alive(const Allocation& allocation, Address address) noexcept {
  if (allocation.id != 0) {
    unsigned long long id = 0;
    return driver_.pointer_attribute(&id, kCuPointerBufferId, address) == 0 && id == allocation.id;
  }
  const Entered entered(driver_, allocation.place.context);
  CuPointer base = 0;
  std::size_t size = 0;
  return driver_.address_range(&base, &size, address) == 0 && base == allocation.base && size == allocation.size;
}

Descriptor CudaRuntime::export_dmabuf(const Place& place, Address address, std::uint64_t size, bool pcie) {
  if (driver_.handle_for_range == nullptr)
    fail(EOPNOTSUPP, "export", "this driver exports no DMA-BUF", "use a driver of CUDA 11.7 or later");
  const Entered entered(driver_, place.context);
  int descriptor = -1;
  const CuResult code = driver_.handle_for_range(&descriptor, address, size, kCuHandleDmabuf, pcie ? kCuDmabufPcie : 0);
  if (code != 0)
    refuse(code, "export", pcie ? "the driver exports no DMA-BUF over PCIe" : "the driver exports no DMA-BUF");
  return Descriptor(descriptor);
}

Address CudaRuntime::pin(void* address, std::uint64_t size) {
  // Registering needs some context; portable memory is every one's then.
  const Entered entered(driver_, primary(first_visible()));
  const CuResult code = driver_.host_register(address, size, kCuRegisterPortable | kCuRegisterDeviceMap);
  if (code != 0)
    refuse(code, "pin", "the driver does not pin " + std::to_string(size) + " bytes",
           "raise the limit of locked memory");
  CuPointer pointer = 0;
  if (const CuResult mapped = driver_.host_device_pointer(&pointer, address, 0); mapped != 0) {
    driver_.host_unregister(address);
    refuse(mapped, "pin", "the driver does not map pinned memory");
  }
  return pointer;
}

Place CudaRuntime::place_of_stream(StreamHandle stream, const Place& otherwise) {
  // Small numbers stand for the default streams of whatever context is current.
  if (reinterpret_cast<std::uintptr_t>(stream) <= 2) return otherwise;
  Place place;
  // The driver wants some context to be current.
  const Entered any(driver_, otherwise.context != nullptr ? otherwise.context : primary(first_visible()));
  if (const CuResult code = driver_.stream_context(stream, &place.context); code != 0)
    fail(EINVAL, "stream", "that is no stream of CUDA: " + words(code), "give a CUstream that is not destroyed");
  const Entered entered(driver_, place.context);
  if (entered.code() != 0 || driver_.context_device(&place.device) != 0) return otherwise;
  return place;
}

StreamHandle CudaRuntime::make_stream(const Place& place) {
  const Entered entered(driver_, place.context);
  CuStream stream = nullptr;
  if (const CuResult code = driver_.stream_create(&stream, kCuStreamNonBlocking); code != 0)
    refuse(code, "stream", "no stream of our own");
  return stream;
}

CudaRuntime::CopyStreams* CudaRuntime::copy_streams(const Place& place) noexcept try {
  const auto made = [&]() -> CopyStreams* {
    const std::lock_guard guard(contexts_lock_);
    const auto found = copy_streams_.find(place.context);
    return found != copy_streams_.end() ? found->second.get() : nullptr;
  };
  if (CopyStreams* streams = made()) return streams;
  const std::lock_guard loading(loading_lock_);
  if (CopyStreams* streams = made()) return streams;
  // What was made before something fails goes with it.
  const auto undo = [this, place](CopyStreams* made_so_far) {
    for (const CopyStream& one : *made_so_far) {
      if (one.stream != nullptr) destroy_stream(place, one.stream);
    }
    delete made_so_far;
  };
  std::unique_ptr<CopyStreams, decltype(undo)> streams(new CopyStreams, undo);
  for (CopyStream& one : *streams) one.stream = make_stream(place);
  void* memory = mmap(nullptr, kCopyStreams * kCopyBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  madvise(memory, kCopyStreams * kCopyBytes, MADV_DONTFORK);
  try {
    pin(memory, kCopyStreams * kCopyBytes);
  } catch (...) {
    munmap(memory, kCopyStreams * kCopyBytes);
    throw;
  }
  for (std::size_t i = 0; i < kCopyStreams; ++i) {
    (*streams)[i].bounce = static_cast<std::byte*>(memory) + i * kCopyBytes;
  }
  const std::lock_guard guard(contexts_lock_);
  auto& kept = copy_streams_[place.context];
  kept.reset(streams.release());
  return kept.get();
} catch (...) {
  return nullptr;
}

void CudaRuntime::load_kernels(const Place& place) {
  // Loading may wait for streams that wait, and whoever enqueues what ends that must not wait for this.
  const std::lock_guard loading(loading_lock_);
  {
    const std::lock_guard guard(contexts_lock_);
    if (kernels_.contains(place.context)) return;
  }
  // A launch would wait for its kernel, and that for the device: each request would wait out the worker's patience.
  if (const char* blocking = runtime_environment("CUDA_LAUNCH_BLOCKING");
      blocking != nullptr && std::atoi(blocking) != 0)
    fail(EOPNOTSUPP, "stream", "CUDA_LAUNCH_BLOCKING is set, with which no kernel can wait for a device",
         "run without it, or give offsets and sizes when the request is submitted");
  Kernels kernels;
  const Entered entered(driver_, place.context);
  CuModule module = nullptr;
  CuResult code = driver_.module_load(&module, kKernels);
  if (code == 0) code = driver_.module_function(&kernels.copy, module, "ugds_copy");
  if (code == 0) code = driver_.module_function(&kernels.pieces, module, "ugds_pieces");
  if (code != 0) refuse(code, "register", "the driver does not load the kernels that copy");
  // A kernel's first launch may load it, which waits for streams: ones that copy nothing are made now. An unused word
  // has zeros behind it.
  const Word word = words_.take(*this);
  CuPointer address = word.device;
  void* arguments[] = {&address};
  CuStream stream = nullptr;
  code = driver_.stream_create(&stream, kCuStreamNonBlocking);
  if (code == 0) {
    code = driver_.launch(kernels.copy, 1, 1, 1, 1, 1, 1, 0, stream, arguments, nullptr);
    Pieces nothing;
    nothing.allowed = word.device;
    nothing.allowed_at = ~std::uint64_t{0};
    if (code == 0) code = launch(kernels.pieces, stream, nothing);
    if (code == 0) code = driver_.stream_synchronize(stream);
    driver_.stream_destroy(stream);
  }
  words_.give_back(word);
  if (code != 0) refuse(code, "register", "the kernels that copy do not run");
  const std::lock_guard guard(contexts_lock_);
  kernels_[place.context] = kernels;
}

int CudaRuntime::enqueue_words(const Place& place, StreamHandle stream, std::span<const WordOp> ops) noexcept {
  if (driver_.batch_words == nullptr || ops.size() > kMostWords) return kCuInvalidValue;
  CuWordOp list[kMostWords] = {};
  const unsigned flush = attribute(place.device, kCuCanFlushRemoteWrites) != 0 ? kCuWaitFlush : 0;
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const bool waits = ops[i].kind == WordOp::Kind::wait;
    list[i].operation = waits ? kCuWait64 : kCuWrite64;
    list[i].address = ops[i].word;
    list[i].value = ops[i].value;
    // What a peer device wrote before the word was stored is there for what follows.
    list[i].flags = waits ? kCuWaitAtLeast | flush : 0;
  }
  return in(place, [&] { return driver_.batch_words(stream, static_cast<unsigned>(ops.size()), list, 0); });
}

CudaRuntime::Kernels CudaRuntime::kernels_of(const Place& place) noexcept {
  const std::lock_guard guard(contexts_lock_);
  const auto found = kernels_.find(place.context);
  return found != kernels_.end() ? found->second : Kernels{};
}

int CudaRuntime::enqueue_copies(const Place& place, StreamHandle stream, Address orders, std::uint32_t count,
                                std::uint64_t most) noexcept {
  const CuFunction copy = kernels_of(place).copy;
  if (copy == nullptr || count == 0) return kCuInvalidValue;
  const auto blocks = static_cast<unsigned>(std::clamp<std::uint64_t>(most / kBytesOfBlock, 1, kCopyBlocks));
  CuPointer address = orders;
  void* arguments[] = {&address};
  return in(place,
            [&] { return driver_.launch(copy, blocks, count, 1, kCopyThreads, 1, 1, 0, stream, arguments, nullptr); });
}

int CudaRuntime::enqueue_pieces(const Place& place, StreamHandle stream, const Pieces& pieces) noexcept {
  const CuFunction kernel = kernels_of(place).pieces;
  if (kernel == nullptr) return kCuInvalidValue;
  return in(place, [&] { return launch(kernel, stream, pieces); });
}

/// In the current context.
int CudaRuntime::launch(CuFunction kernel, CuStream stream, const Pieces& p) const noexcept {
  std::uint64_t values[] = {
      p.reached,          p.reached_at, p.allowed, p.allowed_at, p.order, p.copy.source,
      p.copy.destination, p.copy.bytes, p.piece,   p.area,       p.count, p.tell | (p.gathers ? 4 : 0)};
  std::size_t size = sizeof values;
  void* arguments[] = {kCuLaunchBuffer, values, kCuLaunchBufferSize, &size, kCuLaunchEnd};
  // Whole warps; 16 bytes are a thread's.
  const std::uint64_t threads = std::clamp<std::uint64_t>(align_up((p.most + 15) / 16, 32), 32, kPieceThreads);
  return driver_.launch(kernel, p.blocks, 1, 1, static_cast<unsigned>(threads), 1, 1, 0, stream, nullptr, arguments);
}

struct Found {
  Runtime* runtime = nullptr;
  std::string why;
};

Found make() {
  SharedLibrary library(kOverride, {"libcuda.so.1"});
  CudaDriver driver{};
  if (!driver.load(library)) return {nullptr, library ? "the CUDA driver is too old: " + library.why() : library.why()};
  if (const CuResult code = driver.init(0); code != 0) return {nullptr, "cuInit: " + words_of(driver, code)};
  int devices = 0, version = 0;
  driver.driver_version(&version);
  if (const CuResult code = driver.device_count(&devices); code != 0 || devices == 0)
    return {nullptr, code != 0 ? words_of(driver, code) : "the driver finds no GPU"};
  return {new CudaRuntime(driver, devices, version), ""};  // NOLINT: streams and pinned memory outlive every teardown
}

}  // namespace

Runtime* cuda(std::string* why) {
  static const Found found = make();
  if (why != nullptr) *why = found.why;
  return found.runtime;
}

bool is_cuda_memory(const void* address) {
  static CudaDriver driver{};
  static const bool there = [] {
    SharedLibrary library = SharedLibrary::loaded(kOverride, {"libcuda.so.1"});
    return driver.load(library);
  }();
  unsigned type = 0;
  return there && driver.pointer_attribute(&type, kCuPointerMemoryType, reinterpret_cast<std::uintptr_t>(address)) == 0;
}

}  // namespace ugds::gpu
