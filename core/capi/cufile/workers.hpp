// SPDX-License-Identifier: Apache-2.0
//
// Threads that run batches' requests: as many as are asked for at once, up to a bound, made as they are needed. They
// never end, and are no children's.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace ugds::cufile {

class Workers {
 public:
  static constexpr unsigned kMost = 16;

  /// The process's own.
  static Workers& instance();

  /// Has `job` run by one of them. It may not throw. Throws std::bad_alloc, std::system_error where there is no thread.
  void run(std::function<void()> job);

 private:
  static void prepare_for_fork();
  void work();

  std::mutex lock_;
  std::condition_variable woken_;
  std::deque<std::function<void()>> jobs_;
  unsigned threads_ = 0, idle_ = 0;
};

}  // namespace ugds::cufile
