// SPDX-License-Identifier: Apache-2.0
//
// The fake HIP runtime for a test, as it is found by the environment.
#pragma once

#include <dlfcn.h>
#include <doctest/doctest.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>

#include "base/error.hpp"
#include "gpu/hip.hpp"
#include "hip/fake_hip.hpp"

namespace gpu_test {

/// A variable of the environment while it lives.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    if (value != nullptr) {
      setenv(name, value, 1);
    } else {
      unsetenv(name);
    }
  }
  ~Variable() {
    if (before_) {
      setenv(name_, before_->c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

/// Lets HIP be found in the fake, and gives the test's side of it.
inline FakeHip& fake_hip_library(const char* path = UGDS_FAKE_HIP) {
  setenv("UGDS_HIP_LIBRARY", path, 1);
  setenv("UGDS_HSA_LIBRARY", path, 1);
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  REQUIRE(handle != nullptr);
  auto* get = reinterpret_cast<FakeHip* (*)()>(dlsym(handle, "fake_hip"));
  REQUIRE(static_cast<bool>(get));
  get()->reset();
  return *get();
}

inline std::unique_ptr<ugds::gpu::HipRuntime> open_hip() {
  std::string why;
  auto runtime = ugds::gpu::HipRuntime::open(why);
  REQUIRE_MESSAGE(runtime != nullptr, why);
  return runtime;
}

/// The error that `function` throws; code 0 where it throws none.
template <class Function>
ugds::Error error_of(Function function) {
  try {
    function();
  } catch (const ugds::Failure& failure) {
    return failure.error();
  }
  return {};
}

inline bool holds(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace gpu_test
