// SPDX-License-Identifier: Apache-2.0
#include "progress.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <list>
#include <optional>

#include "base/clock.hpp"
#include "engine/operation.hpp"

namespace ugds::python {

namespace {

using engine::Batch;
using engine::Table;
using nvme::Opcode;

/// Requests of awaits that the device has at once; more wait in order.
constexpr std::uint32_t kDepth = 256;
/// After the last completion the thread polls for so long, then naps, from the shortest to the longest.
constexpr std::uint64_t kPoll = 20'000, kShortNap = 20'000, kLongNap = 1'000'000;
/// Asleep until an interrupt: no longer than this.
constexpr std::uint64_t kDoze = 10'000'000;
/// The engine looks at the device and at deadlines in waits that are not shorter than this; so it has one so often.
constexpr std::uint64_t kLookEvery = 10'000'000, kLookFor = 150'000;

/// A signal is for the interpreter's threads.
std::thread start(void (Progress::*body)(), Progress* self) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  try {
    thread = std::thread(body, self);
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

std::shared_ptr<Failed> failure(const Error& error) {
  auto failed = std::make_shared<Failed>();
  failed->error = error;
  return failed;
}

void tell(const Wish& wish, std::int64_t result, std::shared_ptr<Failed> failed) {
  wish.channel->tell({wish.token, result, std::move(failed)});
}

}  // namespace

Channel::Channel() : eventfd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!eventfd_) fail(errno, "await", "no descriptor for the event loop", "raise the limit of open files");
}

void Channel::tell(Told told) {
  bool first;
  {
    std::lock_guard guard(lock_);
    first = told_.empty();
    told_.push_back(std::move(told));
  }
  const std::uint64_t one = 1;
  if (first) static_cast<void>(!write(eventfd_.get(), &one, sizeof one));
}

std::vector<Channel::Told> Channel::take() {
  std::uint64_t count;
  // Before what was told is taken: whatever comes later is told of anew.
  static_cast<void>(!read(eventfd_.get(), &count, sizeof count));
  std::lock_guard guard(lock_);
  return std::exchange(told_, {});
}

/// The thread's work while there is some.
class Progress::Driver {
 public:
  Driver(Progress& of, engine::Handle& handle)
      : p_(of), handle_(handle), batch_(*handle.batch(of.batch_.slot)), moved_(ticks()), looked_(moved_) {
    results_.make_room(kDepth);
  }

  void run() {
    while (begin_turn()) {
      const bool ended = turn_flushes();
      if ((collect(0) | ended) != 0) {
        moved_ = ticks();
        nap_ = kShortNap;
      } else {
        rest();
      }
    }
  }

 private:
  struct Flush {
    Wish wish;
    engine::Transfer transfer{.opcode = Opcode::flush};
    std::optional<engine::Operation> operation;
  };

  /// Gives the device what there is capacity for. False: nothing is left.
  bool begin_turn() {
    std::unique_lock guard(p_.lock_);
    if (!p_.has_work()) return false;
    if (handle_.given_up()) return end_wishes(guard);
    while (!p_.wishes_.empty() && !p_.free_.empty()) {
      const std::uint32_t slot = p_.board(p_.wishes_.front());
      p_.wishes_.pop_front();
      guard.unlock();  // the doorbell may be another process's to answer
      p_.send(batch_, slot);
      guard.lock();
    }
    for (std::size_t i = flushes_.size(); i < p_.flushes_.size(); ++i) {
      Flush& flush = flushes_.emplace_back();
      flush.wish = p_.flushes_[i];
      flush.operation.emplace(handle_, flush.transfer, &handle_.batch_pair());
    }
    return true;
  }

  /// The device is being closed, whatever comes of it.
  bool end_wishes(std::unique_lock<std::mutex>& guard) {
    std::deque<Wish> wishes = std::exchange(p_.wishes_, {});
    guard.unlock();
    Table::instance().explain_stale(p_.id_, "await");
    for (const Wish& wish : wishes) tell(wish, -EBADF, failure(last_error()));
    looked_ = 0;  // what is in flight ends at the next look
    return true;
  }

