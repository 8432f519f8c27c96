// SPDX-License-Identifier: Apache-2.0
//
// The driver's functions for modules and kernels.
#include <cstdlib>
#include <cstring>
#include <string>

#include "calls.hpp"
#include "capture.hpp"
#include "context.hpp"
#include "kernels.hpp"

using namespace fake_cuda;

namespace {

bool loads_eagerly() {
  const char* mode = std::getenv("CUDA_MODULE_LOADING");
  return mode != nullptr && std::strcmp(mode, "EAGER") == 0;
}

/// The arguments, of which each is 64 bits wide, from either form in which they are handed over.
CUresult read_arguments(const Kernel& kernel, void** parameters, void** extra, Arguments& arguments) {
  if (parameters != nullptr) {
    for (std::size_t i = 0; i < kernel.arguments; i++) {
      if (parameters[i] == nullptr) return CUDA_ERROR_INVALID_VALUE;
      std::memcpy(&arguments[i], parameters[i], sizeof arguments[i]);
    }
    return CUDA_SUCCESS;
  }
  const void* buffer = nullptr;
  std::size_t size = 0;
  for (; extra != nullptr && *extra != nullptr; extra += 2) {
    const auto key = reinterpret_cast<std::uint64_t>(*extra);  // 1: where they are, 2: where their size is
    if (key == 1) buffer = extra[1];
    if (key == 2) std::memcpy(&size, extra[1], sizeof size);
  }
  if (buffer == nullptr || size < kernel.arguments * sizeof arguments[0]) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(arguments.data(), buffer, kernel.arguments * sizeof arguments[0]);
  return CUDA_SUCCESS;
}

}  // namespace

FAKE_EXPORT CUresult cuModuleLoadData(CUmodule* handle, const void* image) {
  return in_context<"cuModuleLoadData">([&](Context& current) -> CUresult {
    if (handle == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult code = unsafe_call(); code != CUDA_SUCCESS) return code;
    const std::string ptx(static_cast<const char*>(image));
    if (ptx.find(".version") == std::string::npos) return misuse(CUDA_ERROR_INVALID_IMAGE, "a module is no PTX text");
    gate(current.gpu).quiet();
    auto module_made = std::make_shared<Module>(Module{current, {}});
    for (const std::string& name : entries_of(ptx)) {
      if (const Kernel* kernel = find_kernel(name)) module_made->kernels.push_back(kernel);
    }
    *handle = table<Module>().add<CUmodule>(module_made);
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuModuleGetFunction(CUfunction* handle, CUmodule module_handle, const char* name) {
  return in_context<"cuModuleGetFunction">([&](Context& current) -> CUresult {
    if (handle == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto from = table<Module>().find(module_handle);
    if (from == nullptr) return misuse(CUDA_ERROR_INVALID_HANDLE, "a module was used that does not exist");
    for (const Kernel* kernel : from->kernels) {
      if (std::strcmp(kernel->name, name) != 0) continue;
      if (loads_eagerly()) gate(current.gpu).quiet();
      auto function = std::make_shared<Function>(from->context, kernel, from);
      function->is_loaded = loads_eagerly();
      *handle = table<Function>().add<CUfunction>(function);
      return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
  });
}

FAKE_EXPORT CUresult cuModuleUnload(CUmodule handle) {
  return in_context<"cuModuleUnload">([&](Context&) -> CUresult {
    const auto gone = table<Module>().take(handle);
    if (gone == nullptr) return misuse(CUDA_ERROR_INVALID_HANDLE, "a module was unloaded that does not exist");
    // Its code may be running.
    for (const Point& point : gone->context.tails()) point.wait();
    table<Function>().remove_if([&](const Function& function) { return function.module == gone; });
    return CUDA_SUCCESS;
  });
}

FAKE_EXPORT CUresult cuLaunchKernel(CUfunction handle, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                    unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int,
                                    CUstream stream_handle, void** parameters, void** extra) {
  return on_stream<"cuLaunchKernel">(stream_handle, [&](Context& current, Stream& stream) -> CUresult {
    const auto function = table<Function>().find(handle);
    if (function == nullptr) return misuse(CUDA_ERROR_INVALID_HANDLE, "a kernel was launched that does not exist");
    if (&function->context != &current || &stream.context != &current) {
      return misuse(CUDA_ERROR_INVALID_HANDLE, "a kernel and its stream are not both of the current context");
    }
    const bool is_empty = grid_x == 0 || grid_y == 0 || grid_z == 0 || block_x == 0 || block_y == 0 || block_z == 0;
    if (is_empty || std::uint64_t{block_x} * block_y * block_z > 1024) return CUDA_ERROR_INVALID_VALUE;
    Arguments arguments{};
    const CUresult code = read_arguments(*function->kernel, parameters, extra, arguments);
    if (code != CUDA_SUCCESS) return misuse(code, "a kernel's arguments are missing");
    if (!function->is_loaded) gate(current.gpu).quiet();
    function->is_loaded = true;
    Task task;
    if (function->kernel->holds) task.kind = Task::Kind::hold;
    task.run = [&current, kernel = function->kernel, arguments, grid_x, grid_y] {
      for (unsigned row = 0; row < grid_y; ++row) {
        if (const CUresult wrong = kernel->run(arguments, row, grid_x); wrong != CUDA_SUCCESS) current.fail(wrong);
      }
    };
    return current.submit(stream, std::move(task));
  });
}
