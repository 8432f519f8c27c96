// SPDX-License-Identifier: Apache-2.0
#include "memory/registry.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <optional>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/steps.hpp"

namespace ugds::memory {

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::host: return "host";
    case Kind::cuda: return "cuda";
    case Kind::hip: return "hip";
    case Kind::peer: return "peer";
  }
  return "unknown";
}

const char* route_name(Route route) {
  switch (route) {
    case Route::direct: return "direct";
    case Route::staged: return "staged";
    case Route::buffered: return "buffered";
  }
  return "unknown";
}

namespace {

Kind kind_of(const GpuBuffer& gpu) { return gpu.runtime().backend() == gpu::Backend::cuda ? Kind::cuda : Kind::hip; }

}  // namespace

constinit Immortal<Registry> registry;

/// Before the lock is taken, which a fork takes after its own.
void Registry::prepare_for_fork() {
  static const bool hooked = [] {
    on_fork(ForkOrder::registrations, {[] { instance().lock_.lock(); }, [] { instance().lock_.unlock(); },
                                       [] {
                                         Registry& self = instance();
                                         // The parent's devices do not exist here. What was mapped to them is left
                                         // alone, and is forgotten: the number of one may be that of the child's own
                                         // device, which never mapped it.
                                         for (std::uint32_t i = 0; i < self.used_; ++i) {
                                           self.slots_[i].generation_.store(0);
                                           for (auto& pages : self.slots_[i].pages_) {
                                             if (pages.load() != nullptr) pages.store(nullptr);
                                           }
                                         }
                                         self.index_.clear();
                                         self.devices_ = {};
                                         self.ledgers_.clear();
                                         self.open_ = 0;
                                         self.leaving_ = 0;
                                         self.lock_.unlock();
                                       }});
    return true;
  }();
  static_cast<void>(hooked);
}

