// SPDX-License-Identifier: Apache-2.0
//
// What surrounds a group of HIP calls: afterwards the calling thread is as it was.
#pragma once

#include "gpu/hip.hpp"

namespace ugds::gpu {

class HipRuntime::Scope {
 public:
  /// Makes `device` current; -1 leaves it.
  explicit Scope(const hip_api::Api& api, int device = -1) noexcept : api_(api), error_(api.peek_error()) {
    // A capture elsewhere in the process must neither be broken by these calls nor refuse them.
    if (api_.exchange_capture_mode != nullptr) static_cast<void>(api_.exchange_capture_mode(&mode_));
    if (device < 0) return;
    code_ = api_.get_device(&before_);
    if (code_ != hip_api::kSuccess || before_ == device) return;
    code_ = api_.set_device(device);
    is_changed_ = code_ == hip_api::kSuccess;
  }
  ~Scope() {
    if (is_changed_) static_cast<void>(api_.set_device(before_));
    if (api_.exchange_capture_mode != nullptr) static_cast<void>(api_.exchange_capture_mode(&mode_));
    // An error of ours would be taken for one of the program's own launches.
    if (error_ == hip_api::kSuccess && api_.peek_error() != hip_api::kSuccess) static_cast<void>(api_.take_error());
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  /// Why the device could not be made current, or 0.
  int code() const { return code_; }

 private:
  const hip_api::Api& api_;
  int error_;
  int mode_ = hip_api::kCaptureModeRelaxed;
  int before_ = -1;
  int code_ = hip_api::kSuccess;
  bool is_changed_ = false;
};

}  // namespace ugds::gpu
