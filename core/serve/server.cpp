// SPDX-License-Identifier: Apache-2.0
#include "serve/server.hpp"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/text.hpp"

namespace ugds::serve {

namespace {

const char* const kLeft = "the client left";
constexpr std::size_t kMostEvents = 1024, kMostRefused = 8;
/// Messages of the client that are answered before others have their turn.
constexpr int kBurst = 64;
/// How long one that says nothing keeps others out.
constexpr std::uint64_t kSilence = 1'000'000'000;
/// How long callers wait where there is no descriptor for them.
constexpr int kFullMs = 100;

Descriptor event(const char* what) {
  Descriptor made(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!made) fail(errno, "serve", std::string("no eventfd for ") + what, "raise the limit on open files (ulimit -n)");
  return made;
}

void ring(const Descriptor& event) {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(event.get(), &one, sizeof one));
}

void clear(const Descriptor& event) {
  std::uint64_t count;
  static_cast<void>(!::read(event.get(), &count, sizeof count));
}

pid_t process_of(int socket) {
  ucred who{};
  socklen_t size = sizeof who;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &size) == 0 ? who.pid : 0;
}

bool hung_up(int socket) {
  pollfd look{socket, 0, 0};
  return poll(&look, 1, 0) == 1 && (look.revents & POLLHUP) != 0;
}

std::unique_ptr<emulator::Controller> make_controller(const std::string& text) {
  const Uri uri = parse_uri(text);
  if (uri.scheme != "emulated")
    fail(EINVAL, "serve", "\"" + text + "\" is not an emulated device, and no other can be served",
         "write emulated:1GiB, or emulated:/path/to/image");
  const emulator::Options options = emulator::parse_options(uri.place, uri.query);
  if (options.pump_by_caller)
    fail(EINVAL, "serve", "with pump=caller nobody would run the controller", "leave pump= out");
  return std::make_unique<emulator::Controller>(options);
}

/// A thread that no signal of the process is delivered to, but for the SIGBUS that it causes itself (fault_guard.hpp).
template <class Body>
std::thread quiet_thread(Body body) {
  sigset_t all, before;
  sigfillset(&all);
  sigdelset(&all, SIGBUS);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread(body);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    fail(error.code().value(), "serve", "no thread for the server", "raise ulimit -u");
  }
}

}  // namespace

Server::Server(const std::string& uri, const std::string& path, mode_t mode)
    : uri_(uri),
      listener_(std::make_unique<Listener>(path, mode)),
      controller_(make_controller(uri)),
      stop_(event("stopping")),
      wake_(event("lost memory")),
      news_(event("events")),
      made_in_(getpid()) {
  path_ = listener_->path();
  controller_->remove();  // until there is a client
  thread_ = quiet_thread([this] { run(); });
}

void Server::stop() noexcept {
  std::call_once(stopped_, [this] {
    if (getpid() == made_in_) {
      ring(stop_);
      thread_.join();
      listener_.reset();
      return;
    }
    // A child of a fork: the thread, the client and the socket's name are the parent's.
    thread_.detach();
    static_cast<void>(listener_.release());
    static_cast<void>(controller_.release());
    static_cast<void>(connection_.release());
    static_cast<void>(session_.release());
  });
}

void Server::run() {
  prctl(PR_SET_NAME, "ugds-serve");
  while (!quit_) step();
  end("the server stops");
}

