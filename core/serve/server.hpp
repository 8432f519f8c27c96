// SPDX-License-Identifier: Apache-2.0
//
// An emulated controller that other processes drive, by the vfio-user protocol. One client at a time: whoever else
// connects is told that it is in use. When a client ends, however it ends, the controller is reset and has nothing of
// it any more; the data stays.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "emulator/controller.hpp"
#include "serve/connection.hpp"
#include "serve/listener.hpp"
#include "serve/session.hpp"

namespace ugds::serve {

struct Event {
  enum class Kind : std::uint8_t { connected, disconnected, refused };
  Kind kind;
  pid_t process;       ///< of the client; 0 where that cannot be seen from here
  std::string reason;  ///< why it ended
};

class Server {
 public:
  /// Serves `uri`, an emulated device, at `path`, from now on and in a thread of its own. Throws Failure for what the
  /// URI asks and cannot be had, and what Listener throws.
  Server(const std::string& uri, const std::string& path, mode_t mode = 0600);
  ~Server() { stop(); }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  /// The client is disconnected and the socket removed; the controller stays, off the bus. Thread-safe.
  void stop() noexcept;

  const std::string& uri() const { return uri_; }
  const std::string& path() const { return path_; }
  /// Thread-safe, as its functions are. What it maps and resets is the client's.
  emulator::Controller& controller() { return *controller_; }
  /// Clients since the start: those that the protocol was agreed on with.
  std::uint64_t clients() const { return clients_.load(std::memory_order_relaxed); }
  bool connected() const { return connected_.load(std::memory_order_relaxed); }

  /// What happened since the last call; the oldest is forgotten where nobody asks. Thread-safe.
  std::vector<Event> take_events();
  /// Readable while there are events to take.
  int event_descriptor() const { return news_.get(); }

 private:
  struct Refused {
    Descriptor socket;
    pid_t process;
  };

  void run();
  void step();
  void accept_one();
  void begin(Descriptor socket, pid_t process);
  void end(const std::string& reason);
  void serve_client(short ready);
  bool serve_message();
  void answer();
  void turn_away(Refused& caller);
  void tell(Event::Kind kind, pid_t process, const std::string& reason = "");

  std::string uri_, path_;
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<emulator::Controller> controller_;
  Descriptor stop_, wake_, news_;
  std::atomic<std::uint64_t> clients_{0};
  std::atomic<bool> connected_{false};

  // The thread's own.
  std::unique_ptr<Connection> connection_;
  std::unique_ptr<Session> session_;
  pid_t process_ = 0;
  std::uint64_t since_ = 0;  ///< when it came
  bool last_words_ = false;  ///< the connection ends when the reply is sent
  std::string last_reason_;
  std::deque<Refused> refused_;
  bool full_ = false;  ///< no descriptor was left for a caller: they wait a while
  bool quit_ = false;

  std::mutex events_lock_;
  std::deque<Event> events_;
  pid_t made_in_;  ///< the process: a child of a fork has none of this
  std::once_flag stopped_;
  std::thread thread_;
};

}  // namespace ugds::serve
