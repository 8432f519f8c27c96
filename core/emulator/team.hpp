// SPDX-License-Identifier: Apache-2.0
//
// Threads that share work with whoever calls. They look for more for some microseconds and then sleep, and they end
// with the team. Where none of them comes, as in a child of `fork`, the caller does all of it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ugds::emulator {

/// A thread that no signal of the process is delivered to. A SIGBUS is its own: what it reaches may be a file that
/// somebody has cut, and who shares that memory with it may have a handler. Throws Failure with `hint`.
std::thread quiet_thread(void (*run)(void* context, std::uint32_t number), void* context, std::uint32_t number,
                         const char* hint);

class Team {
 public:
  /// Throws Failure where the system gives no more threads.
  explicit Team(std::uint32_t threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  std::uint32_t threads() const { return count_; }

  /// Does one part of the work. `worker` is 0 in the caller's thread, and from 1 on in the team's.
  using Part = void (*)(void* context, std::uint32_t part, std::uint32_t worker) noexcept;
  /// Has each of `parts` done once and returns when all are. From one thread at a time.
  void run(std::uint32_t parts, Part part, void* context) noexcept;

 private:
  void serve(std::uint32_t worker) noexcept;
  void take_parts(std::uint32_t worker) noexcept;
  void wait_for_work(std::uint32_t seen) const noexcept;
  void end() noexcept;

  const std::uint32_t count_;
  const pid_t owner_;
  std::atomic<std::uint32_t> calls_{0};  ///< of `run`; changes once more at the end
  std::atomic<bool> quit_{false};

  // What follows is written while nobody is at work.
  std::mutex lock_;    ///< of joining: whoever is late finds the work closed, or the next
  bool open_ = false;  ///< guarded by it, and so is what makes `active_` grow
  Part part_ = nullptr;
  void* context_ = nullptr;
  std::uint32_t parts_ = 0;
  std::atomic<std::uint32_t> next_{0};
  std::atomic<std::uint32_t> active_{0};  ///< of the team's threads

  std::unique_ptr<std::vector<std::thread>> threads_;
};

}  // namespace ugds::emulator
