// SPDX-License-Identifier: Apache-2.0
//
// Requests on files, from many callers: each is cut into parts, given to the kernel, and told of once when all of its
// parts have been answered. One owner at a time but for `has_any` and `in_flight`.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "file/io.hpp"
#include "file/request.hpp"

namespace ugds::file {

class Queue {
 public:
  explicit Queue(std::unique_ptr<Io> io) : io_(std::move(io)) {}
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  const Io& io() const { return *io_; }
  /// Cuts it up and hands it over; the kernel knows of it after `push`.
  void submit(Request& request) noexcept {
    plan(request, bounces_);
    in_flight_.fetch_add(1, std::memory_order_relaxed);
    for (unsigned i = 0; i < request.part_count; ++i) io_->give(request.parts[i]);
  }
  void push() noexcept { io_->push(); }
  /// Calls `told(request)` for each that has ended.
  template <class Told>
  void reap(Told&& told) noexcept {
    bool again = false;
    while (Part* const part = io_->take()) {
      if (!settle(*part)) {
        io_->give(*part);
        again = true;
        continue;
      }
      Request& request = *part->request;
      if (--request.parts_left != 0) continue;
      conclude(request);
      if (request.bounce != nullptr) bounces_.give_back(std::exchange(request.bounce, nullptr));
      in_flight_.fetch_sub(1, std::memory_order_relaxed);
      told(request);
    }
    if (again) io_->push();
  }
  /// Asks for it to end soon; it is told of all the same.
  void cancel(Request& request) noexcept {
    request.cancelled = true;
    for (unsigned i = 0; i < request.part_count; ++i) io_->cancel(request.parts[i]);
  }
  bool has_any() const noexcept { return io_->has_any(); }
  std::uint32_t in_flight() const noexcept { return in_flight_.load(std::memory_order_relaxed); }
  void tell(int eventfd) { io_->tell(eventfd); }

 private:
  Bounces bounces_;
  std::unique_ptr<Io> io_;
  std::atomic<std::uint32_t> in_flight_{0};
};

}  // namespace ugds::file
