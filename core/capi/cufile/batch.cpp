// SPDX-License-Identifier: Apache-2.0
//
// Batches. A batch is of no file: its requests name theirs, and are run by threads (workers.hpp), each as cuFileRead or
// cuFileWrite would be. Their ends are collected in the order in which they come.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <ctime>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/immortal.hpp"
#include "capi/cufile/driver.hpp"
#include "capi/cufile/files.hpp"
#include "capi/cufile/fork.hpp"
#include "capi/cufile/run_page.hpp"
#include "capi/cufile/statistics.hpp"
#include "capi/cufile/transfer.hpp"
#include "capi/cufile/workers.hpp"

namespace ugds::cufile {

namespace {

using nvme::Opcode;

class Batch : public std::enable_shared_from_this<Batch> {
 public:
  explicit Batch(unsigned capacity) : capacity_(capacity) {}

  CUfileError_t submit(unsigned count, const CUfileIOParams_t* params);
  /// Waits for `least` ends, or as many as there can be, and hands out up to `most`. No limit: for ever.
  unsigned collect(unsigned least, unsigned most, CUfileIOEvents_t* events, const std::uint64_t* limit_ns);
  /// What no thread has begun ends as cancelled.
  void cancel();
  /// Cancels, and waits for what runs.
  void destroy();

 private:
  struct Entry {
    Wanted wanted;
    void* cookie = nullptr;
    std::uint64_t began = 0;
  };
  void run_next();
  void end(const Entry& entry, int status, Moved moved);

