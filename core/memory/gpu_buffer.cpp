// SPDX-License-Identifier: Apache-2.0
#include "memory/gpu_buffer.hpp"

#include <algorithm>
#include <cerrno>

#include "base/error.hpp"
#include "base/units.hpp"
#include "nvme/prp.hpp"

namespace ugds::memory {

int GpuBuffer::copy_in(std::uint64_t to, const void* from, std::uint64_t bytes) noexcept {
  if (!is_alive()) return ESTALE;
  return runtime_.copy_to_device(place(), to, from, bytes) == 0 ? 0 : EIO;
}

int GpuBuffer::copy_out(void* to, std::uint64_t from, std::uint64_t bytes) noexcept {
  if (!is_alive()) return ESTALE;
  return runtime_.copy_from_device(place(), to, from, bytes) == 0 ? 0 : EIO;
}

gpu::Exported GpuBuffer::export_range(std::uint64_t address, std::uint64_t size) const {
  std::vector<gpu::Refusal> refusals;
  std::optional<gpu::Exported> exported = gpu::export_memory(runtime_, allocation_, address, size, refusals);
  if (exported) return std::move(*exported);
  std::string cause = "no exporter gives a DMA-BUF of the GPU memory";
  for (const gpu::Refusal& refusal : refusals) {
    cause += "; " + refusal.provider + ": " + refusal.words;
    if (refusal.code != 0) cause += " (" + std::to_string(refusal.code) + ")";
  }
  fail(EOPNOTSUPP, "export", cause, "see `ugds info` for the GPU's driver; requests are staged without");
}

device::Mapping GpuBuffer::map(device::Device& device, std::uint64_t address, Bytes length, device::Access access,
                               std::uint64_t* pages, std::string& why) {
  try {
    return device.map_foreign({address, length, this}, access, pages);
  } catch (const Failure& failure) {
    if (failure.error().code != EOPNOTSUPP) throw;
  }
  try {
    const gpu::Exported exported = export_range(address, length.value);
    return device.map_descriptor({exported.descriptor.get(), exported.offset, length}, access, pages);
  } catch (const Failure& failure) {
    why = failure.error().cause;
    if (!device.limits().pins_nvidia || runtime_.backend() != gpu::Backend::cuda) throw;
  }
  try {
    return map_nvidia(device, address, length, access, pages);
  } catch (const Failure& failure) {
    why += std::string("; ") + failure.error().cause;
    Error error = failure.error();
    set_cause(error, "%s", why.c_str());
    throw Failure(error);
  }
}

device::Mapping GpuBuffer::map_nvidia(device::Device& device, std::uint64_t address, Bytes length,
                                      device::Access access, std::uint64_t* pages) const {
  constexpr std::uint64_t kGpuPage = 64_KiB;
  const std::uint64_t begin = align_down(address, kGpuPage), end = align_up(address + length.value, kGpuPage);
  std::vector<std::uint64_t> all((end - begin) / nvme::kPageSize);
  const device::Mapping mapping = device.map_nvidia(begin, Bytes(end - begin), access, all.data());
  std::copy_n(all.data() + (address - begin) / nvme::kPageSize, length.value / nvme::kPageSize, pages);
  return mapping;
}

}  // namespace ugds::memory
