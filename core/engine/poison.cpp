// SPDX-License-Identifier: Apache-2.0
#include "engine/poison.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/fence.hpp"
#include "engine/stream.hpp"

namespace ugds::engine {

using gpu::WordOp;

namespace {

/// For the driver to take it, and for the GPU to begin.
constexpr std::uint64_t kPatience = 100'000'000;
/// For a kernel that has begun. One that does not end has faulted.
constexpr std::uint64_t kLastPatience = 1'000'000'000;

}  // namespace

Poison& Poison::of(gpu::Runtime& runtime) {
  if (runtime.backend() == gpu::Backend::cuda) {
    static auto* cuda = new Poison(runtime);  // NOLINT: its thread may be in the driver until the very end
    return *cuda;
  }
  static auto* hip = new Poison(runtime);  // NOLINT
  return *hip;
}

void Poison::prepare() {
  if (is_prepared_.load(std::memory_order_acquire)) return;
  const std::lock_guard guard(preparing_);
  if (memory_ == nullptr) memory_ = std::make_unique<memory::HostMemory>(kSource + kOrders * sizeof(gpu::CopyOrder));
  std::fill_n(memory_->data(), kSource, kPoison);
  if (device_ == 0) device_ = runtime_.pin(memory_->data(), memory_->size());
  for (gpu::Word* word : {&gate_, &begun_, &ended_}) {
    if (word->host == nullptr) *word = runtime_.make_word();
  }
  is_prepared_.store(true, std::memory_order_release);
}

void Poison::Fill::add(gpu::Address address, std::uint64_t bytes) noexcept {
  while (bytes != 0 && good_) {
    if (!poison_.is_prepared_.load(std::memory_order_acquire) || !poison_.is_over()) {
      good_ = false;
      return;
    }
    const std::uint64_t part = std::min(bytes, kSource);
    poison_.orders()[count_++] = {poison_.device_, address, part};
    address += part;
    bytes -= part;
    if (count_ == kOrders) good_ = poison_.run(place_, std::exchange(count_, 0));
  }
}

bool Poison::Fill::end() noexcept {
  if (good_ && count_ != 0) good_ = poison_.run(place_, std::exchange(count_, 0));
  return good_;
}

/// Whether the orders are ours to write: nothing that was enqueued may still read them.
bool Poison::is_over() {
  const Job job = job_.load(std::memory_order_acquire);
  return job == Job::none || (job == Job::enqueued && is_at(ended_.host->load(std::memory_order_acquire), number_));
}

/// Gives the job to the thread.
bool Poison::start(const gpu::Place& place, std::uint32_t count) noexcept try {
  {
    const std::lock_guard guard(job_lock_);
    place_ = place;
    count_ = count;
    job_.store(Job::asked, std::memory_order_release);
  }
  if (!has_thread_) std::thread([this] { work(); }).detach();
  has_thread_ = true;
  asked_.notify_one();
  return true;
} catch (const std::exception&) {
  job_.store(Job::none, std::memory_order_release);
  return false;
}

bool Poison::run(const gpu::Place& place, std::uint32_t count) noexcept {
  if (!start(place, count)) return false;
  ++number_;
  bool good = wait_until([&] { return job_.load(std::memory_order_acquire) != Job::asked; }, kPatience, {});
  if (!good) {
    take_out(count);
    Job job = Job::asked;
    if (job_.compare_exchange_strong(job, Job::given_up)) return false;  // the thread opens the gate when it gets there
  }
  if (job_.load(std::memory_order_acquire) == Job::failed) {
    take_out(count);
    good = false;
  }
  gate_.host->store(number_, std::memory_order_release);
  if (!good) return false;
  const auto is_ended = [&] { return is_at(ended_.host->load(std::memory_order_acquire), number_); };
  if (wait_until(is_ended, kPatience, {})) return true;
  // Streams hold all of the GPU's connections.
  take_out(count);
  full_fence();  // here: take out, then look whether it began. The GPU: tell that it begins, then read
  // Nobody knows how much of it was done, but it is over.
  if (is_at(begun_.host->load(std::memory_order_acquire), number_)) wait_until(is_ended, kLastPatience, {});
  return false;
}

void Poison::take_out(std::uint32_t count) noexcept {
  for (std::uint32_t i = 0; i < count; ++i) __atomic_store_n(&orders()[i].bytes, 0, __ATOMIC_RELEASE);
}

gpu::StreamHandle Poison::stream_at(const gpu::Place& place) {
  for (const At& at : streams_) {
    if (at.place == place) return at.stream;
  }
  streams_.reserve(streams_.size() + 1);
  streams_.push_back({place, runtime_.make_stream(place)});
  return streams_.back().stream;
}

/// 0; any other number says that not all of it was enqueued.
int Poison::enqueue(const gpu::Place& place, std::uint32_t count, std::uint64_t number) try {
  const gpu::StreamHandle stream = stream_at(place);
  const WordOp before[] = {{WordOp::Kind::wait, gate_.device, number}, {WordOp::Kind::write, begun_.device, number}};
  const WordOp after[] = {{WordOp::Kind::write, ended_.device, number}};
  int code = runtime_.enqueue_words(place, stream, before);
  if (code == 0) code = runtime_.enqueue_copies(place, stream, device_ + kSource, count, kSource);
  if (code == 0) code = runtime_.enqueue_words(place, stream, after);
  return code;
} catch (const std::exception&) {
  return -1;
}

/// Its thread: whatever asks the driver.
void Poison::work() {
  prctl(PR_SET_NAME, "ugds-poison");
  for (std::uint64_t number = 1;; ++number) {
    std::unique_lock lock(job_lock_);
    asked_.wait(lock, [&] { return job_.load(std::memory_order_relaxed) == Job::asked; });
    const gpu::Place place = place_;
    const std::uint32_t count = count_;
    lock.unlock();
    const Job done = enqueue(place, count, number) == 0 ? Job::enqueued : Job::failed;
    Job job = Job::asked;
    if (job_.compare_exchange_strong(job, done)) continue;
    // It was given up, and nothing is left of it to do.
    gate_.host->store(number, std::memory_order_release);
    job_.store(done, std::memory_order_release);
  }
}

}  // namespace ugds::engine
