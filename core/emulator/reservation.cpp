// SPDX-License-Identifier: Apache-2.0
#include "emulator/reservation.hpp"

#include <sys/mman.h>

#include <cerrno>

#include "base/error.hpp"
#include "base/text.hpp"

namespace ugds::emulator {

Reservation::Reservation(std::uint64_t bytes, bool accessible) : bytes_(bytes) {
  void* at = mmap(nullptr, bytes, accessible ? PROT_READ | PROT_WRITE : PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED)
    fail(ENOMEM, "open", "cannot reserve " + format_size(bytes) + " of address space for the emulated controller",
         "raise the limit on virtual memory (ulimit -v)");
  data_ = static_cast<std::byte*>(at);
  madvise(at, bytes, MADV_DONTFORK);
}

Reservation::~Reservation() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

void Reservation::commit(std::uint64_t from, std::uint64_t to) {
  if (mprotect(data_ + from, to - from, PROT_READ | PROT_WRITE) != 0)
    fail(ENOMEM, "map", "no memory for the emulated controller's translation table");
}

void Reservation::release(std::uint64_t from, std::uint64_t to) noexcept {
  if (from < to) madvise(data_ + from, to - from, MADV_DONTNEED);
}

}  // namespace ugds::emulator
