// SPDX-License-Identifier: Apache-2.0
#include "base/fault_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace ugds {

namespace {

constexpr const char* kOlderWedgeTrace = "wedge.1.trace.json";

std::string find_folder() {
  if (const char* named = secure_getenv("UGDS_STATE_DIR")) return named;
  if (const char* xdg = secure_getenv("XDG_STATE_HOME"); xdg != nullptr && *xdg == '/')
    return std::string(xdg) + "/ugds";
  const char* home = secure_getenv("HOME");
  return home != nullptr && *home == '/' ? std::string(home) + "/.local/state/ugds" : "";
}

struct Descriptor {
  int number = -1;
  explicit Descriptor(int opened) : number(opened) {}
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  void close() {
    if (number >= 0) ::close(number);
    number = -1;
  }
};

/// Makes what is missing of the path. What fails shows when it is opened.
void make_folders(const std::string& path) {
  for (std::size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1)) {
    mkdir(path.substr(0, at).c_str(), 0700);
  }
  mkdir(path.c_str(), 0700);
}

/// Ours, and nobody else's to write: as root in somebody's home we leave no file, and follow no link of theirs.
bool is_ours(int descriptor, mode_t kind, struct stat& status) {
  return fstat(descriptor, &status) == 0 && (status.st_mode & S_IFMT) == kind && status.st_uid == geteuid() &&
         (status.st_mode & 022) == 0;
}

int open_folder() {
  const std::string& path = state_folder();
  if (path.empty()) return -1;
  constexpr int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  int folder = open(path.c_str(), flags);
  if (folder < 0) {
    make_folders(path);
    folder = open(path.c_str(), flags);
  }
  struct stat status {};
  if (folder >= 0 && !is_ours(folder, S_IFDIR, status)) {
    ::close(folder);
    folder = -1;
  }
  return folder;
}

int open_file(int folder, const char* name, int more, struct stat& status) {
  const int file = openat(folder, name, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | more, 0600);
  if (file >= 0 && !is_ours(file, S_IFREG, status)) {
    ::close(file);
    return -1;
  }
  return file;
}

}  // namespace

const std::string& state_folder() {
  static const std::string* const folder = new std::string(find_folder());  // NOLINT: used until the very end
  return *folder;
}

void append_fault(std::string_view line) noexcept try {
  const Descriptor folder(open_folder());
  if (folder.number < 0) return;
  struct stat status {};
  Descriptor file(open_file(folder.number, kFaultFile, O_APPEND, status));
  if (file.number < 0) return;
  if (static_cast<std::size_t>(status.st_size) + line.size() > kFaultFileSize) {
    // Of two processes that do this at once one may move what the other has just begun: that is a line or two.
    renameat(folder.number, kFaultFile, folder.number, kOlderFaultFile);
    file.close();
    file.number = open_file(folder.number, kFaultFile, O_APPEND, status);
    if (file.number < 0) return;
  }
  // In one call: lines of several processes do not mix. Whoever reads passes over what a full disk has cut.
  static_cast<void>(!::write(file.number, line.data(), line.size()));
} catch (...) {
}

void keep_wedge_trace(std::string_view trace) noexcept try {
  const Descriptor folder(open_folder());
  if (folder.number < 0) return;
  char partial[48];
  std::snprintf(partial, sizeof partial, ".%d.partial", static_cast<int>(getpid()));
  struct stat status {};
  {
    const Descriptor file(open_file(folder.number, partial, O_TRUNC, status));
    if (file.number < 0) return;
    for (std::string_view rest = trace; !rest.empty();) {
      const ssize_t written = ::write(file.number, rest.data(), rest.size());
      if (written <= 0) {
        unlinkat(folder.number, partial, 0);
        return;
      }
      rest.remove_prefix(static_cast<std::size_t>(written));
    }
  }
  renameat(folder.number, kWedgeTrace, folder.number, kOlderWedgeTrace);  // of what wedged before, where something did
  renameat(folder.number, partial, folder.number, kWedgeTrace);
} catch (...) {
}

}  // namespace ugds
