// SPDX-License-Identifier: Apache-2.0
#include "capi/cufile/files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/immortal.hpp"
#include "capi/cufile/driver.hpp"
#include "capi/cufile/errors.hpp"
#include "capi/cufile/fork.hpp"
#include "capi/cufile/run_page.hpp"
#include "capi/cufile/statistics.hpp"
#include "device/file.hpp"
#include "device/pci.hpp"
#include "engine/transfer.hpp"

namespace ugds::cufile {

namespace {

using engine::Table;

constexpr std::uint64_t kSlots = 4096, kPatience = 60'000'000'000;

struct Files {
  std::mutex lock;
  /// Of all files: a device on which each has its place, so that none costs a device's bring-up.
  engine::HandleId pool = 0;
  std::uint64_t next = kSlots;  ///< a multiple of kSlots that no identifier had yet
  std::uint32_t used = 0;       ///< slots that were ever used
  std::vector<std::uint32_t> free;
  std::array<File, kSlots> all;
};
constinit Immortal<Files> the_files;
Files& files() { return the_files.value; }

void prepare_for_fork() {
  static const bool hooked = [] {
    at_fork({[] { files().lock.lock(); }, [] { files().lock.unlock(); },
             [] {
               // The parent's; their slots stay taken, so that no identifier comes again.
               for (File& file : files().all) file.id.store(0);
               files().free.clear();
               files().pool = 0;
               files().lock.unlock();
             }});
    return true;
  }();
  static_cast<void>(hooked);
}

/// Under the lock. Throws Failure.
engine::HandleId pool() {
  if (files().pool == 0) files().pool = Table::instance().open("file:?pool=1", {});
  return files().pool;
}

device::FileDevice& pool_device(engine::Handle& handle) { return dynamic_cast<device::FileDevice&>(handle.device()); }

struct Opening {
  int descriptor;
  struct stat status;
  int flags;
};

/// 0, or the code of why the descriptor cannot be registered.
int examine(const CUfileDescr_t& descr, Opening& opening) {
  if (descr.type == CU_FILE_HANDLE_TYPE_USERSPACE_FS || descr.type == CU_FILE_HANDLE_TYPE_OPAQUE_WIN32) {
    return refuse("open", CU_FILE_IO_NOT_SUPPORTED,
                  "file systems in user space post their requests by RDMA, and Windows handles are not for this system",
                  "register a file descriptor")
        .err;
  }
  if (descr.type != CU_FILE_HANDLE_TYPE_OPAQUE_FD)
    return refuse("open", CU_FILE_INVALID_VALUE, "a descriptor of an unknown type", "use type 1, a file descriptor")
        .err;
  opening.descriptor = descr.handle.fd;
  if (fstat(opening.descriptor, &opening.status) != 0 || (opening.flags = fcntl(opening.descriptor, F_GETFL)) < 0)
    return refuse("open", CU_FILE_INVALID_VALUE, "the file descriptor is not open").err;
  const mode_t mode = opening.status.st_mode;
  const bool helper = S_ISCHR(mode) && device::helper_node(opening.status.st_rdev);
  if (!S_ISREG(mode) && !S_ISBLK(mode) && !helper) {
    return refuse("open", CU_FILE_INVALID_FILE_TYPE, "the descriptor is of no regular file and of no block device",
                  "open a file or a block device")
        .err;
  }
  if ((opening.flags & (O_APPEND | O_PATH)) != 0) {
    return refuse("open", CU_FILE_INVALID_FILE_OPEN_FLAG,
                  "the file is open with O_APPEND or O_PATH, and requests name the offsets that they go to",
                  "open it without")
        .err;
  }
  return CU_FILE_SUCCESS;
}

bool is_same(const File& file, const Opening& opening) {
  return file.id.load() != 0 && file.descriptor == opening.descriptor && file.on == opening.status.st_dev &&
         file.inode == opening.status.st_ino;
}

/// Under the lock. Nobody finds it yet.
std::uint32_t take_slot() {
  Files& f = files();
  if (!f.free.empty()) {
    const std::uint32_t slot = f.free.back();
    f.free.pop_back();
    return slot;
  }
  if (f.used == kSlots) {
    fail(EMFILE, "open", "4096 files are registered", "deregister some by cuFileHandleDeregister()");
  }
  f.free.reserve(f.used + 1);  // so that giving a slot back needs no memory
  return f.used++;
}

void give_slot_back(std::uint32_t slot) {
  const std::lock_guard guard(files().lock);
  files().free.push_back(slot);
}

/// The controller of a node, or a place in the pool. Throws Failure.
void open_device(File& file, const Opening& opening) {
  if (const auto node = S_ISCHR(opening.status.st_mode) ? device::helper_node(opening.status.st_rdev) : std::nullopt) {
    file.device = Table::instance().open("/dev/" + *node + "?fd=" + std::to_string(opening.descriptor), {});
    file.place = 0;
    file.name = "/dev/" + *node;
    return;
  }
  file.opened = file::File::adopt(opening.descriptor, {});
  file.name = "file:" + file.opened->name();
  {
    const std::lock_guard guard(files().lock);
    file.device = pool();
  }
  const Table::Use device(Table::instance(), file.device);
  if (!device) fail(ENODEV, "open", "the device of all files was closed by another part of the program");
  file.place = pool_device(*device).attach(file.opened);
}

/// Nobody uses it. 0, or EBUSY.
int close_device(File& file) {
  if (file.opened == nullptr) {
    std::string held;
    if (Table::instance().close(file.device, Table::Mode::bounded, kPatience, &held) != EBUSY) return 0;
    explain("close", EBUSY, held.c_str(), "wait for the requests");
    return EBUSY;
  }
  const Table::Use device(Table::instance(), file.device);
  if (device) pool_device(*device).detach(file.place);
  file.opened.reset();
  return 0;
}

CUfileError_t open_file(CUfileHandle_t* fh, const CUfileDescr_t& descr) {
  Opening opening{};
  if (const int code = examine(descr, opening); code != CU_FILE_SUCCESS) return answer(code);
  prepare_for_fork();
  Driver::instance().need();
  std::uint32_t slot = 0;
  {
    const std::lock_guard guard(files().lock);
    for (std::uint32_t i = 0; i < files().used; ++i) {
      if (is_same(files().all[i], opening))
        return refuse("open", CU_FILE_HANDLE_ALREADY_REGISTERED, "the descriptor is registered",
                      "use the handle that it was registered as");
    }
    slot = take_slot();
  }
  File& file = files().all[slot];
  try {
    open_device(file, opening);
  } catch (...) {
    file.opened.reset();
    give_slot_back(slot);
    throw;
  }
  const int access = opening.flags & O_ACCMODE;
  file.readable = access != O_WRONLY;
  file.writable = access != O_RDONLY;
  const std::lock_guard guard(files().lock);
  file.descriptor = opening.descriptor;
  file.on = opening.status.st_dev;
  file.inode = opening.status.st_ino;
  const std::uint64_t id = files().next + slot;
  files().next += kSlots;
  file.id.store(id, std::memory_order_seq_cst);
  *fh = reinterpret_cast<CUfileHandle_t>(static_cast<std::uintptr_t>(id));
  return answer(CU_FILE_SUCCESS);
}

/// 0, EBADF (stale), or EBUSY.
int close_file(std::uint64_t id) {
  File& file = files().all[id % kSlots];
  std::uint64_t expected = id;
  // Ours: mark, then look at the count. Users: count in, then look at the mark.
  if (id < kSlots || !file.id.compare_exchange_strong(expected, 0, std::memory_order_seq_cst)) return EBADF;
  const std::uint64_t start = monotonic_ns();
  while (file.users.load(std::memory_order_seq_cst) != 0) {
    if (monotonic_ns() - start > kPatience) {
      file.id.store(id, std::memory_order_seq_cst);
      return EBUSY;
    }
    count_ended_requests();  // those on streams use it until somebody has looked
    const timespec nap{0, 20'000};
    nanosleep(&nap, nullptr);
  }
  if (close_device(file) == EBUSY) {
    file.id.store(id, std::memory_order_seq_cst);
    return EBUSY;
  }
  give_slot_back(static_cast<std::uint32_t>(id % kSlots));
  return 0;
}

}  // namespace

FileUse::FileUse(CUfileHandle_t handle) {
  const std::uint64_t id = reinterpret_cast<std::uintptr_t>(handle);
  File& file = files().all[id % kSlots];
  file.users.fetch_add(1, std::memory_order_seq_cst);
  if (id >= kSlots && file.id.load(std::memory_order_seq_cst) == id) {
    file_ = &file;
  } else {
    file.users.fetch_sub(1, std::memory_order_release);
  }
}

int FileUse::fit(nvme::Opcode opcode, std::uint64_t offset, std::uint64_t& size) const {
  if (file_->opened == nullptr) return 0;
  constexpr std::uint64_t kSpan = device::FileDevice::kFileSpan;
  if (opcode == nvme::Opcode::write && ((offset | size) & (file_->opened->write_unit() - 1)) != 0) {
    std::string cause("a write to this file must be of whole blocks of ");
    cause.append(std::to_string(file_->opened->write_unit())).append(" bytes, and nothing was written: ");
    cause.append(file_->opened->why_whole());
    explain("write", EINVAL, cause.c_str(), "register a descriptor without O_DIRECT, or write whole blocks");
    return EINVAL;
  }
  if (offset <= kSpan && size <= kSpan - offset) return 0;
  // Of a file that is not so large a read finds its end.
  if (opcode == nvme::Opcode::read && file_->opened->size() <= kSpan) {
    size = offset < kSpan ? kSpan - offset : 0;
    return 0;
  }
  explain(engine::operation_name(opcode), EFBIG, "the range goes beyond 16 TiB, the most of a file that is reached");
  return EFBIG;
}

int FileUse::refuse(nvme::Opcode opcode) const {
  const bool write = opcode == nvme::Opcode::write;
  const char* const operation = write ? "write" : "read";
  if (file_ == nullptr) {
    return cufile::refuse(operation, CU_FILE_HANDLE_NOT_REGISTERED, "the file is not registered, or no longer",
                          "register it by cuFileHandleRegister()")
        .err;
  }
  if (write ? file_->writable : file_->readable) return CU_FILE_SUCCESS;
  return cufile::refuse(operation, CU_FILE_INVALID_FILE_OPEN_FLAG,
                        write ? "the file is open for reading alone" : "the file is open for writing alone",
                        "open it with O_RDWR")
      .err;
}

bool close_all_files() {
  for (std::uint32_t i = 0; i < kSlots; ++i) {
    const std::uint64_t id = files().all[i].id.load();
    if (id != 0 && close_file(id) == EBUSY) return false;
  }
  // The next file opens the device again.
  engine::HandleId empty = 0;
  {
    const std::lock_guard guard(files().lock);
    std::swap(empty, files().pool);
  }
  if (empty == 0 || Table::instance().close(empty, Table::Mode::bounded, kPatience) != EBUSY) return true;
  const std::lock_guard guard(files().lock);
  if (files().pool == 0) files().pool = empty;
  return false;
}

}  // namespace ugds::cufile

using namespace ugds::cufile;  // NOLINT

extern "C" {

CUfileError_t cuFileHandleRegister(CUfileHandle_t* fh, CUfileDescr_t* descr) {
  CUfileError_t opened = fh == nullptr || descr == nullptr ? refuse("open", CU_FILE_INVALID_VALUE, "a null argument")
                                                           : guarded("open", [&] { return open_file(fh, *descr); });
  statistics().count(Operation::handle_register, opened.err == CU_FILE_SUCCESS);
  if (opened.err == CU_FILE_SUCCESS) count(run_page().handles);
  return opened;
}

void cuFileHandleDeregister(CUfileHandle_t fh) {
  const CUfileError_t closed = guarded("close", [&] {
    switch (close_file(reinterpret_cast<std::uintptr_t>(fh))) {
      case 0: return answer(CU_FILE_SUCCESS);
      case EBUSY: return answer(CU_FILE_INTERNAL_ERROR);
      default: return refuse("close", CU_FILE_HANDLE_NOT_REGISTERED, "the file is not registered, or no longer");
    }
  });
  statistics().count(Operation::handle_deregister, closed.err == CU_FILE_SUCCESS);
}

}  // extern "C"
