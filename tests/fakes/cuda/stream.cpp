// SPDX-License-Identifier: Apache-2.0
#include "stream.hpp"

#include <sys/prctl.h>

#include <array>
#include <chrono>
#include <thread>
#include <type_traits>

#include "context.hpp"
#include "memory.hpp"

namespace fake_cuda {

namespace {

std::atomic<std::uint64_t> tickets{0};
std::atomic<std::uint64_t> released{0};  ///< waits up to this ticket end at once

/// Short sleeps are meant: by default the kernel makes 50 us more of each.
void sleep_exactly() { ::prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL); }

template <class Word>
bool holds(std::byte* at, std::uint64_t value, unsigned flags) {
  // Acquire: what the word's writer did before is seen by whatever the stream does next.
  const Word now = std::atomic_ref<Word>(*reinterpret_cast<Word*>(at)).load(std::memory_order_acquire);
  const Word wanted = static_cast<Word>(value);
  switch (flags) {
    case CU_STREAM_WAIT_VALUE_EQ: return now == wanted;
    case CU_STREAM_WAIT_VALUE_AND: return (now & wanted) != 0;
    case CU_STREAM_WAIT_VALUE_NOR: return static_cast<Word>(~(now | wanted)) != 0;
    default: return static_cast<std::make_signed_t<Word>>(static_cast<Word>(now - wanted)) >= 0;
  }
}

/// The one thread in which all host functions of the process run.
class HostThread {
 public:
  void run(const std::function<void()>& function) {
    std::unique_lock hold(lock_);
    if (!started_) std::thread([this] { loop(); }).detach();
    started_ = true;
    const std::uint64_t mine = ++asked_;
    queue_.push_back(&function);
    changed_.notify_all();
    changed_.wait(hold, [&] { return done_ >= mine; });
  }

 private:
  void loop() {
    in_host_function = true;
    std::unique_lock hold(lock_);
    while (true) {
      changed_.wait(hold, [&] { return !queue_.empty(); });
      const auto* function = queue_.front();
      queue_.pop_front();
      hold.unlock();
      (*function)();
      hold.lock();
      done_++;
      changed_.notify_all();
    }
  }
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<const std::function<void()>*> queue_;
  std::uint64_t asked_ = 0, done_ = 0;
  bool started_ = false;
};

}  // namespace

// --- Gate

Gate& gate(int gpu) { return immortal<std::array<Gate, most_gpus>>()[static_cast<std::size_t>(gpu)]; }

void quiet_everywhere() {
  for (int gpu = 0; gpu < most_gpus; gpu++) gate(gpu).quiet();
}

bool Gate::is_open(std::uint64_t ticket) const {
  std::size_t before = 0;
  for (auto h = holders_.begin(); h != holders_.end() && *h < ticket; ++h) before++;
  return before < static_cast<std::size_t>(settings().connections.load());
}

void Gate::pass(std::uint64_t ticket) {
  if (held_.load(std::memory_order_relaxed) == 0) return;
  std::unique_lock hold(lock_);
  changed_.wait(hold, [&] { return is_open(ticket); });
}

void Gate::enter(std::uint64_t ticket) {
  std::unique_lock hold(lock_);
  changed_.wait(hold, [&] { return is_open(ticket); });
  holders_.insert(ticket);
  held_.store(holders_.size(), std::memory_order_relaxed);
}

void Gate::leave(std::uint64_t ticket) {
  const std::scoped_lock hold(lock_);
  holders_.erase(holders_.find(ticket));
  held_.store(holders_.size(), std::memory_order_relaxed);
  changed_.notify_all();
}

void Gate::begin_call() {
  const std::scoped_lock hold(lock_);
  calls_++;
}

void Gate::end_call() {
  const std::scoped_lock hold(lock_);
  calls_--;
  changed_.notify_all();
}

void Gate::quiet() {
  std::unique_lock hold(lock_);
  changed_.wait(hold, [&] { return holders_.empty() && calls_ == 0; });
}

void Gate::again() {
  const std::scoped_lock hold(lock_);
  changed_.notify_all();
}

