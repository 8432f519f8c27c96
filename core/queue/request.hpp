// SPDX-License-Identifier: Apache-2.0
//
// The part of a request that queue pairs know: how many of its commands are in flight, what failed first, and the word
// that its waiter looks at. All but `done` is touched only by the owner of the queue that the request is on.
#pragma once

#include <atomic>
#include <cstdint>

namespace ugds::queue {

/// No command of a request has failed.
inline constexpr std::uint64_t kNoFailure = ~std::uint64_t{0};

/// What becomes of a request that has nothing in flight. A failure ends it early: nothing more of it is staged.
enum class OnIdle : std::uint8_t {
  wait = 0,           ///< more of it will be staged, then it is `done`
  done = 1,           ///< its `done` is set
  wait_to_tell = 2,   ///< more of it will be staged, then `tell`
  tell = 3,           ///< a ToldRequest: it is appended to its list
  wait_to_count = 6,  ///< more of it will be staged, then `count`
  count = 7,          ///< as `tell`, and counted by its list as a large one
};
inline OnIdle ending(OnIdle now) { return static_cast<OnIdle>(static_cast<std::uint8_t>(now) | 1); }
inline bool is_told(OnIdle now) { return (static_cast<std::uint8_t>(now) & 2) != 0; }

struct Request {
  std::atomic<std::uint32_t> done{0};  ///< set last, with release; nothing touches the request after
  std::uint32_t in_flight = 0;
  std::uint64_t failed_at = kNoFailure;  ///< lowest offset in the request at which a command failed
  OnIdle on_idle = OnIdle::wait;
  bool stopped = false;      ///< that failure was not the device's answer: the controller was reset under it
  bool expired = false;      ///< a command of it was overdue
  std::uint16_t status = 0;  ///< of the failure at the lowest offset
  std::uint32_t result = 0;  ///< dword 0 of the last completion
  std::uint32_t detail = 0;  ///< of the failure at the lowest offset

  bool failed() const { return failed_at != kNoFailure; }
};

class Finished;

/// A request whose end is told to a list instead of a waiter.
struct ToldRequest : Request {
  ToldRequest* next = nullptr;
  Finished* list = nullptr;
  std::uint64_t waits_since = 0;  ///< see Pacer::take
};

/// Requests in the order in which they ended. Under the ownership of their queue. How many there are says where it
/// ends: the last one's `next` says nothing.
class Finished {
 public:
  Finished() = default;
  Finished(const Finished&) = delete;
  Finished& operator=(const Finished&) = delete;

  /// It is left as one at rest: told of as a small one, if it is used again.
  void append(ToldRequest& request) {
    append_small(request);
    large_ += request.on_idle == OnIdle::count;
    request.on_idle = OnIdle::tell;
  }
  /// For one that is not counted as a large one.
  void append_small(ToldRequest& request) {
    *last_ = &request;
    last_ = &request.next;
    ++count_;
  }
  std::uint64_t size() const { return count_ - taken_; }
  bool empty() const { return taken_ == count_; }
  /// Ever appended, those of them that are large, and ever taken.
  std::uint64_t count() const { return count_; }
  std::uint64_t large() const { return large_; }
  std::uint64_t taken() const { return taken_; }

  /// Takes the oldest `count`, which there are and which are not none, for `body` one by one. Nothing may be appended
  /// meanwhile. They stay linked: the last of them, whose `next` is to be written by the caller, is returned.
  template <class Body>
  ToldRequest& take(std::uint64_t count, Body&& body) {
    ToldRequest* request = first_;
    for (std::uint64_t left = count;; request = request->next) {
      body(*request);
      if (--left == 0) break;
    }
    taken_ += count;
    if (taken_ == count_) {
      last_ = &first_;
    } else {
      first_ = request->next;
    }
    return *request;
  }
  ToldRequest* first() const { return first_; }

  /// Takes those back that are `wanted`: `body` has each, as if it had never been appended. The others stay in order.
  template <class Wanted, class Body>
  void take_back(Wanted&& wanted, Body&& body) {
    ToldRequest* request = first_;
    ToldRequest** last = &first_;
    for (std::uint64_t left = size(); left != 0; --left) {
      ToldRequest* const next = request->next;
      if (wanted(*request)) {
        --count_;
        body(*request);
      } else {
        *last = request;
        last = &request->next;
      }
      request = next;
    }
    last_ = last;
  }
  /// Of one of those that was counted as a large one.
  void uncount_large() { --large_; }

 private:
  ToldRequest* first_ = nullptr;
  ToldRequest** last_ = &first_;
  std::uint64_t count_ = 0, taken_ = 0, large_ = 0;
};

}  // namespace ugds::queue
