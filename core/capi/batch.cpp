// SPDX-License-Identifier: Apache-2.0
//
// The C API's batches and vectored calls.
#include "engine/batch.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <string>
#include <vector>

#include "capi/internal.hpp"

namespace {

using namespace ugds::capi;
using ugds::Error;
using ugds::last_error;
using ugds::engine::Batch;
using ugds::engine::BatchId;
using ugds::engine::Done;
using ugds::engine::HandleId;
using ugds::engine::Segment;
using ugds::engine::Table;
using ugds::engine::Transfer;
using ugds::engine::Wanted;
using ugds::memory::Reference;
using ugds::memory::Registry;
using ugds::nvme::Opcode;

/// A batch as C programs hold it: all of its identifier in a pointer's bits, so that a stale one finds nothing and is
/// never followed.
struct Name {
  HandleId handle = 0;
  BatchId batch;
};
constexpr unsigned kHandleBits = 24, kSlotBits = 8, kGenerationBits = 32;
static_assert(kHandleBits + kSlotBits + kGenerationBits == 64 && sizeof(BatchId::generation) * 8 == kGenerationBits);
static_assert(ugds::engine::Handle::kMostBatches == 1u << kSlotBits);

uGDSBatchHandle_t pack(const Name& name) {
  return reinterpret_cast<uGDSBatchHandle_t>(
      static_cast<std::uintptr_t>(name.handle | std::uint64_t{name.batch.slot} << kHandleBits |
                                  std::uint64_t{name.batch.generation} << (kHandleBits + kSlotBits)));
}

Name unpack(uGDSBatchHandle_t batch) {
  const std::uint64_t bits = reinterpret_cast<std::uintptr_t>(batch);
  return {bits & ((std::uint64_t{1} << kHandleBits) - 1),
          {static_cast<std::uint32_t>(bits >> kHandleBits & ((1u << kSlotBits) - 1)),
           static_cast<std::uint32_t>(bits >> (kHandleBits + kSlotBits))}};
}

uGDSError_t refuse_null(const char* what) {
  return refuse("batch", UGDS_INVALID_VALUE, EINVAL, what,
                "pass what uGDSBatchIOSetUp() made, and arrays that are there");
}

uGDSError_t refuse_closed(const Name& name, const Table::Use& handle) {
  if (!handle) {
    Table::instance().explain_stale(name.handle, "batch");
    return answer(UGDS_HANDLE_NOT_REGISTERED);
  }
  return refuse("batch", UGDS_INVALID_VALUE, EBADF, "the batch is destroyed", "make one by uGDSBatchIOSetUp()");
}

/// What no state of the device or of a buffer could make right.
bool is_malformed(const uGDSIOParams_t& p, std::uint64_t block_mask) {
  return p.base == nullptr || p.size == 0 || p.file_offset < 0 ||
         ((static_cast<std::uint64_t>(p.file_offset) | p.size) & block_mask) != 0 || (p.opcode & ~1) != 0;
}

uGDSError_t refuse_malformed(unsigned index, const uGDSIOParams_t& p) {
  const char* why = p.base == nullptr      ? "a null buffer"
                    : p.size == 0          ? "a size of 0"
                    : p.file_offset < 0    ? "a negative offset"
                    : (p.opcode & ~1) != 0 ? "an opcode that is neither 0 (read) nor 1 (write)"
                                           : "an offset or size that is no multiple of the block size";
  Error& error = last_error() = Error{};
  error.operation = "batch";
  error.code = EINVAL;
  ugds::set_cause(error, "request %u has %s", index, why);
  ugds::set_hint(error, "nothing was submitted; correct the request");
  return answer(UGDS_INVALID_VALUE);
}

int status_of(const Done& done) {
  if (done.error == nullptr) return UGDS_BATCH_COMPLETE;
  switch (done.error->code) {
    case ETIMEDOUT: return UGDS_BATCH_TIMEOUT;
    case ECANCELED: return UGDS_BATCH_CANCELED;
    default: return UGDS_BATCH_FAILED;
  }
}

/// Requests as the engine takes them. Neighbours are mostly of one buffer, which is looked up once.
class Requests {
 public:
  /// The memory is at base + buf_offset, wherever base is.
  static constexpr bool kOffsetsTell = true;

