// SPDX-License-Identifier: Apache-2.0
//
// A library that is found when the program runs, such as a GPU's driver: so one build serves machines with and without.
#pragma once

#include <initializer_list>
#include <string>

namespace ugds {

class SharedLibrary {
 public:
  SharedLibrary() = default;
  /// Opens the first of `names` that there is; the environment variable `override`, where it is set, names the only
  /// one. Never closed again: drivers keep threads and exit handlers of their own.
  SharedLibrary(const char* override, std::initializer_list<const char*> names);
  /// The same, but only what this process has loaded already, or `override` names.
  static SharedLibrary loaded(const char* override, std::initializer_list<const char*> names);

  explicit operator bool() const { return handle_ != nullptr; }
  /// Why it is not open, or which symbol was missing first.
  const std::string& why() const { return why_; }

  /// Sets `function` to the symbol; to nullptr where it is missing, which `why` then tells. Returns whether it is
  /// there.
  template <class Function>
  bool find(Function*& function, const char* name) {
    function = reinterpret_cast<Function*>(symbol(name));
    return function != nullptr;
  }

 private:
  void open(const char* override, std::initializer_list<const char*> names, int flags);
  void* symbol(const char* name);

  void* handle_ = nullptr;
  std::string why_;
};

}  // namespace ugds
