// SPDX-License-Identifier: Apache-2.0
//
// Modules and the kernels that the fake can run, each by its name.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "context.hpp"

namespace fake_cuda {

constexpr std::size_t most_arguments = 12;
using Arguments = std::array<std::uint64_t, most_arguments>;

struct Kernel {
  const char* name;
  std::size_t arguments;
  CUresult (*run)(const Arguments& arguments, unsigned row, unsigned blocks);  ///< once for each row of the grid
  bool holds = false;                                                          ///< it waits for the processor
};

/// The kernel of that name; nullptr where the fake has none.
const Kernel* find_kernel(const std::string& name);

struct Module {
  Context& context;
  std::vector<const Kernel*> kernels;  ///< those whose names the PTX has as entries
};

struct Function {
  Context& context;
  const Kernel* kernel;
  std::shared_ptr<Module> module;
  std::atomic<bool> is_loaded{false};  ///< the driver loads a kernel when it is launched first
};

/// The names that stand behind `.entry` in a PTX text.
std::vector<std::string> entries_of(const std::string& ptx);

}  // namespace fake_cuda