  Requests(const uGDSIOParams_t* params, Reference& buffer) : params_(params), buffer_(&buffer) {}

  const Reference& begin_run(std::size_t i) {
    *buffer_ = Registry::instance().find(params_[i].base);
    // What is not registered is a run of its own.
    begin_ = *buffer_ ? buffer_->address : reinterpret_cast<std::uintptr_t>(params_[i].base);
    size_ = *buffer_ ? buffer_->size : 1;
    return *buffer_;
  }
  const Reference& buffer() const { return *buffer_; }
  bool same_buffer(std::size_t i) const { return reinterpret_cast<std::uintptr_t>(params_[i].base) - begin_ < size_; }
  Wanted operator()(std::size_t i) const {
    const uGDSIOParams_t& p = params_[i];
    return {
        .offset = static_cast<std::uint64_t>(p.file_offset),
        .size = p.size,
        .buffer_offset = reinterpret_cast<std::uintptr_t>(p.base) - begin_ + static_cast<std::uint64_t>(p.buf_offset),
        .cookie = reinterpret_cast<std::uintptr_t>(p.cookie),
        .write = static_cast<std::uint32_t>(p.opcode)};
  }

 private:
  const uGDSIOParams_t* params_;
  Reference* buffer_;
  std::uint64_t begin_ = 0, size_ = 0;
};

/// Results as C programs take them.
struct Events {
  uGDSIOEvents_t* next;
  void operator()(const Done& done) {
    *next++ = {reinterpret_cast<void*>(static_cast<std::uintptr_t>(done.cookie)), status_of(done), done.result};
    if (done.error != nullptr) last_error() = *done.error;
  }
};

ssize_t transfer_vector(Opcode opcode, uGDSHandle_t fh, const struct iovec* vector, int count, off_t file_offset) {
  const Table::Use handle(Table::instance(), id_of(fh));
  const char* name = ugds::engine::operation_name(opcode);
  if (!handle) return Table::instance().explain_stale(id_of(fh), name);
  if (vector == nullptr || count < 1 || count > IOV_MAX || file_offset < 0) {
    refuse(name, UGDS_INVALID_VALUE, EINVAL,
           "a null vector, a number of pieces that is not 1 to IOV_MAX, or a negative offset");
    return -EINVAL;
  }
  ssize_t result = 0;
  const auto status = guarded(name, [&] {
    std::vector<Segment> segments;
    std::uint64_t size = 0;
    for (const struct iovec* piece = vector; piece != vector + count; ++piece) {
      if (piece->iov_len == 0) continue;
      const Reference buffer = Registry::instance().find(piece->iov_base);
      segments.push_back({buffer, place_in(buffer, piece->iov_base, 0), piece->iov_len});
      size += piece->iov_len;
    }
    Transfer transfer{.opcode = opcode, .offset = static_cast<std::uint64_t>(file_offset), .size = size};
    transfer.segments = segments;
    result = size == 0 ? 0 : ugds::engine::run(*handle, transfer);
    return answer(UGDS_SUCCESS);
  });
  return status.err == UGDS_SUCCESS ? result : -last_error().code;
}

}  // namespace