  bool turn_flushes() {
    bool any = false;
    for (auto flush = flushes_.begin(); flush != flushes_.end();) {
      if (!flush->operation->turn()) {
        ++flush;
        continue;
      }
      const std::int64_t result = flush->operation->result();
      tell(flush->wish, result, result < 0 ? failure(last_error()) : nullptr);
      {
        std::lock_guard guard(p_.lock_);
        std::erase_if(p_.flushes_, [&](const Wish& wish) { return wish.token == flush->wish.token; });
      }
      flush = flushes_.erase(flush);
      any = true;
    }
    return any;
  }

  /// Whether something ended within so many nanoseconds. It is told.
  bool collect(std::uint64_t limit_ns) {
    static const std::shared_ptr<Unseen> nobody;
    results_.filled(batch_.collect(p_.batch_.generation, 1, kDepth, limit_ns, {}, Results::Filling(results_, nobody)));
    if (results_.size() == 0) return false;
    std::size_t failed = 0;
    std::vector<Wish> ended;
    ended.reserve(results_.size());
    {
      std::lock_guard guard(p_.lock_);
      for (std::size_t i = 0; i < results_.size(); ++i) {
        const auto slot = static_cast<std::uint32_t>(results_.data()[i].cookie);
        ended.push_back(std::exchange(p_.flights_[slot], {}));
        p_.free_.push_back(slot);
      }
      p_.in_flight_ -= results_.size();
    }
    for (std::size_t i = 0; i < ended.size(); ++i) {
      const std::int64_t result = results_.data()[i].result;
      tell(ended[i], result, result < 0 ? results_.failures()[failed++] : nullptr);
    }
    results_.clear();
    return true;
  }

  void rest() {
    const std::uint64_t now = ticks();
    if (ticks_to_ns(now - looked_) > kLookEvery || looked_ == 0) {
      looked_ = now;
      if (collect(kLookFor)) moved_ = ticks();
    } else if (ticks_to_ns(now - moved_) < kPoll || handle_.turn().run != nullptr) {
      if ((++polls_ & 15) == 0) sched_yield();
    } else if (queue::Wakeup* const wakeup = handle_.batch_pair().wakeup();
               flushes_.empty() && wakeup != nullptr && wakeup->armed() && handle_.batch_pair().load() != 0) {
      doze(*wakeup);
    } else {
      nap();
    }
  }

  void doze(queue::Wakeup& wakeup) {
    if (!set_sleep(Sleep::interrupt)) return;
    wakeup.sleep([&] { return collect(0); }, kDoze);
    std::lock_guard guard(p_.lock_);
    p_.sleeps_ = Sleep::none;
  }

  bool set_sleep(Sleep sleep) {
    std::lock_guard guard(p_.lock_);
    if (!p_.wishes_.empty() && !p_.free_.empty()) return false;
    p_.sleeps_ = sleep;
    return true;
  }

  void nap() {
    std::unique_lock guard(p_.lock_);
    if (!p_.wishes_.empty() && !p_.free_.empty()) return;
    p_.sleeps_ = Sleep::nap;
    if (p_.changed_.wait_for(guard, std::chrono::nanoseconds(nap_)) == std::cv_status::timeout) {
      nap_ = std::min(2 * nap_, kLongNap);
    } else {
      moved_ = ticks();  // something new: it may end soon
      nap_ = kShortNap;
    }
    p_.sleeps_ = Sleep::none;
  }

  Progress& p_;
  engine::Handle& handle_;
  Batch& batch_;
  Results results_;
  std::list<Flush> flushes_;
  std::uint64_t moved_, looked_;
  std::uint64_t nap_ = kShortNap;
  std::uint32_t polls_ = 0;
};

Progress::Progress(engine::HandleId id) : id_(id) {
  flights_.resize(kDepth);
  for (std::uint32_t i = 0; i < kDepth; ++i) free_.push_back(kDepth - 1 - i);
  const Table::Use handle(Table::instance(), id);
  if (!handle) {
    Table::instance().explain_stale(id, "await");
    throw Failure(last_error());
  }
  rings_may_block_ = handle->rings_may_block();
  if (const queue::Wakeup* wakeup = handle->batch_pair().wakeup()) interrupt_ = wakeup->eventfd();
  batch_ = handle->open_batch(kDepth, engine::Priority::unsaid);
  try {
    thread_ = start(&Progress::run, this);
  } catch (...) {
    handle->close_batch(batch_);
    throw;
  }
}

