// SPDX-License-Identifier: Apache-2.0
//
// By pread and pwrite and never by mapping: a full disk then is an error of one command, and not a SIGBUS.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "base/steps.hpp"
#include "emulator/media.hpp"

namespace ugds::emulator {

namespace {

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

class PlainFile final : public Media {
 public:
  explicit PlainFile(Descriptor file) : file_(std::move(file)) {}
  ~PlainFile() override {
    if (!made_.empty()) ::unlink(made_.c_str());
  }
  /// The file at `path` was made for this, and is removed again unless it is kept. Only for a file that is locked:
  /// nobody else uses it then.
  void remove_unless_kept(std::string path) noexcept { made_ = std::move(path); }
  int descriptor() const { return file_.get(); }
  void keep() noexcept override { made_.clear(); }

  int read(std::uint64_t at, void* out, std::uint64_t bytes) override {
    auto* to = static_cast<std::byte*>(out);
    while (bytes != 0) {
      const ssize_t done = ::pread(file_.get(), to, bytes, static_cast<off_t>(at));
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) return errno;
      if (done == 0) return EIO;  // somebody cut the file
      to += done;
      at += static_cast<std::uint64_t>(done);
      bytes -= static_cast<std::uint64_t>(done);
    }
    return 0;
  }

  int write(std::uint64_t at, const void* data, std::uint64_t bytes) override {
    auto* from = static_cast<const std::byte*>(data);
    while (bytes != 0) {
      const ssize_t done = ::pwrite(file_.get(), from, bytes, static_cast<off_t>(at));
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) return errno;
      if (done == 0) return ENOSPC;
      from += done;
      at += static_cast<std::uint64_t>(done);
      bytes -= static_cast<std::uint64_t>(done);
    }
    return 0;
  }

  int discard(std::uint64_t at, std::uint64_t bytes) override {
    if (bytes == 0) return 0;
    if (::fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at),
                    static_cast<off_t>(bytes)) == 0)
      return 0;
    if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
    static constexpr std::array<std::byte, 65536> kZeros{};
    const std::uint64_t end = at + bytes;
    for (at = next_data(at, end); at < end;) {
      const std::uint64_t part = std::min<std::uint64_t>(kZeros.size(), end - at);
      if (const int error = write(at, kZeros.data(), part); error != 0) return error;
      at = next_data(at + part, end);
    }
    return 0;
  }

  int sync() override { return ::fdatasync(file_.get()) == 0 ? 0 : errno; }

  std::uint64_t next_data(std::uint64_t at, std::uint64_t end) override {
    if (at >= end) return end;
    const off_t data = ::lseek(file_.get(), static_cast<off_t>(at), SEEK_DATA);
    if (data < 0) return errno == ENXIO ? end : at;
    return std::min(static_cast<std::uint64_t>(data), end);
  }

  std::uint64_t stored_bytes() const override {
    struct stat s;
    return ::fstat(file_.get(), &s) == 0 ? static_cast<std::uint64_t>(s.st_blocks) * 512 : 0;
  }

 private:
  Descriptor file_;
  std::string made_;
};

[[noreturn]] void refuse(int code, const std::string& path, const std::string& why, const std::string& hint) {
  fail(code, "open", "image " + path + ": " + why, hint);
}

/// Opens and locks the file, or gives nothing where it was removed or made by somebody else meanwhile.
std::unique_ptr<PlainFile> try_open(const std::string& path, std::uint64_t wanted, struct stat& s) {
  std::string made = path;  // copied first: nothing may fail between the lock and knowing what to remove
  bool created = false;
  int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) {
    if (wanted == 0)
      refuse(EINVAL, path, "does not exist, and no size is given to make it", "add ?size=, such as ?size=1GiB");
    fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0 && errno == EEXIST) return nullptr;
    created = fd >= 0;
  }
  if (fd < 0) refuse(errno, path, std::strerror(errno), "");
  auto media = std::make_unique<PlainFile>(Descriptor(fd));
  if (::fstat(fd, &s) != 0) refuse(errno, path, std::strerror(errno), "");
  if (!S_ISREG(s.st_mode)) refuse(EINVAL, path, "is not a plain file", "use file: for a block device");
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0)
    refuse(EBUSY, path, "is open as an emulated controller already", "share one controller's data by ?name=");
  // Between opening and locking, an opening that failed may have removed the file that it had made: what is locked then
  // has no name, and would be lost.
  struct stat named;
  if (::stat(path.c_str(), &named) != 0 || named.st_dev != s.st_dev || named.st_ino != s.st_ino) return nullptr;
  if (created) media->remove_unless_kept(std::move(made));
  // Its size may have been given to it meanwhile.
  if (::fstat(fd, &s) != 0) refuse(errno, path, std::strerror(errno), "");
  return media;
}

}  // namespace

FileMedia open_file_media(const std::string& path, std::uint64_t wanted) {
  setup_step("emulator: open image");
  struct stat s;
  std::unique_ptr<PlainFile> media;
  for (int tries = 0; media == nullptr; ++tries) {
    if (tries == 1000) refuse(EBUSY, path, "is removed and made again all the time", "use a file of its own");
    media = try_open(path, wanted, s);
  }
  setup_step("emulator: image");
  const int fd = media->descriptor();
  auto bytes = static_cast<std::uint64_t>(s.st_size);
  if (bytes == 0 && wanted != 0) {
    if (::ftruncate(fd, static_cast<off_t>(wanted)) != 0)
      refuse(errno, path, std::string("cannot be made that large: ") + std::strerror(errno), "");
    bytes = wanted;
  }
  return {std::move(media), bytes};
}

}  // namespace ugds::emulator