extern "C" {

uGDSError_t uGDSBatchIOSetUp(uGDSBatchHandle_t* batch, uGDSHandle_t fh, unsigned nr) {
  if (batch == nullptr || nr == 0) {
    return refuse("batch", UGDS_INVALID_VALUE, EINVAL,
                  batch == nullptr ? "the place for the batch is null" : "a batch of no request",
                  "pass where the batch is to be put, and how many requests it is to hold");
  }
  const Table::Use handle(Table::instance(), id_of(fh));
  if (!handle) {
    Table::instance().explain_stale(id_of(fh), "batch");
    return answer(UGDS_HANDLE_NOT_REGISTERED);
  }
  return guarded("batch", [&] {
    if (id_of(fh) >> kHandleBits != 0) ugds::fail(ENOSPC, "batch", "too many handles were opened in this process");
    const Name name{id_of(fh), handle->open_batch(nr, ugds::engine::Priority::unsaid)};
    *batch = pack(name);
    return answer(UGDS_SUCCESS);
  });
}

[[gnu::flatten]] uGDSError_t uGDSBatchIOSubmit(uGDSBatchHandle_t batch, unsigned nr, uGDSIOParams_t* params,
                                               unsigned flags) {
  if (batch == nullptr || params == nullptr || nr == 0) return refuse_null("a null argument, or no request");
  if (flags != 0) return refuse_null("flags, of which there are none");
  const Name name = unpack(batch);
  const Table::Use handle(Table::instance(), name.handle);
  Batch* const one = handle ? handle->batch(name.batch.slot) : nullptr;
  if (one == nullptr) return refuse_closed(name, handle);
  const std::uint64_t mask = handle->geometry().block_mask;
  std::size_t malformed = 0;
  Reference buffer;
  const std::int64_t taken = one->submit(name.batch.generation, nr, true, Requests(params, buffer),
                                         [&](std::size_t i) { return is_malformed(params[malformed = i], mask); });
  if (taken == Batch::kMalformed) return refuse_malformed(static_cast<unsigned>(malformed), params[malformed]);
  if (taken == Batch::kClosed) return refuse_closed(name, handle);
  if (taken == Batch::kFull) {
    return refuse("batch", UGDS_BATCH_CAPACITY_EXCEEDED, ENOSPC, "more requests than the batch was set up for",
                  "collect results by uGDSBatchIOGetStatus() first, or set up a larger batch");
  }
  one->settle(name.batch.generation, {});
  return answer(UGDS_SUCCESS);
}

uGDSError_t uGDSBatchIOGetStatus(uGDSBatchHandle_t batch, unsigned min_nr, unsigned* nr, uGDSIOEvents_t* events,
                                 struct timespec* timeout) {
  if (batch == nullptr || nr == nullptr || events == nullptr) return refuse_null("a null argument");
  std::uint64_t limit = ~std::uint64_t{0} >> 1;
  if (timeout != nullptr) {
    if (timeout->tv_sec < 0 || timeout->tv_nsec < 0 || timeout->tv_nsec > 999'999'999)
      return refuse_null("a time-out that is none");
    const auto seconds = static_cast<std::uint64_t>(std::min<time_t>(timeout->tv_sec, 1'000'000'000));
    limit = seconds * 1'000'000'000 + static_cast<std::uint64_t>(timeout->tv_nsec);
  }
  const Name name = unpack(batch);
  const Table::Use handle(Table::instance(), name.handle);
  Batch* const one = handle ? handle->batch(name.batch.slot) : nullptr;
  if (one == nullptr) return refuse_closed(name, handle);
  const unsigned most = *nr != 0 ? *nr : one->capacity();
  const std::int64_t found = one->collect(name.batch.generation, min_nr, most, limit, {}, Events{events});
  if (found == Batch::kClosed) return refuse_closed(name, handle);
  *nr = static_cast<unsigned>(found);
  return answer(UGDS_SUCCESS);
}

uGDSError_t uGDSBatchIOCancel(uGDSBatchHandle_t batch) {
  if (batch == nullptr) return refuse_null("a null argument");
  const Name name = unpack(batch);
  const Table::Use handle(Table::instance(), name.handle);
  Batch* const one = handle ? handle->batch(name.batch.slot) : nullptr;
  if (one == nullptr || one->cancel(name.batch.generation) == Batch::kClosed) return refuse_closed(name, handle);
  return answer(UGDS_SUCCESS);
}

void uGDSBatchIODestroy(uGDSBatchHandle_t batch) {
  if (batch == nullptr) return;
  const Name name = unpack(batch);
  const Table::Use handle(Table::instance(), name.handle);
  if (handle) handle->close_batch(name.batch);
}

ssize_t uGDSReadv(uGDSHandle_t fh, const struct iovec* vector, int count, off_t file_offset) {
  return transfer_vector(Opcode::read, fh, vector, count, file_offset);
}

ssize_t uGDSWritev(uGDSHandle_t fh, const struct iovec* vector, int count, off_t file_offset) {
  return transfer_vector(Opcode::write, fh, vector, count, file_offset);
}

}  // extern "C"
