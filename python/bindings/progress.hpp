// SPDX-License-Identifier: Apache-2.0
//
// What stands behind `await`: for each device one batch and one thread, which looks for completions while something is
// in flight and otherwise sleeps; for each event loop one descriptor, which tells it that something has ended. The
// thread never takes the interpreter lock. (A mode that is written in Python does, when it is asked: mode.cpp.)
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/descriptor.hpp"
#include "base/fork.hpp"
#include "common.hpp"
#include "engine/batch.hpp"
#include "results.hpp"

namespace ugds::python {

/// What ended, on its way to one event loop. Thread-safe.
class Channel {
 public:
  /// Throws Failure(EMFILE) and the like.
  Channel();

  struct Told {
    std::uint64_t token = 0;
    std::int64_t result = 0;
    std::shared_ptr<Failed> failed{};
  };

  /// Readable when there is something to take.
  int descriptor() const { return eventfd_.get(); }
  void tell(Told told);
  std::vector<Told> take();

 private:
  Descriptor eventfd_;
  std::mutex lock_;
  std::vector<Told> told_;
};

/// A request that is to be told to a channel when it ends.
struct Wish {
  std::shared_ptr<Channel> channel;
  std::uint64_t token = 0;
  memory::Reference buffer{};
  engine::Wanted wanted{};  ///< but for its buffer and cookie
  bool is_flush = false;
};

class Progress {
 public:
  /// Makes the batch and starts the thread. Throws Failure, std::system_error.
  explicit Progress(engine::HandleId id);
  /// After stop().
  ~Progress() = default;
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Gives a request to the device, or puts it behind those that wait for capacity. Never waits. Returns its token;
  /// throws Failure(EBADF).
  std::uint64_t submit(Wish wish);
  /// Takes back a request that the device was not given. False: it was.
  bool forget(std::uint64_t token);
  /// The device is being closed: refuses what comes, and waits for what is there. Without the interpreter lock.
  void drain(std::uint64_t limit_ns);
  /// It was not closed after all.
  void resume();
  /// The device is closed: ends what is left, and the thread. Without the interpreter lock.
  void stop();
  /// Whether it is from before a fork: it has no thread, and nothing of it may be touched.
  bool is_forked() const { return fork_ != fork_generation(); }

 private:
  class Driver;

  void run();
  bool keeps_device();
  bool has_work() const { return in_flight_ != 0 || !wishes_.empty() || !flushes_.empty(); }
  std::uint32_t board(Wish& wish);
  void send(engine::Batch& batch, std::uint32_t slot);
  void wake();

  const engine::HandleId id_;
  const unsigned fork_ = fork_generation();
  engine::BatchId batch_;
  bool rings_may_block_ = false;
  int interrupt_ = -1;  ///< what the thread may be asleep on, where there are interrupts

  std::mutex lock_;
  std::condition_variable changed_, idle_;
  std::deque<Wish> wishes_;   ///< that wait for capacity, in order
  std::deque<Wish> flushes_;  ///< that the thread has not begun, or not ended
  std::vector<Wish> flights_;
  std::vector<std::uint32_t> free_;  ///< of the flights
  std::uint64_t in_flight_ = 0;
  /// The device, from the first request until none is left: whoever closes it waits for the last, as for every other
  /// call, also before the thread has come to it.
  std::optional<engine::Table::Use> busy_;
  enum class Sleep : std::uint8_t { none, for_work, nap, interrupt };
  Sleep sleeps_ = Sleep::none;
  bool closing_ = false, stopping_ = false;
  std::thread thread_;
};

/// Ends every progress thread, when the interpreter ends: devices are closed by then.
void stop_progress() noexcept;
void define_progress(nb::module_& m);

}  // namespace ugds::python
