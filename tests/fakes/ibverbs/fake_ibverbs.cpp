// SPDX-License-Identifier: Apache-2.0
#include "fake_ibverbs.hpp"

#include <cerrno>

#define FAKE_API extern "C" __attribute__((visibility("default")))

namespace {

struct Region {
  void* context;
  void* pd;
  void* address;
  std::size_t length;
  std::uint32_t handle;
  std::uint32_t lkey;
  std::uint32_t rkey;
};

FakeVerbs fake;

}  // namespace

FAKE_API FakeVerbs* fake_ibverbs() { return &fake; }

#ifndef FAKE_IBVERBS_OLD
FAKE_API Region* ibv_reg_dmabuf_mr(void* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova,
                                   int descriptor, int access) {
  if (fake.register_error != 0 || fake.fails_without_errno) {
    errno = fake.register_error;
    return nullptr;
  }
  fake.pd = pd;
  fake.offset = offset;
  fake.length = length;
  fake.iova = iova;
  fake.descriptor = descriptor;
  fake.access = access;
  const auto number = static_cast<std::uint32_t>(++fake.live);
  return new Region{nullptr, pd, nullptr, length, number, 0x1000 + number, 0x2000 + number};
}
#endif

FAKE_API int ibv_dereg_mr(Region* region) {
  if (fake.deregister_error != 0) return fake.deregister_error;
  delete region;
  --fake.live;
  return 0;
}
