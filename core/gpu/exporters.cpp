// SPDX-License-Identifier: Apache-2.0
#include "gpu/exporters.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <utility>

#include "base/error.hpp"
#include "gpu/hip.hpp"

namespace ugds::gpu {

namespace {

constexpr const char* kOperation = "export as a DMA-BUF";
constexpr std::uint64_t kGranule = 64 << 10;  // pages in which GPUs are mapped for others

struct Provider {
  std::string name;
  Backend backend;
  Exporter exporter;
};

ExportedRange by_cuda_pcie(Runtime& runtime, const Allocation& allocation, Address address, std::uint64_t size) {
  return {runtime.export_dmabuf(allocation.place, address, size, true), 0};
}

ExportedRange by_runtime(Runtime& runtime, const Allocation& allocation, Address address, std::uint64_t size) {
  return {runtime.export_dmabuf(allocation.place, address, size, false), 0};
}

ExportedRange by_peermem(Runtime&, const Allocation&, Address, std::uint64_t) {
  fail(EOPNOTSUPP, kOperation, "nvidia-peermem's pages are reached in the kernel alone, by the helper ugds_drv",
       "bind the controller to a ugds_drv that was built with the NVIDIA driver's headers");
}

ExportedRange by_hsa(Runtime& runtime, const Allocation& allocation, Address address, std::uint64_t size) {
  auto* hip = dynamic_cast<HipRuntime*>(&runtime);
  if (hip == nullptr) return by_runtime(runtime, allocation, address, size);
  HipRuntime::Export exported = hip->export_range(allocation.place, address, size, false);
  return {std::move(exported.descriptor), exported.offset};
}

struct Providers {
  std::mutex lock;
  std::vector<Provider> all;
};

Providers& providers() {
  // Never destroyed: threads may export until the process ends.
  static Providers* there = new Providers{{},
                                          {{"cuda-pcie", Backend::cuda, by_cuda_pcie},
                                           {"cuda", Backend::cuda, by_runtime},
                                           {"nvidia-peermem", Backend::cuda, by_peermem},
                                           {"hsa", Backend::hip, by_hsa}}};
  return *there;
}

std::vector<Provider> providers_of(Backend backend) {
  std::lock_guard guard(providers().lock);
  std::vector<Provider> some;
  for (const Provider& provider : providers().all) {
    if (provider.backend == backend) some.push_back(provider);
  }
  return some;
}

/// Bytes of what the descriptor stands for. A DMA-BUF's length is where its end can be sought; older kernels say it in
/// no other way.
std::uint64_t size_of(int descriptor) {
  const off_t end = lseek(descriptor, 0, SEEK_END);
  if (end >= 0) {
    static_cast<void>(lseek(descriptor, 0, SEEK_SET));
    return static_cast<std::uint64_t>(end);
  }
  struct stat status {};
  if (fstat(descriptor, &status) != 0) fail(errno, kOperation, "the descriptor that came back is not open");
  return static_cast<std::uint64_t>(status.st_size);
}

void check_size(const ExportedRange& exported, std::uint64_t size) {
  const std::uint64_t there = size_of(exported.descriptor.get());
  if (exported.offset > there || size > there - exported.offset) {
    fail(EPROTO, kOperation,
         "the DMA-BUF has " + std::to_string(there) + " bytes, but the memory would be " + std::to_string(size) +
             " from " + std::to_string(exported.offset) + " on");
  }
}

/// What `provider` gives, and it is as large as it must be; or why not.
std::optional<ExportedRange> ask(const Provider& provider, Runtime& runtime, const Allocation& allocation,
                                 Address address, std::uint64_t size, std::vector<Refusal>& refusals) {
  try {
    ExportedRange exported = provider.exporter(runtime, allocation, address, size);
    if (!exported.descriptor) fail(EPROTO, kOperation, "it gave no descriptor");
    check_size(exported, size);
    return exported;
  } catch (const Failure& failure) {
    const Error& error = failure.error();
    std::string words = error.cause;
    if (error.hint[0] != '\0') words += std::string("; ") + error.hint;
    refusals.push_back({provider.name, error.code, std::move(words)});
  }
  return std::nullopt;
}

}  // namespace

void register_exporter(const std::string& name, Backend backend, Exporter exporter) {
  std::lock_guard guard(providers().lock);
  std::vector<Provider>& all = providers().all;
  std::erase_if(all, [&](const Provider& there) { return there.name == name && there.backend == backend; });
  if (exporter) all.insert(all.begin(), Provider{name, backend, std::move(exporter)});
}

std::optional<Exported> export_memory(Runtime& runtime, const Allocation& allocation, Address address,
                                      std::uint64_t size, std::vector<Refusal>& refusals) {
  const std::uint64_t before = address - allocation.base;
  if (size == 0 || address < allocation.base || before > allocation.size || size > allocation.size - before) {
    fail(EINVAL, kOperation, "the range does not lie in one allocation of the GPU's");
  }
  const Address begin = std::max(allocation.base, address / kGranule * kGranule);
  // Counted from the end of the allocation, which may be the end of the address space.
  const Address last = address + size - 1;
  const Address end = last / kGranule * kGranule + (kGranule - 1);
  const Address last_of_all = allocation.base + allocation.size - 1;
  const std::uint64_t whole = std::min(end, last_of_all) - begin + 1;
  for (const Provider& provider : providers_of(runtime.backend())) {
    std::optional<ExportedRange> exported = ask(provider, runtime, allocation, begin, whole, refusals);
    if (!exported) continue;
    return Exported{std::move(exported->descriptor), exported->offset + (address - begin), size, provider.name};
  }
  return std::nullopt;
}

}  // namespace ugds::gpu
