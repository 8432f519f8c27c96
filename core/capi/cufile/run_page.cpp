// SPDX-License-Identifier: Apache-2.0
#include "capi/cufile/run_page.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/environment.hpp"
#include "capi/cufile/abi.h"

namespace ugds::cufile {

namespace {

constexpr int kForeignStatus = 113;  ///< with which such a process ends; python/ugds/_run.py knows it
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

constinit RunPage private_page{};
constinit std::atomic<RunPage*> page{&private_page};
constinit std::atomic<int> uncounted{0};  ///< errno of why there is no page of `ugds run`

void write_name(char (&to)[512], const char* text) { std::snprintf(to, sizeof to, "%s", text); }

/// This library's file, as the loader names it.
const char* own_name() {
  Dl_info info{};
  return dladdr(reinterpret_cast<const void*>(&cuFileGetVersion), &info) != 0 ? info.dli_fname : "";
}

/// Of this process, in the folder of `ugds run`; the private page where there is none.
void map_page() {
  page.store(&private_page);
  uncounted.store(0);
  const char* folder = environment("UGDS_RUN_DIR");
  if (folder == nullptr || *folder == '\0') return;
  char path[4096];
  const int length = std::snprintf(path, sizeof path, "%s/%d", folder, getpid());
  if (length < 0 || static_cast<std::size_t>(length) >= sizeof path) return;
  // A program that this one becomes by exec goes on in the same file.
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (file < 0 && errno == EACCES) {
    // It has another user by now (setpriv, su): the page is the former one's.
    std::snprintf(path + length, sizeof path - static_cast<std::size_t>(length), "-%u", geteuid());
    file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
  }
  if (file < 0) return uncounted.store(errno);
  // With its blocks: where the file system is full, a page of a hole would end the program when it is written to.
  if (posix_fallocate(file, 0, sizeof(RunPage)) == 0) {
    void* const mapped = mmap(nullptr, sizeof(RunPage), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) {
      auto* const shared = static_cast<RunPage*>(mapped);
      shared->magic = RunPage::kMagic;
      shared->pid = static_cast<std::uint64_t>(getpid());
      write_name(shared->library, own_name());
      page.store(shared);
    }
  }
  close(file);
}

bool is_cufile(const char* path) {
  const char* slash = std::strrchr(path, '/');
  const char* name = slash == nullptr ? path : slash + 1;
  return std::strncmp(name, "libcufile.so", 12) == 0;
}

/// Whatever is in this library's own folder is ours.
bool is_beside(const char* path, const char* own) {
  const char* const slash = std::strrchr(path, '/');
  const char* const own_slash = std::strrchr(own, '/');
  if (slash == nullptr || own_slash == nullptr) return false;
  const std::string folder(path, slash), own_folder(own, own_slash);
  struct stat a, b;
  return stat(folder.c_str(), &a) == 0 && stat(own_folder.c_str(), &b) == 0 && a.st_dev == b.st_dev &&
         a.st_ino == b.st_ino;
}

struct Search {
  const char* own;
  const char* found = nullptr;
};

int look_at(dl_phdr_info* info, std::size_t, void* context) {
  auto& search = *static_cast<Search*>(context);
  const char* path = info->dlpi_name;
  if (path == nullptr || !is_cufile(path) || is_beside(path, search.own)) return 0;
  search.found = path;
  return 1;
}

[[gnu::constructor]] void begin() {
  map_page();
  pthread_atfork(nullptr, nullptr, map_page);
  look_for_another();
}

/// One may have been loaded since the driver was opened.
[[gnu::destructor]] void end() { look_for_another(); }

}  // namespace

RunPage& run_page() { return *page.load(std::memory_order_relaxed); }

void tell_if_uncounted() {
  const int error = uncounted.exchange(0);
  if (error == 0) return;
  std::fprintf(
      stderr,
      "ugds run: process %d uses uGDS and cannot be counted: a file in %s could not be made (%s). What it does "
      "is in no summary.\n",
      getpid(), environment("UGDS_RUN_DIR"), std::strerror(error));
}

void look_for_another() {
  Search search{own_name()};
  dl_iterate_phdr(look_at, &search);
  if (search.found == nullptr) return;
  RunPage& mine = run_page();
  write_name(mine.foreign, search.found);
  if (&mine == &private_page) return;
  std::fprintf(stderr,
               "ugds run: another libcufile is loaded in process %d: %s (ours is %s). Nothing can be said of which one "
               "the program uses, so it ends here. Remove it from LD_PRELOAD, or do not load it by its path.\n",
               getpid(), search.found, search.own);
  _exit(kForeignStatus);
}

}  // namespace ugds::cufile
