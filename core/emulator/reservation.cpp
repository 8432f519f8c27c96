// SPDX-License-Identifier: Apache-2.0
#include "emulator/reservation.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.hpp"
#include "base/text.hpp"
#include "base/units.hpp"

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

Reservation Reservation::shared(std::uint64_t bytes, std::uint64_t offset) {
  Reservation made;
  const char* const remedy = "raise the limits on memory and open files (ulimit -n)";
  made.descriptor_ = memfd_create("ugds-doorbells", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (made.descriptor_ < 0 || ftruncate(made.descriptor_, static_cast<off_t>(align_up(offset + bytes, 4096))) != 0 ||
      fcntl(made.descriptor_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    fail(errno, "open", "no memory for doorbells that are shared with another process", remedy);
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, made.descriptor_, static_cast<off_t>(offset));
  if (at == MAP_FAILED) fail(ENOMEM, "open", "no memory for doorbells that are shared with another process", remedy);
  made.data_ = static_cast<std::byte*>(at);
  made.bytes_ = bytes;
  madvise(at, bytes, MADV_DONTFORK);
  return made;
}

Reservation::~Reservation() {
  if (data_ != nullptr) munmap(data_, bytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

void Reservation::commit(std::uint64_t from, std::uint64_t to) {
  if (mprotect(data_ + from, to - from, PROT_READ | PROT_WRITE) != 0)
    fail(ENOMEM, "map", "no memory for the emulated controller's translation table");
}

void Reservation::release(std::uint64_t from, std::uint64_t to) noexcept {
  if (from < to) madvise(data_ + from, to - from, MADV_DONTNEED);
}

}  // namespace ugds::emulator
