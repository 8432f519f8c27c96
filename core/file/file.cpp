// SPDX-License-Identifier: Apache-2.0
#include "file/file.hpp"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <linux/stat.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.hpp"
#include "base/steps.hpp"

namespace ugds::file {

namespace {

[[noreturn]] void refuse_open(const std::string& name, int code, const Options& options = {}, bool is_missing = false) {
  const char* hint = "";
  switch (code) {
    case ENOENT:
      hint = options.create ? "make its folder first: create=1 makes a file, and no folders"
                            : "check the path, or have it made: file:PATH?create=1";
      break;
    case EACCES:
      hint = is_missing         ? "have the folder's owner allow files to be made in it, or name another folder"
             : options.readonly ? "have its owner allow reading"
                                : "open it for reading only (readonly=1), or have its owner allow more";
      break;
    case EBUSY:
      hint =
          "a block device is written by one opener: the kernel uses it (it is mounted, or part of another), or it is "
          "open here or in another process (fuser names it): close it there, or open it with readonly=1";
      break;
    case EPERM: hint = "the system keeps this process from it, as a container's rules for devices do"; break;
    case EISDIR:
    case ENOTDIR: hint = "name a file: a part of the path is none, or is no folder"; break;
    case EROFS: hint = "the file system is read-only: open it with readonly=1"; break;
    case EMFILE:
    case ENFILE: hint = "raise the limit of open files (ulimit -n)"; break;
    default: hint = "a file, a block device, or a URI such as emulated:1GiB is opened here"; break;
  }
  fail(code, "open", name + ": " + std::strerror(code), hint);
}

const char* name_of_file_system(long magic) {
  switch (magic) {
    case EXT4_SUPER_MAGIC: return "ext4";
    case XFS_SUPER_MAGIC: return "xfs";
    case BTRFS_SUPER_MAGIC: return "btrfs";
    case TMPFS_MAGIC: return "tmpfs";
    case OVERLAYFS_SUPER_MAGIC: return "overlay";
    case NFS_SUPER_MAGIC: return "nfs";
    case F2FS_SUPER_MAGIC: return "f2fs";
    case FUSE_SUPER_MAGIC: return "fuse";
    case 0x2fc12fc1: return "zfs";
    default: return "a file system";
  }
}

/// Before it is opened: opening a FIFO waits for who writes to it, and opening a device may set something going.
void refuse_other_kinds(const std::string& name, mode_t mode) {
  if (S_ISDIR(mode)) fail(EISDIR, "open", name + " is a directory", "name a file in it");
  if (!S_ISREG(mode) && !S_ISBLK(mode)) {
    fail(EINVAL, "open", name + " is neither a regular file nor a block device",
         "use a file, a block device, or another scheme of URIs");
  }
}

std::string again(int descriptor) { return "/proc/self/fd/" + std::to_string(descriptor); }

}  // namespace

std::shared_ptr<File> File::open(const std::string& path, const Options& options) {
  setup_step("file: open");
  auto file = std::make_shared<File>();
  const int common = O_CLOEXEC | O_NOCTTY | (options.create ? O_CREAT : 0);
  struct stat before {};
  const bool is_there = ::stat(path.c_str(), &before) == 0, is_block = is_there && S_ISBLK(before.st_mode);
  const bool is_missing = !is_there && errno == ENOENT;
  if (is_there) refuse_other_kinds(path, before.st_mode);
  // O_EXCL without O_CREAT: a block device that is mounted, or part of another, is not to be written behind its back.
  const int exclusive = is_block ? O_EXCL : 0;
  int opened = -1;
  file->access_ = O_RDWR;
  bool is_made = false;
  if (!options.readonly && options.create && is_missing) {
    // Nobody else's, then: it may be removed again.
    opened = ::open(path.c_str(), O_RDWR | common | O_EXCL, 0666);
    is_made = opened >= 0;
  }
  if (!options.readonly && opened < 0) opened = ::open(path.c_str(), O_RDWR | common | exclusive, 0666);
  if (options.readonly ||
      (opened < 0 && (errno == EACCES || errno == EROFS || errno == EPERM || errno == ETXTBSY) && !options.create)) {
    file->why_one_way_ = options.readonly ? "it was opened with readonly=1"
                                          : std::string("it may only be read: ") + std::strerror(errno);
    opened = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY);
    file->access_ = O_RDONLY;
  }
  if (opened < 0) refuse_open(path, errno, options, is_missing);
  file->buffered_ = Descriptor(opened);
  file->name_ = path;
  try {
    file->look(path, opened, options);
  } catch (...) {
    struct stat now {};
    struct stat named {};
    const bool is_unused = is_made && ::fstat(opened, &now) == 0 && now.st_size == 0 &&
                           ::stat(path.c_str(), &named) == 0 && named.st_ino == now.st_ino &&
                           named.st_dev == now.st_dev;
    if (is_unused) ::unlink(path.c_str());
    throw;
  }
  return file;
}

bool File::readonly() const { return access_ == O_RDONLY; }
bool File::writeonly() const { return access_ == O_WRONLY; }