  const unsigned capacity_;
  std::mutex lock_;
  std::condition_variable ended_;
  std::deque<Entry> waiting_;
  std::deque<CUfileIOEvents_t> done_;
  unsigned running_ = 0;
  std::uint64_t read_ = 0, written_ = 0;
};

int code_of(const CUfileIOParams_t& p) {
  if (p.mode != CUFILE_BATCH || (p.opcode & ~1) != 0 || p.u.batch.devPtr_base == nullptr || p.u.batch.file_offset < 0 ||
      p.u.batch.devPtr_offset < 0) {
    return refuse("batch", CU_FILE_INVALID_VALUE,
                  "a request has an unknown mode or opcode, a null buffer, or a negative "
                  "offset",
                  "nothing was submitted; correct the request")
        .err;
  }
  return FileUse(p.fh).refuse(p.opcode == CUFILE_WRITE ? Opcode::write : Opcode::read);
}

CUfileError_t Batch::submit(unsigned count, const CUfileIOParams_t* params) {
  for (const CUfileIOParams_t* p = params; p != params + count; ++p) {
    if (const int code = code_of(*p); code != CU_FILE_SUCCESS) return answer(code);
  }
  {
    const std::lock_guard guard(lock_);
    if (waiting_.size() + running_ + done_.size() + count > capacity_) {
      return refuse("batch", CU_FILE_BATCH_FULL, "more requests than the batch was set up for",
                    "collect results by cuFileBatchIOGetStatus() first, or set up a larger batch");
    }
    if (waiting_.empty() && running_ == 0) read_ = written_ = 0;
    for (const CUfileIOParams_t* p = params; p != params + count; ++p) {
      const auto& b = p->u.batch;
      waiting_.push_back({{p->opcode == CUFILE_WRITE ? Opcode::write : Opcode::read, p->fh, b.devPtr_base, b.size,
                           b.file_offset, b.devPtr_offset, true},
                          p->cookie,
                          monotonic_ns()});
    }
  }
  statistics().count(Operation::batch_enqueue, true, count);
  cufile::count(run_page().batch_requests, count);
  try {
    for (unsigned i = 0; i < count; ++i) Workers::instance().run([batch = shared_from_this()] { batch->run_next(); });
  } catch (...) {
    cancel();  // what no thread is for
    throw;
  }
  return answer(CU_FILE_SUCCESS);
}

void Batch::run_next() {
  std::unique_lock guard(lock_);
  if (waiting_.empty()) return;  // cancelled
  const Entry entry = waiting_.front();
  waiting_.pop_front();
  ++running_;
  guard.unlock();
  const Moved moved = transfer(entry.wanted);
  guard.lock();
  --running_;
  end(entry, moved >= 0 ? CUFILE_COMPLETE : moved == -ETIMEDOUT ? CUFILE_TIMEOUT : CUFILE_FAILED, moved);
}

/// Under the lock.
void Batch::end(const Entry& entry, int status, Moved moved) {
  done_.push_back({entry.cookie, status, static_cast<std::size_t>(moved)});
  if (moved > 0) (entry.wanted.opcode == Opcode::write ? written_ : read_) += static_cast<std::uint64_t>(moved);
  statistics().count(Operation::batch_process, moved >= 0);
  statistics().count_batch(false, monotonic_ns() - entry.began);
  if (waiting_.empty() && running_ == 0) {
    statistics().count(Operation::batch_complete, true);
    statistics().set_last_batch(read_, written_);
  }
  ended_.notify_all();
}

unsigned Batch::collect(unsigned least, unsigned most, CUfileIOEvents_t* events, const std::uint64_t* limit_ns) {
  std::unique_lock guard(lock_);
  const auto enough = [&] { return done_.size() >= std::min(least, most) || (waiting_.empty() && running_ == 0); };
  if (limit_ns == nullptr) {
    ended_.wait(guard, enough);
  } else {
    ended_.wait_for(guard, std::chrono::nanoseconds(*limit_ns), enough);
  }
  unsigned count = 0;
  for (; count < most && !done_.empty(); ++count) {
    events[count] = done_.front();
    done_.pop_front();
  }
  return count;
}

void Batch::cancel() {
  const std::lock_guard guard(lock_);
  while (!waiting_.empty()) {
    const Entry entry = waiting_.front();
    waiting_.pop_front();
    end(entry, CUFILE_CANCELED, -ECANCELED);
  }
}

void Batch::destroy() {
  cancel();
  std::unique_lock guard(lock_);
  ended_.wait(guard, [&] { return running_ == 0; });
}

struct Batches {
  std::mutex lock;
  std::uintptr_t next = 1;
  std::unordered_map<std::uintptr_t, std::shared_ptr<Batch>>* all = nullptr;
};
constinit Immortal<Batches> the_batches;
Batches& batches() { return the_batches.value; }

void prepare_for_fork() {
  static const bool hooked = [] {
    at_fork({[] { batches().lock.lock(); }, [] { batches().lock.unlock(); },
             [] {
               batches().all = nullptr;  // the parent's, whose locks somebody may have held
               batches().lock.unlock();
             }});
    return true;
  }();
  static_cast<void>(hooked);
}

std::shared_ptr<Batch> find(CUfileBatchHandle_t handle, bool remove = false) {
  const std::lock_guard guard(batches().lock);
  if (batches().all == nullptr) return nullptr;
  const auto found = batches().all->find(reinterpret_cast<std::uintptr_t>(handle));
  if (found == batches().all->end()) return nullptr;
  std::shared_ptr<Batch> batch = found->second;
  if (remove) batches().all->erase(found);
  return batch;
}

CUfileError_t refuse_batch(const char* cause) {
  return refuse("batch", CU_FILE_INVALID_VALUE, cause,
                "pass what cuFileBatchIOSetUp() made, and arrays that are there");
}

CUfileError_t set_up(CUfileBatchHandle_t* handle, unsigned nr) {
  if (handle == nullptr || nr == 0) return refuse_batch("the place for the batch is null, or it is of no request");
  prepare_for_fork();
  Driver::instance().need();
  const std::size_t most = Driver::instance().parameters().size(CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE);
  if (nr > most) {
    return refuse("batch", CU_FILE_INVALID_VALUE,
                  ("a batch of " + std::to_string(nr) + " requests, of at most " + std::to_string(most)).c_str(),
                  "raise properties.io_batchsize in cufile.json, up to 256, or make several batches");
  }
  auto batch = std::make_shared<Batch>(nr);
  const std::lock_guard guard(batches().lock);
  if (batches().all == nullptr) batches().all = new std::unordered_map<std::uintptr_t, std::shared_ptr<Batch>>;
  const std::uintptr_t id = batches().next++;
  batches().all->emplace(id, std::move(batch));
  *handle = reinterpret_cast<CUfileBatchHandle_t>(id);
  count(run_page().batches);
  return answer(CU_FILE_SUCCESS);
}

/// A time that is no time is taken as a person would: no fraction is above a second.
std::uint64_t nanoseconds(const timespec& time) {
  const auto seconds = static_cast<std::uint64_t>(std::clamp<time_t>(time.tv_sec, 0, 1'000'000'000));
  return seconds * 1'000'000'000 + static_cast<std::uint64_t>(std::clamp<long>(time.tv_nsec, 0, 999'999'999));
}

}  // namespace

}  // namespace ugds::cufile

using namespace ugds::cufile;  // NOLINT

extern "C" {

CUfileError_t cuFileBatchIOSetUp(CUfileBatchHandle_t* batch, unsigned nr) {
  const CUfileError_t made = guarded("batch", [&] { return set_up(batch, nr); });
  statistics().count(Operation::batch_set_up, made.err == CU_FILE_SUCCESS);
  return made;
}

CUfileError_t cuFileBatchIOSubmit(CUfileBatchHandle_t batch, unsigned nr, CUfileIOParams_t* params, unsigned flags) {
  const std::uint64_t start = ugds::monotonic_ns();
  const CUfileError_t done = guarded("batch", [&] {
    if (params == nullptr || nr == 0) return refuse_batch("null requests, or none");
    if (flags != 0) return refuse_batch("flags, of which there are none");
    const auto one = find(batch);
    return one == nullptr ? refuse_batch("the batch is destroyed") : one->submit(nr, params);
  });
  statistics().count(Operation::batch_submit, done.err == CU_FILE_SUCCESS);
  statistics().count_batch(true, ugds::monotonic_ns() - start);
  if (done.err != CU_FILE_SUCCESS) count(run_page().errors);
  return done;
}

CUfileError_t cuFileBatchIOGetStatus(CUfileBatchHandle_t batch, unsigned min_nr, unsigned* nr, CUfileIOEvents_t* events,
                                     struct timespec* timeout) {
  return guarded("batch", [&] {
    if (nr == nullptr || (events == nullptr && *nr != 0)) return refuse_batch("a null argument");
    const auto one = find(batch);
    if (one == nullptr) return refuse_batch("the batch is destroyed");
    const std::uint64_t limit = timeout == nullptr ? 0 : nanoseconds(*timeout);
    *nr = one->collect(min_nr, *nr, events, timeout == nullptr ? nullptr : &limit);
    return answer(CU_FILE_SUCCESS);
  });
}

CUfileError_t cuFileBatchIOCancel(CUfileBatchHandle_t batch) {
  const CUfileError_t done = guarded("batch", [&] {
    const auto one = find(batch);
    if (one == nullptr) return refuse_batch("the batch is destroyed");
    one->cancel();
    return answer(CU_FILE_SUCCESS);
  });
  statistics().count(Operation::batch_cancel, done.err == CU_FILE_SUCCESS);
  return done;
}

void cuFileBatchIODestroy(CUfileBatchHandle_t batch) {
  const CUfileError_t done = guarded("batch", [&] {
    const auto one = find(batch, true);
    if (one == nullptr) return refuse_batch("the batch is destroyed");
    one->destroy();
    return answer(CU_FILE_SUCCESS);
  });
  statistics().count(Operation::batch_destroy, done.err == CU_FILE_SUCCESS);
}

}  // extern "C"
