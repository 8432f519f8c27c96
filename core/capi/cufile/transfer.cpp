// SPDX-License-Identifier: Apache-2.0
#include "capi/cufile/transfer.hpp"

#include <algorithm>
#include <climits>
#include <cstring>

#include "base/clock.hpp"
#include "capi/cufile/bounce.hpp"
#include "capi/cufile/buffers.hpp"
#include "capi/cufile/files.hpp"
#include "capi/cufile/run_page.hpp"
#include "capi/cufile/statistics.hpp"
#include "engine/staged.hpp"
#include "engine/table.hpp"
#include "engine/unaligned.hpp"
#include "nvme/prp.hpp"

namespace ugds::cufile {

namespace {

using engine::Table;
using engine::Transfer;
using nvme::Opcode;

/// Through memory of ours. Each piece begins in it as it does in a page of the file, so that all but the first and the
/// last are whole pages on both sides.
Moved through_bounce(engine::Handle& handle, const Transfer& whole, std::uintptr_t at) {
  const Bounce::Area area;
  const bool write = whole.opcode == Opcode::write;
  std::size_t done = 0;
  while (done < whole.size) {
    const std::uint64_t offset = whole.offset + done;
    const std::uint64_t skip = offset & (nvme::kPageSize - 1);
    const std::size_t piece = std::min<std::size_t>(whole.size - done, Bounce::kArea - skip);
    auto* const memory = reinterpret_cast<std::byte*>(at + done);
    if (write) std::memcpy(area.data() + skip, memory, piece);
    const Transfer t{whole.opcode, area.reference(), offset, piece, skip};
    const Moved moved = engine::run_any(handle, t, true);
    // What was written before a failure stays written; who asks again begins anew.
    if (moved < 0) return moved;
    if (!write) std::memcpy(memory, area.data() + skip, static_cast<std::size_t>(moved));
    done += static_cast<std::size_t>(moved);
    if (static_cast<std::size_t>(moved) < piece) break;  // the end of the file
  }
  return static_cast<Moved>(done);
}

struct Way {
  int gpu = kHost;
  bool staged = false;
};

/// The arguments are in order.
Moved move_on(const FileUse& file, const Wanted& w, Way& way) {
  const Table::Use handle(Table::instance(), file->device);
  if (!handle) return Table::instance().explain_stale(file->device, engine::operation_name(w.opcode));
  const auto begin = reinterpret_cast<std::uintptr_t>(w.base);
  const auto buffer_offset = static_cast<std::uint64_t>(w.buffer_offset);
  const auto offset = static_cast<std::uint64_t>(w.file_offset);
  Transfer t{.opcode = w.opcode, .offset = file->place + offset, .size = w.size};
  if (const int error = file.fit(w.opcode, offset, t.size); error != 0) return -error;
  if (t.size == 0) return 0;
  // A registration that is closed meanwhile is looked for again.
  for (;;) {
    const RequestMemory memory(begin, buffer_offset, t.size, w.opcode == Opcode::write, handle->geometry().number);
    if (memory.kind() == RequestMemory::Kind::plain) return through_bounce(*handle, t, begin + buffer_offset);
    if (memory.kind() == RequestMemory::Kind::beyond) {
      return refuse_moved(engine::operation_name(w.opcode), CU_FILE_CUDA_POINTER_RANGE_ERROR,
                          "the request goes beyond the GPU's allocation",
                          "ask for no more than fits behind the offset");
    }
    t.buffer = memory.reference();
    t.buffer_offset = memory.offset();
    way.staged = engine::is_staged_transfer(*handle, t);
    if (statistics().level() >= 3) way.gpu = gpu_of(memory.reference());
    const Moved moved = engine::run_any(*handle, t, true);
    if (moved != -ESTALE || memory::Registry::instance().was_freed(memory.reference())) return moved;
    if (memory::Registry::instance().find(w.base).generation == memory.reference().generation) {
      return moved;  // it is there: something else is stale
    }
  }
}

Moved move(const Wanted& w, Way& way) {
  const char* const name = engine::operation_name(w.opcode);
  if (w.file == nullptr || w.base == nullptr)
    return refuse_moved(name, CU_FILE_INVALID_VALUE, "a null handle or a null buffer");
  if (w.file_offset < 0 || w.buffer_offset < 0 || w.size > SSIZE_MAX)
    return refuse_moved(name, CU_FILE_INVALID_VALUE, "a negative offset, or a size above the largest");
  const auto begin = reinterpret_cast<std::uintptr_t>(w.base),
             at = begin + static_cast<std::uintptr_t>(w.buffer_offset);
  if (at < begin || at + w.size < at) return refuse_moved(name, CU_FILE_INVALID_VALUE, "the buffer wraps around");
  const FileUse file(w.file);
  if (const int code = file.refuse(w.opcode); code != CU_FILE_SUCCESS) return -code;
  if (w.size == 0) return 0;
  const Moved moved = move_on(file, w, way);
  if (moved < 0) set_device(last_error(), file->name.c_str());
  return moved;
}

}  // namespace

Moved transfer(const Wanted& wanted) {
  const bool write = wanted.opcode == Opcode::write;
  const bool timed = statistics().running();
  const std::uint64_t start = timed ? monotonic_ns() : 0;
  Way way;
  const Moved moved = guarded_moved(write ? "write" : "read", [&] { return move(wanted, way); });
  RunPage& page = run_page();
  if (moved < 0) {
    count(page.errors);
  } else {
    count(write ? page.writes : page.reads);
    count(write ? page.written_bytes : page.read_bytes, static_cast<std::uint64_t>(moved));
  }
  if (timed) {
    const auto at = reinterpret_cast<std::uintptr_t>(wanted.base) + static_cast<std::uintptr_t>(wanted.buffer_offset);
    const std::uint64_t all = static_cast<std::uint64_t>(wanted.file_offset) | wanted.size | at;
    statistics().count(Request{.write = write,
                               .batch = wanted.in_batch,
                               .unaligned = (all & (nvme::kPageSize - 1)) != 0,
                               .staged = way.staged,
                               .gpu = way.gpu,
                               .moved = moved,
                               .nanoseconds = monotonic_ns() - start});
  }
  return moved;
}

namespace {

ssize_t transfer_vector(Opcode opcode, CUfileHandle_t fh, const CUfileIOVec_t* vector, std::size_t count,
                        off_t file_offset, unsigned flags) {
  const char* const name = engine::operation_name(opcode);
  if (fh == nullptr || flags != 0 || count > IOV_MAX || (vector == nullptr && count != 0))
    return refuse_moved(name, CU_FILE_INVALID_VALUE, "a null handle or vector, more than IOV_MAX pieces, or flags");
  // Of no bytes: what is wrong with the handle is told all the same.
  if (const int code = FileUse(fh).refuse(opcode); code != CU_FILE_SUCCESS) return -code;
  Moved done = 0;
  for (const CUfileIOVec_t* piece = vector; piece != vector + count; ++piece) {
    if (piece->len == 0) continue;
    const Moved moved = transfer({opcode, fh, piece->base, piece->len, file_offset + done, 0});
    if (moved < 0) return done != 0 ? done : returned(moved);
    done += moved;
    if (static_cast<std::size_t>(moved) < piece->len) break;
  }
  return done;
}

}  // namespace

}  // namespace ugds::cufile

using namespace ugds::cufile;  // NOLINT
using ugds::nvme::Opcode;      // NOLINT

extern "C" {

ssize_t cuFileRead(CUfileHandle_t fh, void* base, size_t size, off_t file_offset, off_t buffer_offset) {
  return returned(transfer({Opcode::read, fh, base, size, file_offset, buffer_offset}));
}

ssize_t cuFileWrite(CUfileHandle_t fh, const void* base, size_t size, off_t file_offset, off_t buffer_offset) {
  return returned(transfer({Opcode::write, fh, base, size, file_offset, buffer_offset}));
}

ssize_t cuFileReadv(CUfileHandle_t fh, const CUfileIOVec_t* vector, size_t count, off_t file_offset, unsigned flags) {
  return transfer_vector(Opcode::read, fh, vector, count, file_offset, flags);
}

ssize_t cuFileWritev(CUfileHandle_t fh, const CUfileIOVec_t* vector, size_t count, off_t file_offset, unsigned flags) {
  return transfer_vector(Opcode::write, fh, vector, count, file_offset, flags);
}

}  // extern "C"
