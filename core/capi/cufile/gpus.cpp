// SPDX-License-Identifier: Apache-2.0
#include "capi/cufile/gpus.hpp"

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "base/environment.hpp"
#include "base/library.hpp"
#include "capi/cufile/abi.h"
#include "capi/cufile/errors.hpp"
#include "gpu/runtime.hpp"

namespace ugds::cufile {

namespace {

/// The functions of the driver that the rest of the library has no use for.
struct DriverCalls {
  int (*device)(int*, int) = nullptr;
  int (*uuid)(char*, int) = nullptr;
  int (*bus)(char*, int, int) = nullptr;
  DriverCalls() {
    SharedLibrary library = SharedLibrary::loaded("UGDS_CUDA_LIBRARY", {"libcuda.so.1"});
    if (!library) return;
    library.find(device, "cuDeviceGet");
    library.find(uuid, "cuDeviceGetUuid_v2");
    library.find(bus, "cuDeviceGetPCIBusId");
  }
};

const DriverCalls& driver_calls() {
  static const DriverCalls calls;
  return calls;
}

bool find_device(int gpu, int& device) {
  return gpu >= 0 && gpu < gpu_count() && driver_calls().device != nullptr && driver_calls().device(&device, gpu) == 0;
}

/// The second of the device's windows, which has the memory, as the system lists it; 0 where it does not. One of 64
/// bits takes two of the six places, and the second is empty then: Hopper's first is such a one, Ampere's is not.
std::uint64_t window_in_sysfs(std::string bus) {
  constexpr int kPlaces = 6;
  for (char& c : bus) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const char* const named = environment("UGDS_PCI_DEVICES");
  const std::string folder = named != nullptr ? named : "/sys/bus/pci/devices";
  std::ifstream file(folder + "/" + bus + "/resource");
  std::string line;
  for (int i = 0, found = 0; i < kPlaces && std::getline(file, line); ++i) {
    std::uint64_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%" SCNx64 " %" SCNx64, &begin, &end) != 2 || end <= begin) continue;
    if (++found == 2) return end - begin + 1;
  }
  return 0;
}

/// The same from NVML, for a container without the system's tree of devices.
std::uint64_t window_in_nvml(const char* bus) {
  SharedLibrary library("UGDS_NVML_LIBRARY", {"libnvidia-ml.so.1"});
  struct Memory {
    unsigned long long total, free, used;
  } memory{};
  int (*begin)() = nullptr;
  int (*find)(const char*, void**) = nullptr;
  int (*ask)(void*, Memory*) = nullptr;
  int (*end)() = nullptr;
  if (!library || !library.find(begin, "nvmlInit_v2") || !library.find(find, "nvmlDeviceGetHandleByPciBusId_v2") ||
      !library.find(ask, "nvmlDeviceGetBAR1MemoryInfo") || !library.find(end, "nvmlShutdown") || begin() != 0) {
    return 0;
  }
  void* device = nullptr;
  const bool said = find(bus, &device) == 0 && ask(device, &memory) == 0;
  end();
  return said ? memory.total : 0;
}

}  // namespace

int gpu_count() {
  gpu::Runtime* const runtime = gpu::cuda();
  return runtime == nullptr ? 0 : runtime->device_count();
}

void gpu_uuid(int gpu, char (&uuid)[16]) {
  int device = 0;
  std::memset(uuid, 0, sizeof uuid);
  if (find_device(gpu, device) && driver_calls().uuid != nullptr) driver_calls().uuid(uuid, device);
}

std::uint64_t gpu_window(int gpu) {
  int device = 0;
  char bus[32] = "";
  if (!find_device(gpu, device) || driver_calls().bus == nullptr || driver_calls().bus(bus, sizeof bus, device) != 0)
    return 0;
  const std::uint64_t size = window_in_sysfs(bus);
  return size != 0 ? size : window_in_nvml(bus);
}

}  // namespace ugds::cufile

using namespace ugds::cufile;  // NOLINT

extern "C" {

CUfileError_t cuFileGetBARSizeInKB(int gpu, size_t* kb) {
  if (kb == nullptr || gpu < 0) return refuse("BAR size", CU_FILE_INVALID_VALUE, "a null argument, or no GPU's number");
  return guarded("BAR size", [&] {
    if (gpu >= gpu_count()) {
      return refuse("BAR size", CU_FILE_INVALID_VALUE, "there is no such GPU", "count them by cuDeviceGetCount()");
    }
    const std::uint64_t size = gpu_window(gpu);
    if (size == 0) {
      return refuse("BAR size", CU_FILE_INTERNAL_ERROR, "neither the system nor NVML says how large the window is",
                    "mount /sys in the container, or make libnvidia-ml.so.1 available");
    }
    *kb = size / 1024;
    return answer(CU_FILE_SUCCESS);
  });
}

}  // extern "C"