/// Under the lock, where there is capacity: its place among those in flight.
std::uint32_t Progress::board(Wish& wish) {
  const std::uint32_t slot = free_.back();
  free_.pop_back();
  flights_[slot] = std::move(wish);
  ++in_flight_;
  return slot;
}

/// One request, for the engine.
struct One {
  static constexpr bool kOffsetsTell = false;
  const Wish* wish;
  std::uint32_t slot;
  const memory::Reference& begin_run(std::size_t) const { return wish->buffer; }
  const memory::Reference& buffer() const { return wish->buffer; }
  bool same_buffer(std::size_t) const { return true; }
  engine::Wanted operator()(std::size_t) const {
    engine::Wanted wanted = wish->wanted;
    wanted.cookie = slot;
    return wanted;
  }
};

/// The batch has room for as many as there are places.
void Progress::send(Batch& batch, std::uint32_t slot) {
  batch.submit(batch_.generation, 1, true, One{&flights_[slot], slot}, [](std::size_t) { return false; });
}

std::uint64_t Progress::submit(Wish wish) {
  const Table::Use handle(Table::instance(), id_);
  std::lock_guard guard(lock_);
  if (!handle || closing_ || !keeps_device()) {
    Table::instance().explain_stale(id_, "await");
    throw Failure(last_error());
  }
  // Of all devices: one loop may await requests of many.
  static std::uint64_t next_token = 0;
  const std::uint64_t token = wish.token = std::atomic_ref(next_token).fetch_add(1, std::memory_order_relaxed);
  if (wish.is_flush) {
    flushes_.push_back(std::move(wish));
  } else if (!wishes_.empty() || free_.empty() || rings_may_block_) {
    wishes_.push_back(std::move(wish));
  } else {
    send(*handle->batch(batch_.slot), board(wish));
  }
  wake();
  return token;
}

/// Under the lock. False: it is being closed.
bool Progress::keeps_device() {
  if (busy_) return true;
  busy_.emplace(Table::instance(), id_);
  if (*busy_) return true;
  busy_.reset();
  return false;
}

/// Under the lock.
void Progress::wake() {
  if (sleeps_ == Sleep::for_work || sleeps_ == Sleep::nap) {
    changed_.notify_one();
  } else if (sleeps_ == Sleep::interrupt && (!wishes_.empty() || !flushes_.empty())) {
    const std::uint64_t one = 1;
    static_cast<void>(!write(interrupt_, &one, sizeof one));
  }
}

bool Progress::forget(std::uint64_t token) {
  std::lock_guard guard(lock_);
  const bool found = std::erase_if(wishes_, [&](const Wish& wish) { return wish.token == token; }) != 0;
  if (found && !has_work()) {
    if (sleeps_ == Sleep::for_work) busy_.reset();  // the thread will not come to it
    idle_.notify_all();
  }
  return found;
}

void Progress::run() {
  std::unique_lock guard(lock_);
  for (;;) {
    sleeps_ = Sleep::for_work;
    if (!has_work()) {
      busy_.reset();
      idle_.notify_all();
    }
    changed_.wait(guard, [&] { return stopping_ || has_work(); });
    sleeps_ = Sleep::none;
    if (!has_work()) return;
    engine::Handle& handle = **busy_;
    guard.unlock();
    Driver(*this, handle).run();
    guard.lock();
  }
}

void Progress::drain(std::uint64_t limit_ns) {
  std::unique_lock guard(lock_);
  closing_ = true;
  idle_.wait_for(guard, std::chrono::nanoseconds(limit_ns), [&] { return !has_work(); });
}

void Progress::resume() {
  std::lock_guard guard(lock_);
  closing_ = false;
}

void Progress::stop() {
  {
    std::lock_guard guard(lock_);
    if (std::exchange(stopping_, true)) return;
    changed_.notify_one();
  }
  thread_.join();
}

}  // namespace ugds::python
