// SPDX-License-Identifier: Apache-2.0
//
// A file descriptor that is closed with its owner, and in every child of a fork: a child that lives on must not keep a
// device open that its parent had, or a connection to one.
#pragma once

namespace ugds {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number);
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;

  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }
  void reset() noexcept;

 private:
  void link() noexcept;
  void unlink() noexcept;
  static void prepare_for_fork();

  int number_ = -1;
  Descriptor* next_ = nullptr;  ///< of all that are open, under a lock
  Descriptor* before_ = nullptr;
};

}  // namespace ugds
