// SPDX-License-Identifier: Apache-2.0
//
// Registering a DMA-BUF of GPU memory with an RDMA device, by the libibverbs that is found when the program runs
// (UGDS_IBVERBS_LIBRARY, else libibverbs.so.1).
#pragma once

#include <cstdint>

namespace ugds::gpu {

/// A memory region: what requests to the RDMA device name.
struct RdmaRegion {
  void* mr = nullptr;  ///< struct ibv_mr *, libibverbs's
  std::uint32_t lkey = 0;
  std::uint32_t rkey = 0;
};

/// What the RDMA device may do with the memory: IBV_ACCESS_LOCAL_WRITE and so on.
using RdmaAccess = int;

/// Registers [offset, offset + length) in bytes of the DMA-BUF with the caller's protection domain, a struct ibv_pd *.
/// Requests address it from `iova` on, which lies in its page where `offset` does in its own. The descriptor may be
/// closed afterwards. Thread-safe. Throws Failure: EOPNOTSUPP where libibverbs, its ibv_reg_dmabuf_mr, or a driver that
/// takes DMA-BUFs is missing, EINVAL for what cannot be, or libibverbs's errno.
RdmaRegion register_rdma(void* pd, int descriptor, std::uint64_t offset, std::uint64_t length, std::uint64_t iova,
                         RdmaAccess access);

/// Undoes it, and empties `region`. No request that names it may be under way. Thread-safe for different regions.
/// Throws Failure with libibverbs's errno, EBUSY where memory windows are bound to it, and then it is still registered.
void deregister_rdma(RdmaRegion& region);

}  // namespace ugds::gpu
