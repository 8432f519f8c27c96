// SPDX-License-Identifier: Apache-2.0
#include "serve/listener.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/error.hpp"

namespace ugds::serve {

namespace {

constexpr std::chrono::milliseconds kLockPause{10};
constexpr int kLockTries = 300;

[[noreturn]] void refuse(int code, const std::string& path, const std::string& cause, const std::string& hint) {
  fail(code, "serve", "cannot listen at " + path + ": " + cause,
       hint.empty() ? "name a place in a folder that you may write to, such as /tmp/ssd" : hint);
}

std::string place(const std::string& path) {
  struct stat status;
  std::string full = path;
  if (full.empty()) fail(EINVAL, "serve", "the path of the socket is empty", "name a path, such as ./ssd.sock");
  if (full.back() != '/' && stat(full.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) full += '/';
  if (full.back() == '/') full += "cntrl";
  constexpr std::size_t kLongest = sizeof(sockaddr_un::sun_path) - 1;
  if (full.size() > kLongest)
    refuse(ENAMETOOLONG, full,
           "the path has " + std::to_string(full.size()) + " bytes, and a socket's has at most " +
               std::to_string(kLongest),
           "choose a shorter one, or one relative to the working folder");
  return full;
}

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
}

Descriptor make_socket(const std::string& path) {
  Descriptor made(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made) refuse(errno, path, std::strerror(errno), "");
  return made;
}

/// Removes what a dead server left there.
void clear_away(const std::string& path) {
  struct stat status;
  if (lstat(path.c_str(), &status) != 0) return;
  if (!S_ISSOCK(status.st_mode)) refuse(EEXIST, path, "it is there and no socket", "name another path, or remove it");
  const Descriptor probe = make_socket(path);
  const sockaddr_un address = address_of(path);
  if (connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 || errno != ECONNREFUSED)
    refuse(EADDRINUSE, path, "another server is there", "stop it, or name another path");
  unlink(path.c_str());
}

/// Of two that start at once, neither may take the other's fresh socket for a dead one's. Whoever may read the folder
/// can hold its lock, so nobody waits for long.
Descriptor lock_folder(const std::string& folder, const std::string& path) {
  Descriptor lock(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!lock) refuse(errno, path, "folder " + folder + ": " + std::strerror(errno), "make the folder first");
  for (int tries = 0; flock(lock.get(), LOCK_EX | LOCK_NB) != 0; ++tries) {
    if (errno != EWOULDBLOCK && errno != EINTR)
      refuse(errno, path, "folder " + folder + ": " + std::strerror(errno), "");
    if (tries == kLockTries)
      refuse(EBUSY, path, "somebody holds the lock of folder " + folder, "name a folder that only you may read");
    std::this_thread::sleep_for(kLockPause);
  }
  return lock;
}

/// Gives the socket its mode, and says which file it is. By a descriptor: in a folder that others may change, its name
/// can lead to another's file by now, whose mode is not to be touched.
bool set_mode(const std::string& path, mode_t mode, struct stat& status) {
  const Descriptor made(open(path.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
  if (!made || fstat(made.get(), &status) != 0) return false;
  if (!S_ISSOCK(status.st_mode) || status.st_uid != geteuid() || status.st_nlink != 1) {
    errno = EEXIST;
    return false;
  }
  return chmod(("/proc/self/fd/" + std::to_string(made.get())).c_str(), mode) == 0;
}

}  // namespace

Listener::Listener(const std::string& path, mode_t mode) : path_(place(path)) {
  const std::string folder = folder_of(path_);
  const Descriptor lock = lock_folder(folder, path_);
  clear_away(path_);
  socket_ = make_socket(path_);
  const sockaddr_un address = address_of(path_);
  // It is made with this mode, as far as the umask goes: at no moment may more connect than are asked for.
  fchmod(socket_.get(), mode);
  if (bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    refuse(errno, path_, std::strerror(errno), "");
  struct stat status;
  // Nobody can connect before `listen`.
  if (!set_mode(path_, mode, status) || listen(socket_.get(), 16) != 0) {
    const int code = errno;
    unlink(path_.c_str());
    refuse(code, path_, std::strerror(code), "");
  }
  device_ = status.st_dev;
  inode_ = status.st_ino;
}

Listener::~Listener() {
  struct stat status;
  if (lstat(path_.c_str(), &status) == 0 && status.st_dev == device_ && status.st_ino == inode_) unlink(path_.c_str());
}

}  // namespace ugds::serve
