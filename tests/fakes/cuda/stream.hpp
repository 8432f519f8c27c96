// SPDX-License-Identifier: Apache-2.0
//
// Streams: each is a thread that runs a queue, asleep while that is empty. And the two things that all streams of a GPU
// share and that make it stall: its connections, of which a stream that waits for a word holds one, and the driver's
// own lock, which it takes for some calls only when no stream waits for a word or runs a host function.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "calls.hpp"

namespace fake_cuda {

struct Context;
struct Capture;
class Stream;

/// What holds the streams of one GPU up.
class Gate {
 public:
  /// Waits until work that was enqueued as number `ticket` may begin: not while as many earlier waits are being held as
  /// there are connections.
  void pass(std::uint64_t ticket);
  /// The same for a wait, which then holds a connection until `leave`.
  void enter(std::uint64_t ticket);
  void leave(std::uint64_t ticket);
  void begin_call();
  void end_call();
  /// Waits until no stream waits for a word, is in a host function, or in a kernel that waits for the processor.
  void quiet();
  /// Looks again: the number of connections changed.
  void again();
  std::size_t waiting() const;
  std::size_t calling() const;

 private:
  bool is_open(std::uint64_t ticket) const;
  mutable std::mutex lock_;
  std::condition_variable changed_;
  std::multiset<std::uint64_t> holders_;
  /// How many those are. Work asks this first, without the lock, which would order streams that nothing else orders:
  /// the thread sanitizer could not see what a program forgot.
  std::atomic<std::size_t> held_{0};
  std::size_t calls_ = 0;
};

Gate& gate(int gpu);
void quiet_everywhere();

/// A place in a stream: everything up to it.
struct Point {
  std::shared_ptr<Stream> stream;
  std::uint64_t sequence = 0;
  void wait() const;
};

struct WordWait {
  std::uint64_t address = 0;
  std::uint64_t value = 0;
  unsigned flags = 0;
  bool is_64 = true;
};

struct Task {
  enum class Kind : std::uint8_t {
    work,  ///< what the GPU does: begins when a connection is free
    mark,  ///< what needs none: events
    wait,  ///< for a word
    hold,  ///< of a kernel that waits for the processor: it runs, and so holds no connection
    call,  ///< of a host function
  };
  Kind kind = Kind::work;
  std::function<void()> run;
  WordWait word{};
  std::vector<Point> after{};
  std::uint64_t ticket = 0;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  enum class Type : std::uint8_t { legacy, blocking, non_blocking };
  Stream(Context& in, Type of, unsigned made_with);
  /// Makes a stream and its thread.
  static std::shared_ptr<Stream> start(Context& context, Type type, unsigned flags);

  Context& context;
  const Type type;
  const unsigned flags;
  std::shared_ptr<Capture> capture;  ///< under the captures' lock

  /// Appends all of them. Call with the context's `order` held.
  void push(std::vector<Task>&& tasks);
  Point tail();
  bool is_idle();
  bool is_over();  ///< idle for ever
  void wait_for(std::uint64_t sequence);
  /// Ends the thread after what is enqueued.
  void close();
  /// Ends waits and drops what is enqueued.
  void cancel();

 private:
  void loop();
  void execute(Task& task);
  void wait_word(const Task& task);

  std::mutex lock_;
  std::condition_variable work_, done_;
  std::deque<Task> queue_;
  std::uint64_t enqueued_ = 0, finished_ = 0;
  bool closing_ = false;
  std::atomic<bool> cancelled_{false};
};

/// Runs it in the process's one thread for host functions and waits until it has run.
void call_host_function(const std::function<void()>& function);
void release_waits();
/// Whether what the calling stream's thread waits for was released, or its stream is gone.
bool is_released();

}  // namespace fake_cuda
