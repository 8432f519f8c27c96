// SPDX-License-Identifier: Apache-2.0
//
// Registering DMA-BUFs with an RDMA device, by a stand-in of libibverbs.
#include <dlfcn.h>
#include <doctest/doctest.h>

#include <cerrno>
#include <cstdlib>
#include <string>

#include "base/error.hpp"
#include "gpu/rdma.hpp"
#include "ibverbs/fake_ibverbs.hpp"

using namespace ugds;
using namespace ugds::gpu;

namespace {

FakeVerbs& fake() {
  setenv("UGDS_IBVERBS_LIBRARY", UGDS_FAKE_IBVERBS, 1);
  auto* get = reinterpret_cast<FakeVerbs* (*)()>(dlsym(dlopen(UGDS_FAKE_IBVERBS, RTLD_NOW), "fake_ibverbs"));
  REQUIRE(static_cast<bool>(get));
  *get() = FakeVerbs{};
  return *get();
}

template <class Function>
Error error_of(Function function) {
  try {
    function();
  } catch (const Failure& failure) {
    return failure.error();
  }
  return {};
}

bool holds(const Error& error, const char* part) { return error.message().find(part) != std::string::npos; }

int pd = 0;  // libibverbs alone looks into it

}  // namespace

// One test, since the library is kept once it is found.
TEST_CASE("rdma: what is missing is said, and found once it is there") {
  const auto attempt = [] { register_rdma(&pd, 3, 0, 4096, 0, 1); };
  setenv("UGDS_IBVERBS_LIBRARY", "/nowhere/libibverbs.so.1", 1);
  Error error = error_of(attempt);
  CHECK(error.code == EOPNOTSUPP);
  CHECK(holds(error, "/nowhere/libibverbs.so.1"));
  CHECK(holds(error, "rdma-core"));
  setenv("UGDS_IBVERBS_LIBRARY", UGDS_FAKE_IBVERBS_OLD, 1);
  error = error_of(attempt);
  CHECK(error.code == EOPNOTSUPP);
  CHECK(holds(error, "ibv_reg_dmabuf_mr"));
  FakeVerbs& there = fake();

  RdmaRegion region = register_rdma(&pd, 5, 8192 + 512, 65536, 0x7f0000003200, 7);
  CHECK(there.pd == &pd);
  CHECK(there.descriptor == 5);
  CHECK(there.offset == 8192 + 512);
  CHECK(there.length == 65536);
  CHECK(there.iova == 0x7f0000003200);
  CHECK(there.access == 7);
  CHECK(region.mr != nullptr);
  CHECK(region.lkey == 0x1001);
  CHECK(region.rkey == 0x2001);
  deregister_rdma(region);
  CHECK(there.live == 0);
  CHECK(region.mr == nullptr);
  CHECK(region.rkey == 0);
  error = error_of([&] { deregister_rdma(region); });
  CHECK(error.code == EINVAL);
}

TEST_CASE("rdma: libibverbs's errors are handed on, and a region that stays is still registered") {
  FakeVerbs& there = fake();
  there.register_error = EOPNOTSUPP;
  Error error = error_of([] { register_rdma(&pd, 3, 0, 4096, 0, 1); });
  CHECK(error.code == EOPNOTSUPP);
  CHECK(holds(error, "must take DMA-BUFs"));
  there.register_error = ENOMEM;
  CHECK(error_of([] { register_rdma(&pd, 3, 0, 4096, 0, 1); }).code == ENOMEM);
  there.register_error = 0;
  there.fails_without_errno = true;
  CHECK(error_of([] { register_rdma(&pd, 3, 0, 4096, 0, 1); }).code == EIO);
  there.fails_without_errno = false;

  RdmaRegion region = register_rdma(&pd, 3, 0, 4096, 0, 1);
  there.deregister_error = EBUSY;
  error = error_of([&] { deregister_rdma(region); });
  CHECK(error.code == EBUSY);
  CHECK(holds(error, "memory windows"));
  CHECK(region.mr != nullptr);
  there.deregister_error = -1;
  errno = EIO;
  CHECK(error_of([&] { deregister_rdma(region); }).code == EIO);
  there.deregister_error = 0;
  deregister_rdma(region);
  CHECK(there.live == 0);
}

TEST_CASE("rdma: what cannot be registered never reaches libibverbs") {
  FakeVerbs& there = fake();
  CHECK(error_of([] { register_rdma(nullptr, 3, 0, 4096, 0, 1); }).code == EINVAL);
  CHECK(error_of([] { register_rdma(&pd, -1, 0, 4096, 0, 1); }).code == EINVAL);
  CHECK(error_of([] { register_rdma(&pd, 3, 0, 0, 0, 1); }).code == EINVAL);
  CHECK(error_of([] { register_rdma(&pd, 3, ~std::uint64_t{0} - 10, 4096, ~std::uint64_t{0} - 10, 1); }).code ==
        EINVAL);
  const Error error = error_of([] { register_rdma(&pd, 3, 512, 4096, 1024, 1); });
  CHECK(error.code == EINVAL);
  CHECK(holds(error, "same place in a page"));
  CHECK(there.live == 0);
  CHECK(there.length == 0);
}
