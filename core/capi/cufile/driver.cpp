// SPDX-License-Identifier: Apache-2.0
#include "capi/cufile/driver.hpp"

#include <algorithm>
#include <cerrno>
#include <climits>

#include "base/immortal.hpp"
#include "capi/cufile/buffers.hpp"
#include "capi/cufile/errors.hpp"
#include "capi/cufile/files.hpp"
#include "capi/cufile/fork.hpp"
#include "capi/cufile/run_page.hpp"
#include "capi/cufile/statistics.hpp"

namespace ugds::cufile {

namespace {

constinit Immortal<Driver> the_driver;

CUfileError_t refuse_closed(const char* operation) {
  return refuse(operation, CU_FILE_DRIVER_NOT_INITIALIZED, "the driver is not open", "call cuFileDriverOpen() first");
}

/// Ends a close, however it went: who waits to open goes on.
struct Settling {
  explicit Settling(std::atomic<bool>& closing) : closing_(closing) {}
  ~Settling() {
    closing_.store(false);
    closing_.notify_all();
  }
  Settling(const Settling&) = delete;
  Settling& operator=(const Settling&) = delete;

 private:
  std::atomic<bool>& closing_;
};

unsigned narrow(std::size_t value) { return static_cast<unsigned>(std::min<std::size_t>(value, UINT_MAX)); }

}  // namespace

Driver& Driver::instance() { return the_driver.value; }

void Driver::prepare_for_fork() {
  static const bool hooked = [] {
    at_fork({[] { the_driver.value.lock_.lock(); }, [] { the_driver.value.lock_.unlock(); },
             [] {
               // What was open is the parent's.
               the_driver.value.open_.store(false);
               the_driver.value.closing_.store(false);
               the_driver.value.count_ = 0;
               the_driver.value.lock_.unlock();
             }});
    return true;
  }();
  static_cast<void>(hooked);
}

void Driver::open_locked() {
  look_for_another();
  tell_if_uncounted();
  Parameters parameters = resolve(staged_ == nullptr ? Staged{} : *staged_);
  check(parameters);
  parameters_ = std::make_unique<Parameters>(std::move(parameters));
  staged_.reset();
  statistics().begin(static_cast<int>(parameters_->size(CUFILE_PARAM_PROFILE_STATS)));
  count(run_page().driver_opens);
  open_.store(true, std::memory_order_release);
}

CUfileError_t Driver::open() {
  const CUfileError_t opened = guarded("driver open", [&] {
    prepare_for_fork();
    const auto guard = lock_settled();
    if (!is_open()) open_locked();
    ++count_;
    return answer(CU_FILE_SUCCESS);
  });
  // Whatever is wrong with a parameter.
  return opened.err == CU_FILE_INVALID_VALUE ? answer(CU_FILE_DRIVER_INVALID_PROPS) : opened;
}

void Driver::need() {
  if (is_open() && !closing_.load(std::memory_order_acquire)) return;
  prepare_for_fork();
  const auto guard = lock_settled();
  if (!is_open()) open_locked();
}

std::unique_lock<std::mutex> Driver::lock_settled() {
  for (;;) {
    std::unique_lock guard(lock_);
    if (!closing_.load(std::memory_order_relaxed)) return guard;
    guard.unlock();
    closing_.wait(true);
  }
}

CUfileError_t Driver::close() {
  return guarded("driver close", [&] {
    {
      const auto guard = lock_settled();
      if (!is_open()) return refuse_closed("driver close");
      if (count_ > 1) {
        --count_;
        return answer(CU_FILE_SUCCESS);
      }
      closing_.store(true, std::memory_order_release);
    }
    // Not under the lock: closing waits, and takes locks that a fork takes before it.
    const Settling settling(closing_);
    if (!close_all_files() || !close_all_buffers()) {
      return refuse("driver close", CU_FILE_DRIVER_CLOSING, "requests are running",
                    "wait for them before the driver is closed");
    }
    const std::lock_guard guard(lock_);
    count_ = 0;
    open_.store(false, std::memory_order_release);
    statistics().end();
    return answer(CU_FILE_SUCCESS);
  });
}

long Driver::use_count() {
  const std::lock_guard guard(lock_);
  return is_open() ? std::max(count_, 1L) : 0;
}

Parameters Driver::parameters() {
  const std::lock_guard guard(lock_);
  return parameters_ == nullptr ? Parameters{} : *parameters_;
}

Parameters Driver::parameters_now() {
  const std::lock_guard guard(lock_);
  if (is_open()) return *parameters_;
  return resolve(staged_ == nullptr ? Staged{} : *staged_);
}

CUfileError_t Driver::refuse_open() {
  return refuse("configuration", CU_FILE_DRIVER_ALREADY_OPEN, "the driver is open, and parameters are set before that",
                "set them before cuFileDriverOpen() and before the first registration");
}

CUfileError_t Driver::set(int parameter, std::size_t value, const char* operation) {
  const CUfileError_t done = guarded(operation, [&] {
    const std::lock_guard guard(lock_);
    if (!is_open()) return refuse_closed(operation);
    check(parameter, value);
    parameters_->sizes[static_cast<std::size_t>(parameter)] = value;
    return answer(CU_FILE_SUCCESS);
  });
  return done.err == CU_FILE_INVALID_VALUE ? answer(CU_FILE_DRIVER_UNSUPPORTED_LIMIT) : done;
}

CUfileError_t Driver::set_poll_mode(bool poll, std::size_t threshold) {
  const CUfileError_t done = set(CUFILE_PARAM_POLLTHRESHOLD_SIZE_KB, threshold, "poll mode");
  if (done.err != CU_FILE_SUCCESS) return done;
  const std::lock_guard guard(lock_);
  if (is_open()) parameters_->bools[CUFILE_PARAM_PROPERTIES_USE_POLL_MODE] = poll;
  return done;
}

}  // namespace ugds::cufile