std::shared_ptr<File> File::adopt(int descriptor, const Options& options) {
  setup_step("file: adopt");
  const std::string name = "descriptor " + std::to_string(descriptor);
  const int flags = ::fcntl(descriptor, F_GETFL);
  if (flags < 0) fail(EBADF, "open", name + " is not open", "pass an open descriptor of a file or block device");
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) refuse_open(name, errno);
  refuse_other_kinds(name, status.st_mode);
  auto file = std::make_shared<File>();
  const bool may_read = (flags & O_ACCMODE) != O_WRONLY, may_write = (flags & O_ACCMODE) != O_RDONLY;
  if (options.readonly && !may_read) fail(EACCES, "open", name + " is open for writing only", "leave readonly=1 out");
  file->access_ = !may_write || options.readonly ? O_RDONLY : may_read ? O_RDWR : O_WRONLY;
  file->why_one_way_ = !may_write         ? "its descriptor is open for reading only"
                       : options.readonly ? "it was opened with readonly=1"
                       : !may_read        ? "its descriptor is open for writing only"
                                          : "";
  char path[512];
  const ssize_t length = ::readlink(again(descriptor).c_str(), path, sizeof path);
  file->name_ = length > 0 && path[0] == '/' ? std::string(path, static_cast<std::size_t>(length)) : name;
  // A description of its own, so that its flags are ours; where that may not be had, the caller's.
  Descriptor mine(::open(again(descriptor).c_str(), file->access_ | O_CLOEXEC | O_NOCTTY));
  if (!mine) {
    const int why = errno;
    mine = Descriptor(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
    if (!mine) refuse_open(name, errno);
    if ((flags & O_DIRECT) != 0) {
      file->direct_ = Descriptor(::fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
      mine = Descriptor();
      file->why_whole_ =
          std::string("its descriptor has O_DIRECT, and it cannot be opened once more without: ") + std::strerror(why);
    }
  }
  file->buffered_ = std::move(mine);
  file->look(name, file->buffered_ ? file->buffered_.get() : file->direct_.get(), options);
  return file;
}

/// What kind of thing it is, and whether it has direct I/O.
void File::look(const std::string& name, int descriptor, const Options& options) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) refuse_open(name, errno);
  is_block_device_ = S_ISBLK(status.st_mode);
  refuse_other_kinds(name, status.st_mode);
  struct statfs system {};
  const bool known = ::fstatfs(descriptor, &system) == 0;
  kind_ = is_block_device_ ? "block device" : known ? name_of_file_system(system.f_type) : "a file system";
  ask_alignment(descriptor);
  // It takes O_DIRECT, and all the same a file is in the page cache and nowhere else.
  if (known && system.f_type == TMPFS_MAGIC && !is_block_device_) why_buffered_ = "tmpfs has no direct I/O";
  if (options.direct == Direct::off) {
    why_buffered_ = "it was opened with direct=off";
  } else if (why_buffered_.empty() && !direct_) {
    direct_ = Descriptor(::open(again(descriptor).c_str(), access_ | O_DIRECT | O_CLOEXEC | O_NOCTTY));
    if (!direct_) {
      why_buffered_ = errno == EINVAL ? kind_ + " has no direct I/O"
                                      : std::string("it could not be opened with O_DIRECT: ") + std::strerror(errno);
    }
  }
  if (!why_buffered_.empty()) direct_ = Descriptor();
  if (!direct_ && options.direct == Direct::demanded) {
    fail(EOPNOTSUPP, "open", name + ": direct I/O was demanded, and " + why_buffered_,
         "leave direct=on out, or put the file on another file system, such as ext4 or xfs");
  }
  if (!direct_ && !buffered_) fail(EACCES, "open", name + " could not be opened once more without O_DIRECT");
}

void File::ask_alignment(int descriptor) {
  if (is_block_device_) {
    int logical = 0;
    if (::ioctl(descriptor, BLKSSZGET, &logical) == 0 && logical >= 512) {
      offset_alignment_ = memory_alignment_ = static_cast<std::uint32_t>(logical);
    }
  }
#ifdef STATX_DIOALIGN
  // By number: a C library may know the structure by its older shape.
  struct statx found {};
  if (::syscall(SYS_statx, descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) != 0 ||
      (found.stx_mask & STATX_DIOALIGN) == 0)
    return;
  if (found.stx_dio_offset_align == 0 || found.stx_dio_mem_align == 0) {
    why_buffered_ = kind_ + " has no direct I/O";
    return;
  }
  offset_alignment_ = std::max(512u, found.stx_dio_offset_align);
  memory_alignment_ = std::max(4u, found.stx_dio_mem_align);
#endif
}

std::uint64_t File::size() const noexcept {
  const int descriptor = buffered_ ? buffered_.get() : direct_.get();
  if (is_block_device_) {
    std::uint64_t bytes = 0;
    return ::ioctl(descriptor, BLKGETSIZE64, &bytes) == 0 ? bytes : 0;
  }
  struct stat status {};
  return ::fstat(descriptor, &status) == 0 ? static_cast<std::uint64_t>(status.st_size) : 0;
}

std::string File::why_buffered() const {
  if (refused_.load(std::memory_order_relaxed)) return kind_ + " refused a direct request that was aligned as it asks";
  return why_buffered_;
}

}  // namespace ugds::file
