// SPDX-License-Identifier: Apache-2.0
#include "memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

namespace fake_cuda {

namespace {

constexpr std::uint64_t page = 4096;
constexpr std::uint64_t window_size = std::uint64_t{4} << 30;
// As the driver lays memory out: small allocations share blocks of 2 MiB, so several lie in one page of the GPU's.
constexpr std::uint64_t small_below = 1 << 20, small_step = 512, large_step = 2 << 20;

constexpr std::uint64_t up(std::uint64_t value, std::uint64_t step) { return (value + step - 1) / step * step; }
constexpr std::uint64_t down(std::uint64_t value, std::uint64_t step) { return value / step * step; }

bool is_mapped(std::uint64_t first, std::uint64_t end) {
  std::vector<unsigned char> present(1024);
  for (; first < end; first += present.size() * page) {
    const std::uint64_t bytes = std::min(end - first, present.size() * page);
    if (::mincore(reinterpret_cast<void*>(first), bytes, present.data()) != 0) return false;
  }
  return true;
}

}  // namespace

Memory& memory() { return immortal<Memory>(); }

CUresult Memory::open(int gpu) {
  Window& w = windows_[static_cast<std::size_t>(gpu)];
  if (w.file >= 0) return CUDA_SUCCESS;
  const int file = ::memfd_create("fake_gpu", MFD_CLOEXEC);
  if (file < 0 || ::ftruncate(file, window_size) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  // The window begins at a large page, so that every large allocation can.
  void* wide = ::mmap(nullptr, window_size + large_step, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (wide == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::uint64_t seen = up(reinterpret_cast<std::uint64_t>(wide), large_step);
  void* shown =
      ::mmap(reinterpret_cast<void*>(seen), window_size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, 0);
  void* own = ::mmap(nullptr, window_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (shown == MAP_FAILED || own == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  ::madvise(own, window_size, MADV_DONTDUMP);
  w = {seen, static_cast<std::byte*>(own), file};
  return CUDA_SUCCESS;
}

std::optional<std::uint64_t> Memory::room(const Window& window, std::uint64_t size) const {
  const std::uint64_t step = size < small_below ? small_step : large_step;
  std::uint64_t at = window.seen;
  for (auto b = blocks_.lower_bound(at); b != blocks_.end() && b->first < window.seen + window_size; ++b) {
    if (b->first >= at + size) break;
    at = up(b->second.end(), step);
  }
  if (at + size > window.seen + window_size) return std::nullopt;
  return at;
}

void Memory::add(Block block) {
  block.id = ++last_id_;
  blocks_.emplace(block.base, block);
}

CUresult Memory::allocate(int gpu, CUcontext context, std::uint64_t size, std::uint64_t& address) {
  if (size == 0) return CUDA_ERROR_INVALID_VALUE;
  if (size > window_size) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::scoped_lock hold(lock_);
  if (const CUresult code = open(gpu); code != CUDA_SUCCESS) return code;
  const auto at = room(windows_[static_cast<std::size_t>(gpu)], size);
  if (!at) return CUDA_ERROR_OUT_OF_MEMORY;
  add({.base = *at, .size = size, .kind = Kind::device, .gpu = gpu, .context = context});
  address = *at;
  return CUDA_SUCCESS;
}

CUresult Memory::allocate_mapped(Kind kind, int gpu, CUcontext context, std::uint64_t size, std::uint64_t& address) {
  if (size == 0) return CUDA_ERROR_INVALID_VALUE;
  void* at = ::mmap(nullptr, up(size, page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::scoped_lock hold(lock_);
  address = reinterpret_cast<std::uint64_t>(at);
  add({.base = address, .size = size, .kind = kind, .gpu = gpu, .context = context});
  return CUDA_SUCCESS;
}

CUresult Memory::register_host(int gpu, CUcontext context, std::uint64_t address, std::uint64_t size) {
  if (address == 0 || size == 0 || address + size < address) return CUDA_ERROR_INVALID_VALUE;
  // Whole pages are pinned, and a page only once.
  const std::uint64_t first = down(address, page), end = up(address + size, page);
  const std::scoped_lock hold(lock_);
  for (const auto& w : windows_) {
    if (w.file >= 0 && first < w.seen + window_size && w.seen < end) return CUDA_ERROR_INVALID_VALUE;
  }
  for (const auto& [base, block] : blocks_) {
    if (block.kind == Kind::device) continue;
    if (down(base, page) < end && first < up(block.end(), page)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  }
  if (!is_mapped(first, end)) return misuse(CUDA_ERROR_INVALID_VALUE, "memory to be registered is not mapped");
  add({.base = address, .size = size, .kind = Kind::registered, .gpu = gpu, .context = context});
  return CUDA_SUCCESS;
}

void Memory::give_back(const Block& block) {
  if (block.kind == Kind::registered) return;
  if (block.kind != Kind::device) {
    ::munmap(reinterpret_cast<void*>(block.base), up(block.size, page));
    return;
  }
  const Window& w = windows_[static_cast<std::size_t>(block.gpu)];
  const std::uint64_t first = up(block.base, page), end = down(block.end(), page);
  if (first < end) {
    ::fallocate(w.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first - w.seen),
                static_cast<off_t>(end - first));
  }
}

CUresult Memory::release(std::uint64_t address, Kind kind) {
  const std::scoped_lock hold(lock_);
  const auto found = blocks_.find(address);
  const bool fits = found != blocks_.end() &&
                    (found->second.kind == kind || (kind == Kind::device && found->second.kind == Kind::managed));
  if (!fits) {
    return misuse(kind == Kind::registered ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : CUDA_ERROR_INVALID_VALUE,
                  "memory was freed or unregistered that is not allocated or registered there");
  }
  give_back(found->second);
  blocks_.erase(found);
  return CUDA_SUCCESS;
}

void Memory::release_all(CUcontext context) {
  const std::scoped_lock hold(lock_);
  for (auto b = blocks_.begin(); b != blocks_.end();) {
    if (b->second.context != context) {
      ++b;
      continue;
    }
    give_back(b->second);
    b = blocks_.erase(b);
  }
}

std::optional<Block> Memory::find(std::uint64_t address, std::uint64_t bytes) const {
  const std::scoped_lock hold(lock_);
  auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) return std::nullopt;
  const Block& block = (--after)->second;
  if (!block.holds(address, bytes)) return std::nullopt;
  return block;
}

std::optional<Block> Memory::find(std::uint64_t address) const { return find(address, 1); }

std::byte* Memory::reach(std::uint64_t address, std::uint64_t bytes) const {
  const auto block = find(address, bytes);
  if (!block) return nullptr;
  if (block->kind != Kind::device) return reinterpret_cast<std::byte*>(address);
  // Written once, before any block of that GPU was added.
  const Window& w = windows_[static_cast<std::size_t>(block->gpu)];
  return w.own + (address - w.seen);
}

std::uint64_t Memory::count(Kind kind) const {
  const std::scoped_lock hold(lock_);
  std::uint64_t n = 0;
  for (const auto& [base, block] : blocks_) n += block.kind == kind;
  return n;
}

}  // namespace fake_cuda