using namespace ugds::cufile;  // NOLINT

extern "C" {

CUfileError_t cuFileDriverOpen(void) { return Driver::instance().open(); }
CUfileError_t cuFileDriverClose(void) { return Driver::instance().close(); }
CUfileError_t cuFileDriverClose_v2(void) { return Driver::instance().close(); }
long cuFileUseCount(void) { return Driver::instance().use_count(); }

CUfileError_t cuFileGetVersion(int* version) {
  if (version == nullptr) return refuse("version", CU_FILE_INVALID_VALUE, "a null argument");
  *version = CUFILE_ABI_VERSION;
  return answer(CU_FILE_SUCCESS);
}

CUfileError_t cuFileDriverGetProperties(CUfileDrvProps_t* props) {
  if (props == nullptr) return refuse("properties", CU_FILE_INVALID_VALUE, "a null argument");
  return guarded("properties", [&] {
    Driver::instance().need();
    const Parameters p = Driver::instance().parameters();
    *props = {};
    // No version of nvidia-fs: there is none behind this.
    props->nvfs.poll_thresh_size = p.size(CUFILE_PARAM_POLLTHRESHOLD_SIZE_KB);
    props->nvfs.max_direct_io_size = p.size(CUFILE_PARAM_PROPERTIES_MAX_DIRECT_IO_SIZE_KB);
    props->nvfs.dstatusflags = 1u << CU_FILE_NFS_SUPPORTED | 1u << CU_FILE_NVME_SUPPORTED |
                               1u << CU_FILE_NVMEOF_SUPPORTED | 1u << CU_FILE_SCSI_SUPPORTED;
    if (p.truth(CUFILE_PARAM_PROPERTIES_USE_POLL_MODE)) props->nvfs.dcontrolflags |= 1u << CU_FILE_USE_POLL_MODE;
    if (p.truth(CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE))
      props->nvfs.dcontrolflags |= 1u << CU_FILE_ALLOW_COMPAT_MODE;
    props->fflags =
        1u << CU_FILE_BATCH_IO_SUPPORTED | 1u << CU_FILE_STREAMS_SUPPORTED | 1u << CU_FILE_PARALLEL_IO_SUPPORTED;
    props->max_device_cache_size = narrow(p.size(CUFILE_PARAM_PROPERTIES_MAX_DEVICE_CACHE_SIZE_KB));
    props->per_buffer_cache_size = narrow(p.size(CUFILE_PARAM_PROPERTIES_PER_BUFFER_CACHE_SIZE_KB));
    props->max_device_pinned_mem_size = narrow(p.size(CUFILE_PARAM_PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB));
    props->max_batch_io_size = narrow(p.size(CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE));
    props->max_batch_io_timeout_msecs = narrow(p.size(CUFILE_PARAM_PROPERTIES_BATCH_IO_TIMEOUT_MS));
    return answer(CU_FILE_SUCCESS);
  });
}

CUfileError_t cuFileDriverSetPollMode(bool poll, size_t threshold_kb) {
  return Driver::instance().set_poll_mode(poll, threshold_kb);
}
CUfileError_t cuFileDriverSetMaxDirectIOSize(size_t kb) {
  return Driver::instance().set(CUFILE_PARAM_PROPERTIES_MAX_DIRECT_IO_SIZE_KB, kb, "max direct I/O size");
}
CUfileError_t cuFileDriverSetMaxCacheSize(size_t kb) {
  return Driver::instance().set(CUFILE_PARAM_PROPERTIES_MAX_DEVICE_CACHE_SIZE_KB, kb, "max cache size");
}
CUfileError_t cuFileDriverSetMaxPinnedMemSize(size_t kb) {
  return Driver::instance().set(CUFILE_PARAM_PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB, kb, "max pinned memory");
}

}  // extern "C"
