// SPDX-License-Identifier: Apache-2.0
#include "gpu/rdma.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <string>

#include "base/error.hpp"
#include "base/library.hpp"

namespace ugds::gpu {

namespace {

constexpr const char* kRegister = "register for RDMA";
constexpr const char* kDeregister = "deregister from RDMA";

/// struct ibv_mr, whose layout is part of libibverbs's binary interface.
struct IbvMr {
  void* context;
  void* pd;
  void* address;
  std::size_t length;
  std::uint32_t handle;
  std::uint32_t lkey;
  std::uint32_t rkey;
};
static_assert(offsetof(IbvMr, lkey) == 36 && offsetof(IbvMr, rkey) == 40);

struct Verbs {
  IbvMr* (*reg_dmabuf_mr)(void* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova, int descriptor,
                          int access);
  int (*dereg_mr)(IbvMr*);
};

/// libibverbs, which is looked for again as long as it was not found: it may be installed meanwhile.
Verbs verbs(const char* operation) {
  static std::mutex lock;
  static Verbs found{};
  std::lock_guard guard(lock);
  if (found.dereg_mr != nullptr) return found;
  SharedLibrary library("UGDS_IBVERBS_LIBRARY", {"libibverbs.so.1"});
  Verbs candidate{};
  if (!library || !library.find(candidate.reg_dmabuf_mr, "ibv_reg_dmabuf_mr") ||
      !library.find(candidate.dereg_mr, "ibv_dereg_mr")) {
    fail(EOPNOTSUPP, operation, "libibverbs cannot be used: " + library.why(),
         "install rdma-core 34 or later, or name the library in UGDS_IBVERBS_LIBRARY");
  }
  found = candidate;
  return found;
}

}  // namespace

RdmaRegion register_rdma(void* pd, int descriptor, std::uint64_t offset, std::uint64_t length, std::uint64_t iova,
                         RdmaAccess access) {
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  if (pd == nullptr || descriptor < 0 || length == 0 || offset + length < offset) {
    fail(EINVAL, kRegister, "it needs a protection domain, a DMA-BUF and a range of it");
  }
  if (offset % page != iova % page) {
    fail(EINVAL, kRegister, "the address and the offset in the DMA-BUF do not lie at the same place in a page",
         "use the memory's own address");
  }
  const Verbs functions = verbs(kRegister);
  errno = 0;
  IbvMr* mr = functions.reg_dmabuf_mr(pd, offset, length, iova, descriptor, access);
  if (mr == nullptr) {
    const int code = errno != 0 ? errno : EIO;
    fail(code, kRegister, std::string("ibv_reg_dmabuf_mr failed: ") + std::strerror(code),
         code == EOPNOTSUPP ? "the RDMA device's driver must take DMA-BUFs" : "");
  }
  return RdmaRegion{mr, mr->lkey, mr->rkey};
}

void deregister_rdma(RdmaRegion& region) {
  if (region.mr == nullptr) fail(EINVAL, kDeregister, "the region is not registered");
  if (const int code = verbs(kDeregister).dereg_mr(static_cast<IbvMr*>(region.mr)); code != 0) {
    // The manual gives an errno; some providers give -1 and set it.
    const int error = code > 0 ? code : errno != 0 ? errno : EIO;
    fail(error, kDeregister, std::string("ibv_dereg_mr failed: ") + std::strerror(error),
         error == EBUSY ? "unbind its memory windows first" : "");
  }
  region = RdmaRegion{};
}

}  // namespace ugds::gpu
