// SPDX-License-Identifier: Apache-2.0
#include "gpu/word_pool.hpp"

#include <sys/mman.h>

#include <cerrno>

#include "base/error.hpp"

namespace ugds::gpu {

namespace {
constexpr std::size_t kPage = 16 * 1024, kLine = 128;
}

Word WordPool::take(Runtime& runtime) {
  const std::lock_guard guard(lock_);
  if (free_.empty()) {
    free_.reserve(free_.capacity() + kPage / kLine);
    void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (page == MAP_FAILED) fail(ENOMEM, "stream", "no memory for words that streams wait for", "free memory");
    madvise(page, kPage, MADV_DONTFORK);
    Address device = 0;
    try {
      device = runtime.pin(page, kPage);
    } catch (...) {
      munmap(page, kPage);
      throw;
    }
    for (std::size_t at = 0; at < kPage; at += kLine) {
      free_.push_back({reinterpret_cast<std::atomic<std::uint64_t>*>(static_cast<std::byte*>(page) + at), device + at});
    }
  }
  const Word word = free_.back();
  free_.pop_back();
  word.host->store(0, std::memory_order_relaxed);
  return word;
}

void WordPool::give_back(const Word& word) noexcept {
  const std::lock_guard guard(lock_);
  // Room for it was reserved when it was made.
  free_.push_back(word);
}

}  // namespace ugds::gpu
