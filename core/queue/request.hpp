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
  wait = 0,          ///< more of it will be staged, then it is `done`
  done = 1,          ///< its `done` is set
  wait_to_tell = 2,  ///< more of it will be staged, then `tell`
  tell = 3,          ///< a ToldRequest: it is appended to its list
};
inline OnIdle ending(OnIdle now) { return static_cast<OnIdle>(static_cast<std::uint8_t>(now) | 1); }

struct Request {
  std::atomic<std::uint32_t> done{0};  ///< set last, with release; nothing touches the request after
  std::uint32_t in_flight = 0;
  std::uint64_t failed_at = kNoFailure;  ///< lowest offset in the request at which a command failed
  OnIdle on_idle = OnIdle::wait;
  bool stopped = false;      ///< that failure was not the device's answer: the controller was reset under it
  bool expired = false;      ///< a command of it was overdue
  std::uint16_t status = 0;  ///< of the failure at the lowest offset
  std::uint32_t result = 0;  ///< dword 0 of the last completion

  bool failed() const { return failed_at != kNoFailure; }
};

struct Finished;

/// A request whose end is told to a list instead of a waiter.
struct ToldRequest : Request {
  bool large = false;  ///< counted by its list as such
  ToldRequest* next = nullptr;
  Finished* list = nullptr;
};

/// Requests in the order in which they ended. Under the ownership of their queue.
struct Finished {
  ToldRequest* first = nullptr;
  ToldRequest** last = &first;
  std::uint64_t count = 0, large = 0;  ///< ever appended, and large ones of these

  Finished() = default;
  Finished(const Finished&) = delete;
  Finished& operator=(const Finished&) = delete;

  void append(ToldRequest& request) {
    request.next = nullptr;
    *last = &request;
    last = &request.next;
    ++count;
    large += request.large;
  }
  /// The oldest, which there is.
  ToldRequest& take() {
    ToldRequest& request = *first;
    first = request.next;
    if (first == nullptr) last = &first;
    return request;
  }
};

}  // namespace ugds::queue
