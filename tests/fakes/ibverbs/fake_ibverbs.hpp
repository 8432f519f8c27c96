// SPDX-License-Identifier: Apache-2.0
//
// What a test asks of the fake libibverbs: libfake_ibverbs.so gives it by `fake_ibverbs()`.
#pragma once

#include <cstddef>
#include <cstdint>

struct FakeVerbs {
  // What the next calls give: an errno, or 0.
  int register_error = 0;
  int deregister_error = 0;
  bool fails_without_errno = false;
  // What the last registration was asked for.
  void* pd = nullptr;
  std::uint64_t offset = 0;
  std::size_t length = 0;
  std::uint64_t iova = 0;
  int descriptor = -1;
  int access = 0;
  int live = 0;
};

extern "C" FakeVerbs* fake_ibverbs();
