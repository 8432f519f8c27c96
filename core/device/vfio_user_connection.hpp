// SPDX-License-Identifier: Apache-2.0
//
// The client's end of a vfio-user connection: commands and their replies, one at a time. What happens to it is one of
// three: it answers, it has been closed by the server (the device has gone), or it does not answer (nobody knows what
// the server does).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/descriptor.hpp"
#include "vfio_user/protocol.hpp"

namespace ugds::device {

class VfioUserConnection {
 public:
  /// Connects, and agrees on the version. `path` is the socket, or the folder with one named `cntrl`. Throws Failure.
  explicit VfioUserConnection(const std::string& path);

  struct Reply {
    int error = 0;  ///< a positive errno: the server's, or ECONNRESET (closed), ETIMEDOUT (no answer), EPROTO
    std::vector<std::byte> payload;
    std::vector<Descriptor> descriptors;
  };
  /// Sends a command and waits for its reply, for some seconds. Thread-safe.
  Reply call(vfio_user::Message message, std::span<const std::byte> payload, std::span<const int> descriptors = {});
  /// The same, without allocating: the reply's payload must be `reply.size()` bytes. A positive errno, or 0.
  int call_into(vfio_user::Message message, std::span<const std::byte> head, std::span<const std::byte> body,
                std::span<std::byte> reply);

  std::uint32_t max_descriptors() const { return max_descriptors_; }
  bool closed() const { return state_.load(std::memory_order_acquire) == State::closed; }
  /// Whether the server has closed the connection by now; also of one that did not answer. Thread-safe.
  bool has_ended();
  bool stuck() const { return state_.load(std::memory_order_acquire) == State::stuck; }

 private:
  enum class State : std::uint8_t { open, closed, stuck };

  void connect(const std::string& path);
  void negotiate();
  int send(vfio_user::Message message, std::span<const std::byte> head, std::span<const std::byte> body,
           std::span<const int> descriptors);
  int receive_header(vfio_user::Message message, vfio_user::Header& header, std::vector<Descriptor>* descriptors);
  int receive(std::span<std::byte> out);
  int skip(std::size_t bytes);
  int broken(int code);

  Descriptor socket_;
  std::string path_;
  std::mutex lock_;
  std::atomic<State> state_{State::open};
  std::uint64_t deadline_ = 0;  ///< of the call that runs
  std::uint16_t id_ = 0;
  std::uint32_t max_descriptors_ = vfio_user::kDefaultMaxMessageFds;
};

}  // namespace ugds::device