std::size_t Gate::waiting() const {
  const std::scoped_lock hold(lock_);
  return holders_.size();
}

std::size_t Gate::calling() const {
  const std::scoped_lock hold(lock_);
  return calls_;
}

// --- Stream

void Point::wait() const { stream->wait_for(sequence); }

Stream::Stream(Context& in, Type of, unsigned made_with) : context(in), type(of), flags(made_with) {}

std::shared_ptr<Stream> Stream::start(Context& context, Type type, unsigned flags) {
  auto stream = std::make_shared<Stream>(context, type, flags);
  // Detached: the program may exit with streams that wait for ever, as with the real driver.
  std::thread([stream] { stream->loop(); }).detach();
  return stream;
}

void Stream::push(std::vector<Task>&& tasks) {
  const std::scoped_lock hold(lock_);
  for (auto& task : tasks) {
    task.ticket = ++tickets;
    queue_.push_back(std::move(task));
    enqueued_++;
  }
  work_.notify_one();
}

Point Stream::tail() {
  const std::scoped_lock hold(lock_);
  return {shared_from_this(), enqueued_};
}

bool Stream::is_idle() {
  const std::scoped_lock hold(lock_);
  return finished_ == enqueued_;
}

bool Stream::is_over() {
  const std::scoped_lock hold(lock_);
  return closing_ && finished_ == enqueued_;
}

void Stream::wait_for(std::uint64_t sequence) {
  std::unique_lock hold(lock_);
  done_.wait(hold, [&] { return finished_ >= sequence; });
}

void Stream::close() {
  const std::scoped_lock hold(lock_);
  closing_ = true;
  work_.notify_one();
}

void Stream::cancel() {
  cancelled_ = true;
  close();
}

void Stream::loop() {
  sleep_exactly();
  std::unique_lock hold(lock_);
  while (true) {
    work_.wait(hold, [&] { return !queue_.empty() || closing_; });
    if (queue_.empty()) return;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    hold.unlock();
    if (!cancelled_) execute(task);
    task = {};  // what it keeps alive goes now, not with the next task
    hold.lock();
    finished_++;
    done_.notify_all();
  }
}

namespace {
struct Held {
  const std::atomic<bool>* cancelled = nullptr;
  std::uint64_t ticket = 0;
};
thread_local Held held;
}  // namespace

void Stream::execute(Task& task) {
  for (const Point& point : task.after) point.wait();
  Gate& shared = gate(context.gpu);
  switch (task.kind) {
    case Task::Kind::work:
      shared.pass(task.ticket);
      if (!cancelled_) task.run();
      return;
    case Task::Kind::mark: task.run(); return;
    case Task::Kind::wait: wait_word(task); return;
    case Task::Kind::hold:
      shared.pass(task.ticket);
      shared.begin_call();
      held = {&cancelled_, task.ticket};
      task.run();
      shared.end_call();
      return;
    case Task::Kind::call:
      shared.begin_call();
      call_host_function(task.run);
      shared.end_call();
      return;
  }
}

void Stream::wait_word(const Task& task) {
  Gate& shared = gate(context.gpu);
  shared.enter(task.ticket);
  std::byte* at = memory().reach(task.word.address, task.word.is_64 ? 8 : 4);
  if (at == nullptr) context.fail(CUDA_ERROR_ILLEGAL_ADDRESS);
  const auto satisfied = [&] {
    return task.word.is_64 ? holds<std::uint64_t>(at, task.word.value, task.word.flags)
                           : holds<std::uint32_t>(at, task.word.value, task.word.flags);
  };
  std::chrono::microseconds nap(5);
  while (at != nullptr && !satisfied() && !cancelled_ && released.load() < task.ticket) {
    std::this_thread::sleep_for(nap);
    nap = std::min(nap + nap / 4, std::chrono::microseconds(50));
  }
  shared.leave(task.ticket);
}

void call_host_function(const std::function<void()>& function) { immortal<HostThread>().run(function); }

bool is_released() { return held.cancelled->load() || released.load() >= held.ticket; }

void release_waits() { released = tickets.load(); }

}  // namespace fake_cuda
