// SPDX-License-Identifier: Apache-2.0
//
// Registered memory of ours, for requests on memory that is not: they go through it, an area at a time.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "memory/host.hpp"
#include "memory/registry.hpp"

namespace ugds::cufile {

class Bounce {
 public:
  static constexpr std::size_t kArea = std::size_t{1} << 20;
  /// Areas that there may be; further callers wait for one.
  static constexpr std::size_t kMost = 16;

  /// The process's own.
  static Bounce& instance();

  /// An area, for as long as it lives. Throws Failure where one cannot be made.
  class Area {
   public:
    Area();
    ~Area();
    Area(const Area&) = delete;
    Area& operator=(const Area&) = delete;
    std::byte* data() const { return memory_->data(); }
    const memory::Reference& reference() const { return reference_; }

   private:
    std::unique_ptr<memory::HostMemory> memory_;
    memory::Reference reference_{};
  };

 private:
  struct Kept {
    std::unique_ptr<memory::HostMemory> memory;
    memory::Reference reference{};
  };
  static void prepare_for_fork();

  std::mutex lock_;
  std::condition_variable freed_;
  std::vector<Kept> free_;
  std::size_t made_ = 0;
};

}  // namespace ugds::cufile
