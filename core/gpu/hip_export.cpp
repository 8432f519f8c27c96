// SPDX-License-Identifier: Apache-2.0
//
// DMA-BUFs of AMD's GPU memory. HSA's function gives the whole that the memory lies in and the offset; HIP's own gives
// no offset, so it is believed only where there can be none.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.hpp"
#include "gpu/hip.hpp"
#include "gpu/hip_scope.hpp"

namespace ugds::gpu {

namespace {
constexpr std::uint64_t kPage = 4096;

void* pointer(Address address) { return reinterpret_cast<void*>(address); }
std::uint64_t whole_pages(std::uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
}  // namespace

void HipRuntime::refuse_export(const std::string& cause) const {
  fail(EOPNOTSUPP, "export as a DMA-BUF", cause,
       "direct access needs a kernel with PCI_P2PDMA, HSA_AMD_P2P and DMABUF_MOVE_NOTIFY; staged does not");
}

/// Whose the memory is, as HSA has it; 0 where it does not say.
std::uint64_t HipRuntime::owner_of(Address address) const noexcept {
  if (api_.hsa_pointer_info == nullptr) return 0;
  hip_api::PointerInfo info{};
  info.size = sizeof info;
  if (api_.hsa_pointer_info(pointer(address), &info, nullptr, nullptr, nullptr) != 0 || info.type == 0) return 0;
  return info.owner;
}

/// Why the memory is no longer where it was before the export, or nothing.
std::string HipRuntime::why_not_on(const Place& place, Address address, std::uint64_t owner) const {
  hip_api::PointerAttributes now{};
  if (const int code = api_.pointer_attributes(&now, pointer(address)); code != hip_api::kSuccess) {
    return "the memory is not known any more: " + words(code);
  }
  if (now.is_managed != 0 || now.type != hip_api::kTypeDevice) {
    return "the export moved the memory to the host";
  }
  if (now.device != place.device) return "the memory is that of GPU " + std::to_string(now.device);
  if (owner != 0 && owner_of(address) != owner) return "the export moved the memory to another agent";
  return "";
}

/// The code is HSA's or HIP's, and `text` says which, and what it means.
int HipRuntime::call_export(Address address, std::uint64_t size, bool pcie, int& number, std::uint64_t& offset,
                            std::string& text) const {
  const bool has_it = pcie ? api_.hsa_export_v2 != nullptr : api_.hsa_export != nullptr;
  if (!has_it) {
    if (api_.range_handle != nullptr) return call_range_export(address, size, pcie, number, text);
    text = pcie ? "neither HSA nor HIP can export with the PCIe mapping here"
                : "neither HSA nor HIP has a function for it here; install ROCm 6 or later";
    return -1;
  }
  const int code = pcie ? api_.hsa_export_v2(pointer(address), size, &number, &offset, hip_api::kHsaPcie)
                        : api_.hsa_export(pointer(address), size, &number, &offset);
  if (code == 0) return 0;
  const char* meaning = nullptr;
  if (api_.hsa_status_string != nullptr) static_cast<void>(api_.hsa_status_string(code, &meaning));
  text = std::string("hsa_amd_portable_export_dmabuf failed: ") + std::to_string(code) +
         (meaning != nullptr ? std::string(": ") + meaning : "");
  return code;
}

int HipRuntime::call_range_export(Address address, std::uint64_t size, bool pcie, int& number,
                                  std::string& text) const {
  void* base = nullptr;
  std::size_t whole = 0;
  if (const int code = api_.address_range(&base, &whole, pointer(address)); code != hip_api::kSuccess) {
    text = "hipMemGetAddressRange failed: " + words(code);
    return code;
  }
  if (base != pointer(address) || whole > size) {
    text = "hipMemGetHandleForAddressRange exports whole allocations alone, and HSA's function is missing";
    return -1;
  }
  if (const int code =
          api_.range_handle(&number, pointer(address), size, hip_api::kRangeDmaBuf, pcie ? hip_api::kRangePcie : 0);
      code != hip_api::kSuccess) {
    text = "hipMemGetHandleForAddressRange failed: " + words(code);
    return code;
  }
  const off_t bytes = lseek(number, 0, SEEK_END);
  if (bytes >= 0 && whole_pages(static_cast<std::uint64_t>(bytes)) == whole_pages(size)) return 0;
  close(number);
  text = "hipMemGetHandleForAddressRange exported more than the allocation, without saying where in it that is";
  return -1;
}

HipRuntime::Export HipRuntime::export_range(const Place& place, Address address, std::uint64_t size, bool pcie) {
  Scope scope(api_, place.device);
  if (scope.code() != hip_api::kSuccess) refuse_export("hipSetDevice failed: " + words(scope.code()));
  const std::uint64_t owner = owner_of(address);
  int number = -1;
  Export exported;
  std::string text;
  if (call_export(address, size, pcie, number, exported.offset, text) != 0) refuse_export(text);
  if (number < 0) refuse_export("the runtime reported success but gave no descriptor");
  exported.descriptor = Descriptor(number);
  // Releases differ in whether they set it.
  if (fcntl(number, F_SETFD, FD_CLOEXEC) != 0) refuse_export("the runtime gave a descriptor that is not open");
  // A driver that lacks peer access moves what is exported into host memory rather than refuse.
  if (const std::string moved = why_not_on(place, address, owner); !moved.empty()) refuse_export(moved);
  return exported;
}

Descriptor HipRuntime::export_dmabuf(const Place& place, Address address, std::uint64_t size, bool pcie) {
  Export exported = export_range(place, address, size, pcie);
  if (exported.offset != 0) {
    refuse_export("the memory begins " + std::to_string(exported.offset) + " bytes into the DMA-BUF");
  }
  return std::move(exported.descriptor);
}

}  // namespace ugds::gpu
