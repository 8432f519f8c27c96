// SPDX-License-Identifier: Apache-2.0
//
// Messages of one client, put together from what its socket gives, and replies sent as it takes them. Nothing waits: a
// client that sends half a message or reads no replies holds up nobody else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/descriptor.hpp"
#include "vfio_user/protocol.hpp"

namespace ugds::serve {

/// A message as it came. `payload` is without the header.
struct Request {
  vfio_user::Header header{};
  std::vector<std::byte> payload;
  std::vector<Descriptor> files;
  bool files_lost = false;  ///< more came than could be received
};

/// What answers it. `file` is sent along, and stays open until then.
struct Reply {
  std::vector<std::byte> payload;
  int file = -1;

  template <class Structure>
  void add(const Structure& structure) {
    append(&structure, sizeof structure);
  }
  void append(const void* bytes, std::size_t size);
};

class Connection {
 public:
  enum class Progress : std::uint8_t {
    waiting,    ///< for the client
    message,    ///< one is complete, or one reply is sent
    too_large,  ///< the header is there, and says more than the client may send
    closed,     ///< by the client, or broken
    malformed,  ///< what comes next cannot be told apart any more
  };

  /// `socket` does not block.
  explicit Connection(Descriptor socket) : socket_(std::move(socket)) {}

  int socket() const { return socket_.get(); }
  /// Reads on. With `message` or `too_large`, `request()` has it until the next call.
  Progress receive();
  Request& request() { return request_; }

  /// Puts a reply to the request in line; `flush` sends it. One at a time.
  void reply(const Reply& reply);
  void reply_error(int code);
  bool sending() const { return sent_ < out_.size(); }
  Progress flush();

 private:
  Progress read_some(std::byte* to, std::size_t bytes);
  void take_files(const void* message);
  void queue(std::uint32_t flags, std::uint32_t error, std::span<const std::byte> payload, int file);

  Descriptor socket_;
  Request request_;
  std::size_t have_ = 0;  ///< bytes of the message that is being read
  bool complete_ = false;
  std::vector<std::byte> out_;
  std::size_t sent_ = 0;
  int out_file_ = -1;
};

}  // namespace ugds::serve
