// SPDX-License-Identifier: Apache-2.0
//
// What tests of the engine share: an open handle on an emulated controller that is checked for violations at the end,
// and registered memory.
#pragma once

#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "device/emulated.hpp"
#include "engine/handle.hpp"
#include "engine/operation.hpp"
#include "engine/unaligned.hpp"
#include "memory/registry.hpp"
#include "nvme/status.hpp"

namespace engine_test {

using namespace ugds;
using engine::Handle;
using engine::Policy;
using engine::State;
using engine::Transfer;
using nvme::Opcode;

inline emulator::Controller& controller_of(Handle& handle) {
  return dynamic_cast<device::EmulatedDevice&>(handle.device()).controller();
}

struct Open {
  Handle handle;
  bool expect_violations = false;

  explicit Open(const std::string& uri, const Policy& policy = {}) : handle(uri, policy) {}
  ~Open() {
    if (expect_violations) return;
    for (const auto& v : controller_of(handle).violations()) FAIL_CHECK(v.rule << ": " << v.what);
  }
  emulator::Controller& controller() { return controller_of(handle); }
};

class Buffer {
 public:
  explicit Buffer(std::size_t size, std::size_t shift = 0) : bytes_(size + shift + 4096), size_(size) {
    auto address = align_up(reinterpret_cast<std::uintptr_t>(bytes_.data()), 4096) + shift;
    if (address + size > reinterpret_cast<std::uintptr_t>(bytes_.data()) + bytes_.size()) {
      bytes_.resize(size + shift + 8192);
      address = align_up(reinterpret_cast<std::uintptr_t>(bytes_.data()), 4096) + shift;
    }
    begin_ = reinterpret_cast<std::byte*>(address);
    reference_ = memory::Registry::instance().add(begin_, size, memory::Kind::host, false);
  }
  ~Buffer() {
    if (reference_) CHECK(memory::Registry::instance().close(reference_) == 0);
  }
  /// Leaves the registration to the test; the memory stays for ever.
  memory::Reference release() {
    // Never destroyed: the controller may still write to it.
    static auto* const all = new std::vector<std::vector<std::byte>>;  // NOLINT
    all->push_back(std::move(bytes_));
    return std::exchange(reference_, {});
  }
  /// Registers the same memory anew; its registration was closed.
  void register_again() { reference_ = memory::Registry::instance().add(begin_, size_, memory::Kind::host, false); }
  std::byte* data() { return begin_; }
  std::size_t size() const { return size_; }
  const memory::Reference& reference() const { return reference_; }
  void fill(unsigned seed) {
    std::mt19937 random(seed);
    for (std::size_t i = 0; i < size_; ++i) begin_[i] = static_cast<std::byte>(random());
  }

 private:
  std::vector<std::byte> bytes_;
  std::byte* begin_;
  std::size_t size_;
  memory::Reference reference_;
};

inline std::int64_t read(Handle& h, const Buffer& b, std::uint64_t offset, std::uint64_t size, std::uint64_t at = 0) {
  return engine::run(h, {Opcode::read, b.reference(), offset, size, at});
}
inline std::int64_t write(Handle& h, const Buffer& b, std::uint64_t offset, std::uint64_t size, std::uint64_t at = 0) {
  return engine::run(h, {Opcode::write, b.reference(), offset, size, at});
}

inline Policy short_deadline(std::uint64_t ms = 50) { return Policy{.deadline_ns = ms * 1'000'000}; }

}  // namespace engine_test
