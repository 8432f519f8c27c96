// SPDX-License-Identifier: Apache-2.0
#include "memory/ledger.hpp"

#include <sys/mman.h>

#include <cerrno>

#include "base/error.hpp"
#include "base/steps.hpp"

namespace ugds::memory {

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));

namespace {
constexpr std::size_t kBytes = (kMaxRegistrations + 1) * sizeof(std::uint32_t);
}

Ledger::Ledger(std::string whose) : whose_(std::move(whose)) {
  setup_step("ledger: reserve");
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail(ENOMEM, "open", "no memory for a queue's ledger of registrations", "free memory");
  counts_ = static_cast<std::atomic<std::uint32_t>*>(memory);
}

Ledger::~Ledger() { munmap(counts_, kBytes); }

}  // namespace ugds::memory
