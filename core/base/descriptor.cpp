// SPDX-License-Identifier: Apache-2.0
#include "base/descriptor.hpp"

#include <unistd.h>

#include <mutex>
#include <utility>

#include "base/fork.hpp"
#include "base/immortal.hpp"

namespace ugds {

namespace {

struct Open {
  std::mutex lock;
  Descriptor* first = nullptr;
};
constinit Immortal<Open> open;

}  // namespace

void Descriptor::prepare_for_fork() {
  static const bool hooked = [] {
    on_fork(ForkOrder::descriptors, {[] { open.value.lock.lock(); }, [] { open.value.lock.unlock(); },
                                     [] {
                                       for (Descriptor* d = open.value.first; d != nullptr; d = d->next_)
                                         close(std::exchange(d->number_, -1));
                                       open.value.first = nullptr;
                                       open.value.lock.unlock();
                                     }});
    return true;
  }();
  static_cast<void>(hooked);
}

void Descriptor::link() noexcept {
  before_ = nullptr;
  next_ = open.value.first;
  if (next_ != nullptr) next_->before_ = this;
  open.value.first = this;
}

void Descriptor::unlink() noexcept {
  (before_ != nullptr ? before_->next_ : open.value.first) = next_;
  if (next_ != nullptr) next_->before_ = before_;
}

Descriptor::Descriptor(int number) {
  if (number < 0) return;
  prepare_for_fork();
  std::lock_guard guard(open.value.lock);
  number_ = number;
  link();
}

Descriptor::Descriptor(Descriptor&& other) noexcept { *this = std::move(other); }

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this == &other) return *this;
  std::lock_guard guard(open.value.lock);
  if (number_ >= 0) unlink();
  if (other.number_ >= 0) other.unlink();
  std::swap(number_, other.number_);
  if (number_ >= 0) link();
  if (other.number_ >= 0) other.link();
  return *this;
}

void Descriptor::reset() noexcept {
  if (number_ < 0) return;
  int number;
  {
    std::lock_guard guard(open.value.lock);
    unlink();
    number = std::exchange(number_, -1);
  }
  close(number);
}

}  // namespace ugds
