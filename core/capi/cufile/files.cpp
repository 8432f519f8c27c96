// SPDX-License-Identifier: Apache-2.0
#include "capi/cufile/files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/fork.hpp"
#include "base/immortal.hpp"
#include "capi/cufile/driver.hpp"
#include "capi/cufile/errors.hpp"
#include "capi/cufile/run_page.hpp"
#include "capi/cufile/statistics.hpp"
#include "device/pci.hpp"

namespace ugds::cufile {

namespace {

using engine::Table;

constexpr std::uint64_t kSlots = 4096, kPatience = 60'000'000'000;

struct Files {
  std::mutex opening;  ///< before `lock`: of devices that are opened, and closed to make room
  std::mutex lock;
  std::uint64_t next = kSlots;  ///< a multiple of kSlots that no identifier had yet
  std::uint32_t used = 0;       ///< slots that were ever used
  std::vector<std::uint32_t> free;
  std::array<File, kSlots> all;
};
constinit Immortal<Files> the_files;
Files& files() { return the_files.value; }

void prepare_for_fork() {
  static const bool hooked = [] {
    on_fork(ForkOrder::c_driver, {[] {
                                    files().opening.lock();
                                    files().lock.lock();
                                  },
                                  [] {
                                    files().lock.unlock();
                                    files().opening.unlock();
                                  },
                                  [] {
                                    // The parent's; their slots stay taken, so that no identifier comes again.
                                    for (File& file : files().all) file.id.store(0);
                                    files().free.clear();
                                    files().lock.unlock();
                                    files().opening.unlock();
                                  }});
    return true;
  }();
  static_cast<void>(hooked);
}

/// The device behind a descriptor of the program's, in the library's own words.
std::string uri_of(int descriptor, const struct stat& status) {
  const auto node = S_ISCHR(status.st_mode) ? device::helper_node(status.st_rdev) : std::nullopt;
  if (node) return "/dev/" + *node + "?fd=" + std::to_string(descriptor);
  // Until files can be opened: what is in the file, by an emulated controller.
  return "emulated:/proc/self/fd/" + std::to_string(descriptor) + "?lba=512";
}

/// Closes the least recently used device that nobody uses. False: there is none. Under `opening`.
bool make_room() {
  std::vector<File*> open;
  for (File& file : files().all) {
    if (file.device.load(std::memory_order_relaxed) != 0) open.push_back(&file);
  }
  std::ranges::sort(open, {}, [](const File* file) { return file->used.load(std::memory_order_relaxed); });
  return std::ranges::any_of(open, [](File* file) {
    if (Table::instance().close(file->device.load(), Table::Mode::check) != 0) return false;
    file->device.store(0, std::memory_order_release);
    return true;
  });
}

/// Under `opening`. Throws Failure.
engine::HandleId open_device(const std::string& uri) {
  for (;;) {
    try {
      return Table::instance().open(uri, {});
    } catch (const Failure& failure) {
      if (failure.error().code != EMFILE || !make_room()) throw;
    }
  }
}

std::string uri_of(int descriptor) {
  struct stat status;
  if (fstat(descriptor, &status) != 0) fail(errno, "open", "the file's descriptor is not open any more");
  return uri_of(descriptor, status);
}

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
  file.ours = fcntl(opening.descriptor, F_DUPFD_CLOEXEC, 0);
  try {
    if (file.ours < 0) fail(EMFILE, "open", "no file descriptor is left", "close some, or raise the limit (ulimit -n)");
    const std::lock_guard guard(files().opening);
    file.used.store(ticks(), std::memory_order_relaxed);
    file.device.store(open_device(uri_of(file.ours)));
  } catch (...) {
    if (file.ours >= 0) close(file.ours);
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
    const timespec nap{0, 20'000};
    nanosleep(&nap, nullptr);
  }
  {
    const std::lock_guard guard(files().opening);
    std::string held;
    if (file.device.load() != 0 &&
        Table::instance().close(file.device.load(), Table::Mode::bounded, kPatience, &held) == EBUSY) {
      explain("close", EBUSY, held.c_str(), "wait for the requests");
      file.id.store(id, std::memory_order_seq_cst);
      return EBUSY;
    }
    file.device.store(0);
  }
  close(file.ours);
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

void FileUse::open_again(engine::HandleId stale) const {
  const std::lock_guard guard(files().opening);
  const engine::HandleId now = file_->device.load();
  if (now != 0 && now != stale) return;  // somebody has
  if (now != 0) {
    // It was tried to close it, in vain: somebody used it. Then it is there again.
    if (Table::Use(Table::instance(), now)) return;
    fail(ENODEV, "open", "the file's device was closed by another part of the program", "register the file again");
  }
  file_->device.store(open_device(uri_of(file_->ours)), std::memory_order_release);
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
  return true;
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
