// SPDX-License-Identifier: Apache-2.0
#include "base/library.hpp"

#include <dlfcn.h>

#include "base/environment.hpp"

namespace ugds {

SharedLibrary::SharedLibrary(const char* override, std::initializer_list<const char*> names) {
  open(override, names, RTLD_NOW | RTLD_LOCAL);
}

SharedLibrary SharedLibrary::loaded(const char* override, std::initializer_list<const char*> names) {
  SharedLibrary library;
  const char* named = environment(override);
  const bool is_named = named != nullptr && *named != '\0';
  library.open(override, names, RTLD_NOW | RTLD_LOCAL | (is_named ? 0 : RTLD_NOLOAD));
  return library;
}

void SharedLibrary::open(const char* override, std::initializer_list<const char*> names, int flags) {
  const char* named = environment(override);
  if (named != nullptr && *named != '\0') {
    handle_ = dlopen(named, flags);
    if (handle_ == nullptr) why_ = dlerror();
    return;
  }
  for (const char* name : names) {
    handle_ = dlopen(name, flags);
    if (handle_ != nullptr) return;
    const char* error = dlerror();
    if (why_.empty()) why_ = error != nullptr ? error : std::string(name) + " is not loaded";
  }
}

void* SharedLibrary::symbol(const char* name) {
  if (handle_ == nullptr) return nullptr;
  void* found = dlsym(handle_, name);
  if (found == nullptr && why_.empty()) why_ = std::string("it has no ") + name;
  return found;
}

}  // namespace ugds