void Registry::reserve_slots() {
  if (slots_ != nullptr) return;
  // All-zero bytes are a free slot: a page of them is made by the kernel when one is first used.
  void* memory = mmap(nullptr, kMaxRegistrations * sizeof(Registration), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  slots_ = static_cast<Registration*>(memory);
}

std::uint32_t Registry::take_slot() {
  if (!free_.empty()) {
    const std::uint32_t index = free_.back();
    free_.pop_back();
    return index;
  }
  if (used_ == kMaxRegistrations) {
    fail(ENOSPC, "register", "65536 buffers are registered, which is the most",
         "register larger buffers, or close some that are not needed");
  }
  if (free_.capacity() <= used_) free_.reserve(2 * used_ + 64);  // giving a slot back must not fail
  slots_[used_].index_ = used_;
  return used_++;
}

/// What is registered.
/// What a process can address: more is a mistake.
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 47;

struct Registry::Source {
  std::uint64_t address = 0, size = 0;
  Kind kind = Kind::host;
  bool readonly = false;
  Backing peer{};
  std::unique_ptr<GpuBuffer> gpu{};
  Demand demand = Demand::none;
  bool listed = true;
  bool staging = false;
};

Reference Registry::add(void* address, std::uint64_t size, Kind kind, bool readonly,
                        std::span<const std::uint32_t> devices, Backing peer) {
  return add({reinterpret_cast<std::uintptr_t>(address), size, kind, readonly, peer}, devices);
}

Reference Registry::add_staging(void* address, std::uint64_t size) {
  return add({.address = reinterpret_cast<std::uintptr_t>(address), .size = size, .staging = true}, {});
}

Reference Registry::add_gpu(std::uint64_t address, std::uint64_t size, bool readonly, std::unique_ptr<GpuBuffer> gpu,
                            Demand demand, std::span<const std::uint32_t> devices) {
  check_inside(*gpu, address, size);
  const Kind kind = kind_of(*gpu);
  return add({address, size, kind, readonly, {}, std::move(gpu), demand}, devices);
}

Reference Registry::add_gpu_unlisted(std::uint64_t address, std::uint64_t size, bool readonly,
                                     std::unique_ptr<GpuBuffer> gpu, std::uint32_t device) {
  check_inside(*gpu, address, size);
  const Kind kind = kind_of(*gpu);
  return add({address, size, kind, readonly, {}, std::move(gpu), Demand::none, false}, std::span(&device, 1));
}

void Registry::check_inside(const GpuBuffer& gpu, std::uint64_t address, std::uint64_t size) {
  const gpu::Allocation& whole = gpu.allocation();
  if (size == 0 || address < whole.base || size > whole.size || address - whole.base > whole.size - size) {
    fail(EINVAL, "register", "the range is not inside of one allocation of the GPU", "register each of them by itself");
  }
}

Reference Registry::add(Source source, std::span<const std::uint32_t> devices) {
  const std::uint64_t begin = source.address, size = source.size;
  if (size == 0) fail(EINVAL, "register", "the buffer is empty", "register at least one byte");
  if (begin == 0 || begin + size < begin || size > kMostBytes) {
    fail(EINVAL, "register", "the range is not memory of this process", "check the pointer and the size");
  }
  prepare_for_fork();
  std::lock_guard guard(lock_);
  close_leaving();
  if (source.listed && index_.overlaps(begin, begin + size)) {
    char range[64];
    std::snprintf(range, sizeof range, "[%#llx, +%llu)", static_cast<unsigned long long>(source.address),
                  static_cast<unsigned long long>(size));
    fail(EEXIST, "register", std::string("the range ") + range + " overlaps a buffer that is registered already",
         "close the other registration, or use it: a part of a registered buffer needs no registration of its own");
  }
  setup_step("register: index");
  index_.reserve_one();
  setup_step("register: slot");
  reserve_slots();
  const std::uint32_t at = take_slot();
  Registration& r = slots_[at];
  r.address_ = reinterpret_cast<std::byte*>(begin);
  r.size_ = size;
  r.kind_ = source.kind;
  r.readonly_ = source.readonly;
  r.everywhere_ = devices.empty();
  r.listed_ = source.listed;
  r.leaving_ = false;
  r.peer_ = source.peer;
  r.gpu_ = std::move(source.gpu);
  r.keeps_gpu_ = false;
  r.staged_.store(0, std::memory_order_relaxed);
  r.revoked_.store(0, std::memory_order_relaxed);
  r.why_.reset();
  r.demand_ = source.demand;
  r.staging_ = source.staging;
  try {
    if (devices.empty()) map_to_all(r);
    for (const std::uint32_t device : devices) {
      if (devices_[device] != nullptr) map_to(r, device);
    }
  } catch (Failure& failure) {
    unmap_all(r);
    free_.push_back(at);
    failure.error().operation = "register";
    throw Failure(failure.error());
  } catch (...) {
    unmap_all(r);
    free_.push_back(at);
    throw;
  }
  const std::uint64_t generation = next_generation_++;
  r.generation_.store(generation, std::memory_order_release);
  if (r.listed_) {
    const std::uint64_t tag = reinterpret_cast<std::uintptr_t>(&r) | (r.readonly_ ? kReadonly : 0);
    index_.insert(begin, begin + size, tag, generation);
  }
  ++open_;
  return {&r, generation, begin, size, r.readonly_};
}

void Registry::map_to_all(Registration& r) {
  bool mapped = false;
  std::optional<Failure> impossible;
  for (std::uint32_t device = 0; device < kMaxDevices; ++device) {
    if (devices_[device] == nullptr) continue;
    try {
      map_to(r, device);
      mapped = true;
    } catch (const Failure& failure) {
      // I/O on this pair will say that it is not mapped. A device that has gone concerns only its own handle, and one
      // that can never reach such memory only whoever has no other; all else could be mended, and is said.
      if (failure.error().code == ENODEV) continue;
      if (failure.error().code != EOPNOTSUPP) throw;
      impossible = failure;
      if (impossible->error().device[0] == '\0') set_device(impossible->error(), devices_[device]->uri().c_str());
    }
  }
  if (!mapped && impossible) throw Failure(impossible->error());
}

void Registry::map_to(Registration& r, std::uint32_t device) {
  const auto begin = align_down(reinterpret_cast<std::uintptr_t>(r.address_), nvme::kPageSize);
  const auto end = align_up(reinterpret_cast<std::uintptr_t>(r.address_) + r.size_, nvme::kPageSize);
  setup_step("register: page table");
  // Not touched before it is known that the memory is there: of a size that is a mistake it would be all of the
  // machine's.
  auto pages = std::make_unique_for_overwrite<std::uint64_t[]>((end - begin) / nvme::kPageSize);
  setup_step("register: map");
  const device::Access access = r.readonly_ ? device::Access::read_only : device::Access::read_write;
  if (r.gpu_ != nullptr) {
    if (!map_gpu(r, device, begin, end - begin, pages.get())) return;
  } else if (r.kind_ == Kind::peer) {
    r.mappings_[device] =
        devices_[device]->map_descriptor({r.peer_.descriptor, r.peer_.offset, Bytes(end - begin)}, access, pages.get());
  } else {
    r.mappings_[device] =
        devices_[device]->map(reinterpret_cast<void*>(begin), Bytes(end - begin), access, pages.get());
  }
  r.pages_[device].store(pages.release(), std::memory_order_release);
}

/// False: requests are staged instead.
bool Registry::map_gpu(Registration& r, std::uint32_t device, std::uint64_t begin, std::uint64_t bytes,
                       std::uint64_t* pages) {
  if (r.demand_ == Demand::staged) {
    stage(r, device, "staging was asked for");
    return false;
  }
  const device::Access access = r.readonly_ ? device::Access::read_only : device::Access::read_write;
  std::string why;
  try {
    r.mappings_[device] = r.gpu_->map(*devices_[device], begin, Bytes(bytes), access, pages, why);
    return true;
  } catch (const Failure& failure) {
    if (r.demand_ == Demand::direct || failure.error().code == ENODEV) throw;
    stage(r, device,
          devices_[device]->uri() + " does not reach the GPU's memory: " + (why.empty() ? failure.error().cause : why));
    return false;
  }
}

void Registry::stage(Registration& r, std::uint32_t device, const std::string& why) {
  if (r.why_ == nullptr) r.why_ = std::make_unique<std::string>(why);
  r.staged_.fetch_or(std::uint64_t{1} << device, std::memory_order_release);
}

Registry::Way Registry::way(const Reference& reference) {
  std::lock_guard guard(lock_);
  const Registration& r = *reference.registration;
  if (r.generation_.load(std::memory_order_relaxed) != reference.generation) return {Route::direct, "it is closed"};
  if (r.revoked_.load(std::memory_order_relaxed) != 0) return {Route::direct, "its exporter took it back"};
  if (r.gpu_ == nullptr) {
    // Of files the worst way is told: what goes through the page cache is not direct, whatever others do.
    for (std::uint32_t device = 0; device < kMaxDevices; ++device) {
      if (devices_[device] == nullptr || r.pages(device) == nullptr || !devices_[device]->limits().bytewise) continue;
      const device::Medium medium = devices_[device]->medium();
      if (medium.is_buffered) return {Route::buffered, devices_[device]->uri() + ": " + medium.why_buffered};
    }
    return {Route::direct, "devices reach memory of this kind themselves"};
  }
  if (r.demand_ == Demand::staged) return {Route::staged, "staging was asked for"};
  bool mapped = false;
  for (std::uint32_t device = 0; device < kMaxDevices; ++device) {
    if (devices_[device] == nullptr) continue;
    if (r.is_staged(device)) return {Route::staged, *r.why_};
    mapped = mapped || r.pages(device) != nullptr;
  }
  if (mapped) return {Route::direct, "every open device reaches the GPU's memory"};
  return {r.demand_ == Demand::direct ? Route::direct : Route::staged, "no device is open yet that it is mapped to"};
}

void Registry::unmap_from(Registration& r, std::uint32_t device) {
  r.staged_.fetch_and(~(std::uint64_t{1} << device), std::memory_order_release);
  r.revoked_.fetch_and(~(std::uint64_t{1} << device), std::memory_order_release);
  const std::uint64_t* pages = r.pages_[device].exchange(nullptr);
  if (pages == nullptr) return;
  if (devices_[device] != nullptr) devices_[device]->unmap(r.mappings_[device]);
  delete[] pages;
}

void Registry::unmap_all(Registration& r) {
  for (std::uint32_t device = 0; device < kMaxDevices; ++device) unmap_from(r, device);
  // A controller that could not be stopped may still ask it to copy.
  if (r.keeps_gpu_) static_cast<void>(r.gpu_.release());  // NOLINT
  r.gpu_.reset();
  r.why_.reset();
}

std::uint64_t Registry::count(std::uint32_t index) const {
  std::uint64_t total = 0;
  for (const Ledger* ledger : ledgers_) total += ledger->count(index);
  return total;
}

Registry::GpuPlace Registry::gpu_of(const Reference& reference) {
  std::lock_guard guard(lock_);
  const Registration& r = *reference.registration;
  if (r.generation_.load(std::memory_order_relaxed) != reference.generation || r.gpu_ == nullptr) return {};
  return {&r.gpu_->runtime(), r.gpu_->place()};
}

bool Registry::was_freed(const Reference& reference) {
  std::lock_guard guard(lock_);
  const Registration& r = *reference.registration;
  return r.generation_.load(std::memory_order_relaxed) == reference.generation && r.gpu_ != nullptr &&
         !r.gpu_->is_alive();
}

std::uint64_t Registry::in_flight(const Reference& reference) {
  std::lock_guard guard(lock_);
  return count(reference.registration->index());
}

std::string Registry::holders(const Reference& reference) {
  std::lock_guard guard(lock_);
  std::string words;
  if (reference.registration->generation_.load(std::memory_order_relaxed) != reference.generation) return words;
  for (const Ledger* ledger : ledgers_) {
    const std::uint32_t count = ledger->count(reference.registration->index());
    if (count == 0) continue;
    if (!words.empty()) words += ", ";
    words += std::to_string(count) + (count == 1 ? " command" : " commands");
    if (!ledger->whose().empty()) words += ' ' + ledger->whose();
  }
  return words;
}

int Registry::close(const Reference& reference) {
  std::lock_guard guard(lock_);
  close_leaving();
  return close_locked(reference);
}

void Registry::close_when_idle(const Reference& reference) {
  std::lock_guard guard(lock_);
  if (close_locked(reference) != EBUSY) return;
  reference.registration->leaving_ = true;
  ++leaving_;
}

/// Under the lock.
void Registry::close_leaving() {
  std::uint32_t left = leaving_;
  for (std::uint32_t i = 0; left != 0 && i < used_; ++i) {
    Registration& r = slots_[i];
    if (!r.leaving_) continue;
    --left;
    const Reference reference{.registration = &r, .generation = r.generation_.load(std::memory_order_relaxed)};
    if (close_locked(reference) != EBUSY) --leaving_;
  }
}

int Registry::close_locked(const Reference& reference) {
  Registration& r = *reference.registration;
  if (r.generation_.load(std::memory_order_relaxed) != reference.generation) return ESTALE;
  if (count(r.index_) != 0) return EBUSY;
  // Marked, then summed again: see hold().
  r.generation_.store(kClosing, std::memory_order_seq_cst);
  full_fence();
  if (count(r.index_) != 0) {
    r.generation_.store(reference.generation, std::memory_order_release);
    return EBUSY;
  }
  if (r.listed_) index_.erase(reinterpret_cast<std::uintptr_t>(r.address_));
  r.leaving_ = false;
  unmap_all(r);
  r.generation_.store(0, std::memory_order_release);
  free_.push_back(r.index_);
  --open_;
  return 0;
}

bool Registry::overlaps(const void* address, std::uint64_t size) {
  std::lock_guard guard(lock_);
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  return index_.overlaps(begin, begin + size);
}

std::uint32_t Registry::attach(device::Device& device) {
  prepare_for_fork();
  std::lock_guard guard(lock_);
  setup_step("attach");
  reserve_slots();
  const auto free = std::find(devices_.begin(), devices_.end(), nullptr);
  if (free == devices_.end()) {
    fail(EMFILE, "open", "64 devices are open in this process, which is the most", "close one that is not needed");
  }
  *free = &device;
  const auto number = static_cast<std::uint32_t>(free - devices_.begin());
  for (std::uint32_t i = 0; i < used_; ++i) {
    Registration& r = slots_[i];
    if (r.generation_.load(std::memory_order_relaxed) == 0 || !r.everywhere_) continue;
    try {
      map_to(r, number);
    } catch (const Failure&) {
      // Left out: I/O on this pair says that it is not mapped.
    } catch (...) {
      for (std::uint32_t j = 0; j <= i; ++j) unmap_from(slots_[j], number);
      *free = nullptr;
      throw;
    }
  }
  return number;
}

void Registry::detach(std::uint32_t number, bool leak) {
  std::lock_guard guard(lock_);
  for (std::uint32_t i = 0; i < used_; ++i) {
    if (leak) {
      if (slots_[i].pages_[number].exchange(nullptr) != nullptr) slots_[i].keeps_gpu_ = true;
      slots_[i].staged_.fetch_and(~(std::uint64_t{1} << number), std::memory_order_release);
      slots_[i].revoked_.fetch_and(~(std::uint64_t{1} << number), std::memory_order_release);
    } else {
      unmap_from(slots_[i], number);
    }
  }
  devices_[number] = nullptr;
}

void Registry::drop_revoked(std::uint32_t number) {
  std::lock_guard guard(lock_);
  for (std::uint32_t i = 0; i < used_; ++i) {
    Registration& r = slots_[i];
    if (r.pages(number) == nullptr || !devices_[number]->is_revoked(r.mappings_[number])) continue;
    unmap_from(r, number);
    r.revoked_.fetch_or(std::uint64_t{1} << number, std::memory_order_release);
  }
}

void Registry::add_ledger(Ledger& ledger) {
  prepare_for_fork();
  std::lock_guard guard(lock_);
  setup_step("registry: ledger");
  ledgers_.push_back(&ledger);
}

void Registry::remove_ledger(Ledger& ledger) {
  std::lock_guard guard(lock_);
  std::erase(ledgers_, &ledger);
  close_leaving();
}

std::uint64_t Registry::open_registrations() {
  std::lock_guard guard(lock_);
  return open_;
}

}  // namespace ugds::memory
