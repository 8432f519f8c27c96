// SPDX-License-Identifier: Apache-2.0
//
// Registered memory of an execution, and what is known of each of its registrations.
#pragma once

#include <cstring>
#include <vector>

#include "choices.hpp"
#include "controller.hpp"
#include "memory/registry.hpp"

namespace ugds::explore {

constexpr const char* kHeld = "a registration is closed only when no command of its may still be executed";
constexpr const char* kNotRefused = "closing is refused only while a command is in flight";
constexpr const char* kStale = "a stale reference never holds";
constexpr const char* kOnce = "each request is told of exactly once";
constexpr const char* kBytes = "a request that was told of as done has its bytes";
constexpr const char* kCounts = "counts return to zero";
constexpr const char* kReleased = "everything is released in the end";
constexpr const char* kQuarantine = "what a controller may still use is quarantined until it is known to have stopped";

class Buffer {
 public:
  static constexpr std::size_t kPages = 6;

  explicit Buffer(unsigned number) : data_(pages() + number * kPages * 4096) { add(); }

  std::byte* page(std::size_t i) const { return data_ + i * 4096; }
  const memory::Reference& reference() const { return reference_; }
  /// The one before, if it was registered again.
  const memory::Reference& stale() const { return stale_; }
  bool is_open() const { return static_cast<bool>(reference_); }

  void add() {
    reference_ = memory::Registry::instance().add(data_, kPages * 4096, memory::Kind::host, false);
    leaving_ = false;
  }
  /// 0 or EBUSY.
  int close(const Controller* device) {
    auto& registry = memory::Registry::instance();
    const std::uint64_t before = registry.in_flight(reference_);
    const bool used = device != nullptr && in_use(*device);
    const int code = registry.close(reference_);
    if (code == 0) {
      require(!used, kHeld, "it was closed while the controller had a command of it");
      forget();
    } else if (code == ESTALE) {
      require(leaving_, kHeld, "it was closed by nobody");
      forget();
    } else {
      require(fine || before != 0, kNotRefused, "EBUSY with nothing in flight");
    }
    return code;
  }
  void close_when_idle() {
    leaving_ = true;
    memory::Registry::instance().close_when_idle(reference_);
  }
  bool leaving() const { return leaving_; }
  /// Closed by itself, since it was leaving.
  bool is_gone() const { return reference_ && reference_.registration->generation() != reference_.generation; }
  void forget() {
    stale_ = reference_;
    reference_ = {};
    leaving_ = false;
  }
  bool in_use(const Controller& device) const { return device.touches(data_, kPages * 4096); }
  /// Before a read, so that its bytes are seen to come.
  void spoil(std::size_t first, std::size_t count) const {
    for (std::size_t i = first; i < first + count; ++i) {
      const std::uint64_t none = 0;
      std::memcpy(page(i), &none, sizeof none);
      std::memcpy(page(i) + 4096 - sizeof none, &none, sizeof none);
    }
  }
  void expect(const Controller& device, std::size_t first, std::uint64_t lba, std::size_t count) const {
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t wanted = device.word(lba + i);
      std::uint64_t head = 0, tail = 0;
      std::memcpy(&head, page(first + i), sizeof head);
      std::memcpy(&tail, page(first + i) + 4096 - sizeof tail, sizeof tail);
      require(head == wanted && tail == wanted, kBytes, "a read that succeeded left other bytes");
    }
  }

 private:
  static std::byte* pages() {
    alignas(4096) static std::byte memory[2 * kPages * 4096];
    return memory;
  }

  std::byte* data_;
  memory::Reference reference_, stale_;
  bool leaving_ = false;
};

}  // namespace ugds::explore