void Server::step() {
  std::vector<pollfd> looks = {{stop_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
  looks.push_back({full_ ? -1 : listener_->socket(), POLLIN, 0});
  looks.push_back({-1, 0, 0});
  if (connection_)
    looks.back() = {connection_->socket(), static_cast<short>(connection_->sending() ? POLLOUT : POLLIN), 0};
  for (const Refused& caller : refused_) looks.push_back({caller.socket.get(), POLLIN, 0});
  const int ready = poll(looks.data(), looks.size(), full_ ? kFullMs : -1);
  full_ = false;
  if (ready <= 0) return;
  if (looks[0].revents != 0) {
    quit_ = true;
    return;
  }
  if (looks[1].revents != 0) {
    clear(wake_);
    if (session_ && session_->memory_lost()) end("its memory is gone: a file that it had mapped was cut");
  }
  // Before the client, who may end in this step and leave its place to a caller.
  for (std::size_t i = refused_.size(); i-- > 0;) {
    if (looks[4 + i].revents == 0) continue;
    turn_away(refused_[i]);
    refused_.erase(refused_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (connection_ && looks[3].revents != 0) serve_client(looks[3].revents);
  if (looks[2].revents != 0) accept_one();
}

void Server::accept_one() {
  Descriptor socket(accept4(listener_->socket(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    full_ = errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS;
    return;
  }
  const pid_t process = process_of(socket.get());
  // One that has gone makes room, whatever it has sent before: that is served first.
  if (connection_ && hung_up(connection_->socket())) {
    while (connection_ && serve_message()) continue;
    end(kLeft);
  }
  if (connection_ && !session_->negotiated() && monotonic_ns() - since_ > kSilence) end("it said nothing");
  if (!connection_) return begin(std::move(socket), process);
  if (refused_.size() == kMostRefused) refused_.pop_front();
  refused_.push_back({std::move(socket), process});
}

void Server::begin(Descriptor socket, pid_t process) {
  try {
    session_ = std::make_unique<Session>(*controller_, wake_.get());
    connection_ = std::make_unique<Connection>(std::move(socket));
  } catch (const std::exception& error) {
    session_.reset();
    return tell(Event::Kind::refused, process, error.what());
  }
  process_ = process;
  last_words_ = false;
  since_ = monotonic_ns();
  connected_.store(true, std::memory_order_relaxed);
}

void Server::end(const std::string& reason) {
  if (!connection_) return;
  const bool negotiated = session_->negotiated();
  session_.reset();
  // After the session: when the client sees that the connection has ended, nothing touches its memory any more.
  connection_.reset();
  connected_.store(false, std::memory_order_relaxed);
  // One that came and went without a word only looked whether there is a server.
  if (negotiated) {
    tell(Event::Kind::disconnected, process_, reason);
  } else if (reason != kLeft) {
    tell(Event::Kind::refused, process_, reason);
  }
}

void Server::serve_client(short ready) {
  if (connection_->sending()) {
    const Connection::Progress sent = connection_->flush();
    if (sent == Connection::Progress::closed || (sent == Connection::Progress::waiting && (ready & POLLOUT) == 0))
      return end(kLeft);
    if (last_words_ && !connection_->sending()) return end(last_reason_);
    return;
  }
  for (int i = 0; i < kBurst; ++i)
    if (!serve_message()) return;
}

/// False where there is nothing more to do for the client now.
bool Server::serve_message() {
  const Connection::Progress received = connection_->receive();
  switch (received) {
    case Connection::Progress::waiting: return false;
    case Connection::Progress::closed: end(kLeft); return false;
    case Connection::Progress::malformed: end("a message without a sensible header"); return false;
    case Connection::Progress::too_large:
      connection_->reply_error(E2BIG);
      last_words_ = true;
      last_reason_ = "a message that is too large";
      break;
    case Connection::Progress::message: answer(); break;
  }
  if (connection_->flush() == Connection::Progress::closed) {
    end(kLeft);
    return false;
  }
  if (connection_->sending()) return false;
  if (last_words_) end(last_reason_);
  return !last_words_;
}

void Server::answer() {
  const bool before = session_->negotiated();
  try {
    connection_->reply(session_->handle(connection_->request()));
  } catch (const Failure& failure) {
    connection_->reply_error(failure.error().code);
  } catch (const std::bad_alloc&) {
    connection_->reply_error(ENOMEM);
  }
  last_words_ = !session_->negotiated();
  last_reason_ = "no agreement on the protocol";
  if (before || last_words_) return;
  clients_.fetch_add(1, std::memory_order_relaxed);
  tell(Event::Kind::connected, process_);
}

/// Answers a caller's first message, whatever it is: the device is in use.
void Server::turn_away(Refused& caller) {
  std::array<std::byte, 4096> bytes;
  const ssize_t got = recv(caller.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  // One that says nothing only looked whether there is a server.
  if (got < static_cast<ssize_t>(sizeof(vfio_user::Header))) return;
  vfio_user::Header header;
  std::memcpy(&header, bytes.data(), sizeof header);
  header.size = sizeof header;
  header.flags = vfio_user::kTypeReply | vfio_user::kFlagError;
  header.error = EBUSY;
  static_cast<void>(!send(caller.socket.get(), &header, sizeof header, MSG_NOSIGNAL | MSG_DONTWAIT));
  tell(Event::Kind::refused, caller.process, "another client is connected");
}

void Server::tell(Event::Kind kind, pid_t process, const std::string& reason) {
  {
    const std::lock_guard guard(events_lock_);
    if (events_.size() == kMostEvents) events_.pop_front();
    events_.push_back({kind, process, reason});
  }
  ring(news_);
}

std::vector<Event> Server::take_events() {
  const std::lock_guard guard(events_lock_);
  clear(news_);
  std::vector<Event> taken(events_.begin(), events_.end());
  events_.clear();
  return taken;
}

}  // namespace ugds::serve
