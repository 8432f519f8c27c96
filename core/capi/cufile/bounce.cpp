// SPDX-License-Identifier: Apache-2.0
#include "capi/cufile/bounce.hpp"

#include <utility>

#include "capi/cufile/fork.hpp"

namespace ugds::cufile {

Bounce& Bounce::instance() {
  static Bounce* const one = new Bounce;  // NOLINT: a thread that is left behind at exit may hold an area
  return *one;
}

void Bounce::prepare_for_fork() {
  static const bool hooked = [] {
    instance();
    at_fork({[] { instance().lock_.lock(); }, [] { instance().lock_.unlock(); },
             [] {
               for (Kept& kept : instance().free_) static_cast<void>(kept.memory.release());  // NOLINT: not inherited
               instance().free_.clear();
               instance().made_ = 0;
               instance().lock_.unlock();
             }});
    return true;
  }();
  static_cast<void>(hooked);
}

Bounce::Area::Area() {
  prepare_for_fork();
  Bounce& all = instance();
  {
    std::unique_lock guard(all.lock_);
    all.freed_.wait(guard, [&] { return !all.free_.empty() || all.made_ < kMost; });
    if (!all.free_.empty()) {
      Kept kept = std::move(all.free_.back());
      all.free_.pop_back();
      memory_ = std::move(kept.memory);
      reference_ = kept.reference;
      return;
    }
    all.free_.reserve(kMost);  // so that giving one back needs no memory
    ++all.made_;
  }
  try {
    memory_ = std::make_unique<memory::HostMemory>(kArea);
    reference_ = memory::Registry::instance().add(memory_->data(), kArea, memory::Kind::host, false);
  } catch (...) {
    {
      const std::lock_guard guard(all.lock_);
      --all.made_;
    }
    all.freed_.notify_one();
    throw;
  }
}

Bounce::Area::~Area() {
  Bounce& all = instance();
  {
    const std::lock_guard guard(all.lock_);
    if (memory::Registry::instance().in_flight(reference_) == 0) {
      all.free_.push_back({std::move(memory_), reference_});
    } else {
      // A command of an abandoned request may still use it: never given out again.
      static_cast<void>(memory_.release());  // NOLINT
      --all.made_;
    }
  }
  all.freed_.notify_one();
}

}  // namespace ugds::cufile
