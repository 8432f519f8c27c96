// SPDX-License-Identifier: Apache-2.0
//
// Whether the driver is open, and with which parameters. Opens are counted; the first registration of a file or buffer
// opens it where the program has not.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "capi/cufile/abi.h"
#include "capi/cufile/parameters.hpp"

namespace ugds::cufile {

class Driver {
 public:
  /// The process's own.
  static Driver& instance();
  constexpr Driver() = default;

  bool is_open() const { return open_.load(std::memory_order_acquire); }
  CUfileError_t open();
  CUfileError_t close();
  /// Opens it where it is not, without counting. Throws Failure.
  void need();
  long use_count();

  /// The parameters in force while it is open. The caller knows that it is.
  Parameters parameters();
  /// The same, or what they would be if it were opened now. Throws Failure.
  Parameters parameters_now();
  /// Changes what the program staged; CU_FILE_DRIVER_ALREADY_OPEN where it is too late.
  template <class Change>
  CUfileError_t stage(Change&& change) {
    const std::lock_guard guard(lock_);
    if (is_open()) return refuse_open();
    prepare_for_fork();
    if (staged_ == nullptr) staged_ = std::make_unique<Staged>();
    change(*staged_);
    return {CU_FILE_SUCCESS, 0};
  }
  /// Changes one of the parameters in force; CU_FILE_DRIVER_NOT_INITIALIZED where it is not open.
  CUfileError_t set(int parameter, std::size_t value, const char* operation);
  CUfileError_t set_poll_mode(bool poll, std::size_t threshold);

 private:
  static CUfileError_t refuse_open();
  static void prepare_for_fork();
  void open_locked();
  /// The lock, when no close is under way: what that still closes is not to be of somebody who has just opened.
  std::unique_lock<std::mutex> lock_settled();

  std::mutex lock_;
  std::atomic<bool> open_{false};
  std::atomic<bool> closing_{false};  ///< set under the lock
  long count_ = 0;
  std::unique_ptr<Staged> staged_;
  std::unique_ptr<Parameters> parameters_;
};

}  // namespace ugds::cufile
