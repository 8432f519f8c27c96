// SPDX-License-Identifier: Apache-2.0
#include "device/vfio_user_connection.hpp"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/steps.hpp"

namespace ugds::device {

using vfio_user::Header;
using vfio_user::Message;

namespace {

constexpr timeval kPatience{5, 0};
constexpr std::uint64_t kPatienceNs = 5'000'000'000;
/// How long opening waits for a server that serves another client, which may be ending.
constexpr std::uint64_t kLettingGo = 1'000'000'000;
/// No reply of a well-behaved server is larger: the largest that we ask for is a region's description.
constexpr std::uint32_t kMostPayload = 64 << 10;
constexpr std::size_t kMostDescriptors = 16;

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

/// The number behind `name`, which is in quotes, in the server's JSON; nothing else there bears these names.
std::uint32_t number_in(std::string_view json, std::string_view name, std::uint32_t otherwise) {
  std::size_t at = json.find(name);
  if (at == std::string_view::npos) return otherwise;
  at = json.find_first_not_of(" \t\r\n:", at + name.size());
  if (at == std::string_view::npos) return otherwise;
  std::uint32_t value = 0;
  const auto [end, error] = std::from_chars(json.data() + at, json.data() + json.size(), value);
  return error == std::errc() ? value : otherwise;
}

}  // namespace

VfioUserConnection::VfioUserConnection(const std::string& path) : path_(path) {
  struct stat status {};
  if (stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) path_ += "/cntrl";
  // A server that has just lost a client takes a moment to stop its device.
  const std::uint64_t start = monotonic_ns();
  for (;;) {
    try {
      connect(path_);
      negotiate();
      return;
    } catch (const Failure& failure) {
      if (failure.error().code != EBUSY || stuck() || monotonic_ns() - start > kLettingGo) throw;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    state_.store(State::open, std::memory_order_release);
  }
}

void VfioUserConnection::connect(const std::string& path) {
  setup_step("vfio-user: connect");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    fail(EINVAL, "open", path.empty() ? "the URI names no socket" : "the socket's path is longer than 107 bytes",
         "write vfio-user:/run/ssd/cntrl, or its folder");
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  socket_ = Descriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket_) fail(errno, "open", "no socket", "raise the limit of open files");
  setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof kPatience);
  setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &kPatience, sizeof kPatience);
  if (::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return;
  const int code = errno;
  switch (code) {
    case ENOENT: fail(ENOENT, "open", "there is no " + path, "start the server, such as `ugds serve`, first");
    case ECONNREFUSED: fail(ECONNREFUSED, "open", "no server listens at " + path, "start it again");
    case EACCES: fail(EACCES, "open", "this user may not open " + path, "change the socket's owner or mode");
    default: fail(code, "open", path + " cannot be connected to: " + std::strerror(code));
  }
}

void VfioUserConnection::negotiate() {
  setup_step("vfio-user: version");
  struct {
    vfio_user::Version version{vfio_user::kMajor, vfio_user::kMinor};
    char json[64] = "{\"capabilities\":{\"max_msg_fds\":16}}";
  } const ours;
  const std::size_t size = sizeof ours.version + std::strlen(ours.json) + 1;
  const Reply reply = call(Message::version, bytes_of(ours).first(size));
  if (reply.error == ECONNRESET || reply.error == ETIMEDOUT) {
    fail(EBUSY, "open", "the server at " + path_ + (closed() ? " closed the connection" : " does not answer"),
         closed() ? "it may serve another client: most serve one at a time"
                  : "it may be stopped (SIGSTOP) or have hung, or serve another client: most serve one at a time");
  }
  if (reply.error == EBUSY) {
    fail(EBUSY, "open", "the server at " + path_ + " serves another client", "most serve one at a time: end that one");
  }
  if (reply.error != 0) {
    fail(EPROTO, "open",
         std::string("the server did not agree on version 0.1 of vfio-user: ") + std::strerror(reply.error),
         "check that it is a vfio-user server");
  }
  vfio_user::Version theirs{};
  if (reply.payload.size() >= sizeof theirs) std::memcpy(&theirs, reply.payload.data(), sizeof theirs);
  if (reply.payload.size() < sizeof theirs || theirs.major != vfio_user::kMajor) {
    fail(EPROTO, "open", "the server does not speak version 0 of vfio-user", "check that it is a vfio-user server");
  }
  const std::string_view json(reinterpret_cast<const char*>(reply.payload.data()) + sizeof theirs,
                              reply.payload.size() - sizeof theirs);
  max_descriptors_ =
      std::clamp<std::uint32_t>(number_in(json, "\"max_msg_fds\"", max_descriptors_), 1, kMostDescriptors);
}

/// What a failed system call on the socket, or a reply that cannot be one, says of the server. Only its own end of the
/// connection tells that it has stopped.
int VfioUserConnection::broken(int code) {
  const bool ended = code == ECONNRESET || code == EPIPE;
  state_.store(ended ? State::closed : State::stuck, std::memory_order_release);
  // Nothing can be made of what comes after half a message. The server notices, and stops the device.
  shutdown(socket_.get(), ended ? SHUT_RDWR : SHUT_WR);
  if (ended) return ECONNRESET;
  return code == EAGAIN || code == EWOULDBLOCK ? ETIMEDOUT : code;
}

bool VfioUserConnection::has_ended() {
  std::lock_guard guard(lock_);
  std::byte scratch[512];
  while (stuck()) {
    const ssize_t got = recv(socket_.get(), scratch, sizeof scratch, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (got <= 0) state_.store(State::closed, std::memory_order_release);
  }
  return closed();
}

int VfioUserConnection::send(Message message, std::span<const std::byte> head, std::span<const std::byte> body,
                             std::span<const int> descriptors) {
  if (closed()) return ECONNRESET;
  if (stuck()) return ETIMEDOUT;
  deadline_ = monotonic_ns() + kPatienceNs;
  Header header{++id_, static_cast<std::uint16_t>(message),
                static_cast<std::uint32_t>(sizeof(Header) + head.size() + body.size()), vfio_user::kTypeCommand, 0};
  iovec parts[] = {{&header, sizeof header},
                   {const_cast<std::byte*>(head.data()), head.size()},
                   {const_cast<std::byte*>(body.data()), body.size()}};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMostDescriptors)] = {};
  msghdr out{};
  out.msg_iov = parts;
  out.msg_iovlen = std::size(parts);
  if (!descriptors.empty()) {
    out.msg_control = control;
    out.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* rights = CMSG_FIRSTHDR(&out);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
  }
  for (std::size_t left = header.size; left != 0;) {
    if (monotonic_ns() > deadline_) return broken(EAGAIN);
    const ssize_t sent = sendmsg(socket_.get(), &out, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return broken(errno);
    left -= static_cast<std::size_t>(sent);
    out.msg_control = nullptr;  // they went with the first byte
    out.msg_controllen = 0;
    for (auto gone = static_cast<std::size_t>(sent); gone != 0;) {
      iovec& part = *out.msg_iov;
      const std::size_t step = std::min(gone, part.iov_len);
      part.iov_base = static_cast<std::byte*>(part.iov_base) + step;
      part.iov_len -= step;
      gone -= step;
      if (part.iov_len == 0 && gone != 0) {
        ++out.msg_iov;
        --out.msg_iovlen;
      }
    }
  }
  return 0;
}

int VfioUserConnection::receive(std::span<std::byte> out) {
  while (!out.empty()) {
    // Each part comes within the socket's own limit, and all of them together within ours.
    if (monotonic_ns() > deadline_) return broken(EAGAIN);
    const ssize_t got = recv(socket_.get(), out.data(), out.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return broken(got == 0 ? ECONNRESET : errno);
    out = out.subspan(static_cast<std::size_t>(got));
  }
  return 0;
}

int VfioUserConnection::skip(std::size_t bytes) {
  std::byte scratch[512];
  while (bytes != 0) {
    const std::size_t step = std::min(bytes, sizeof scratch);
    if (const int code = receive({scratch, step}); code != 0) return code;
    bytes -= step;
  }
  return 0;
}

/// The header of the reply to the last command, and the descriptors that came with it.
int VfioUserConnection::receive_header(Message message, Header& header, std::vector<Descriptor>* descriptors) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMostDescriptors)];
  iovec part{&header, sizeof header};
  msghdr in{};
  in.msg_iov = &part;
  in.msg_iovlen = 1;
  in.msg_control = control;
  in.msg_controllen = sizeof control;
  ssize_t got;
  do {
    got = recvmsg(socket_.get(), &in, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got <= 0) return broken(got == 0 ? ECONNRESET : errno);
  for (cmsghdr* c = CMSG_FIRSTHDR(&in); c != nullptr; c = CMSG_NXTHDR(&in, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
      int number;
      std::memcpy(&number, CMSG_DATA(c) + i * sizeof(int), sizeof number);
      Descriptor owned(number);
      if (descriptors != nullptr) descriptors->push_back(std::move(owned));
    }
  }
  const auto missing = std::as_writable_bytes(std::span(&header, 1)).subspan(static_cast<std::size_t>(got));
  if (const int code = receive(missing); code != 0) return code;
  const bool ours = header.id == id_ && (header.flags & vfio_user::kTypeMask) == vfio_user::kTypeReply &&
                    header.command == static_cast<std::uint16_t>(message);
  // A server that needs us to move data for it does not map our memory, which each mapping offers.
  if (ours && header.size >= sizeof header && header.size <= kMostPayload) return 0;
  return broken(EPROTO);
}

VfioUserConnection::Reply VfioUserConnection::call(Message message, std::span<const std::byte> payload,
                                                   std::span<const int> descriptors) {
  std::lock_guard guard(lock_);
  Reply reply;
  Header header{};
  if (reply.error = send(message, payload, {}, descriptors); reply.error != 0) return reply;
  if (reply.error = receive_header(message, header, &reply.descriptors); reply.error != 0) return reply;
  reply.payload.resize(header.size - sizeof header);
  if (reply.error = receive(reply.payload); reply.error != 0) return reply;
  if ((header.flags & vfio_user::kFlagError) != 0) {
    reply.error = header.error != 0 ? static_cast<int>(header.error) : EIO;
  }
  return reply;
}

int VfioUserConnection::call_into(Message message, std::span<const std::byte> head, std::span<const std::byte> body,
                                  std::span<std::byte> reply) {
  std::lock_guard guard(lock_);
  Header header{};
  if (const int code = send(message, head, body, {}); code != 0) return code;
  if (const int code = receive_header(message, header, nullptr); code != 0) return code;
  const std::size_t size = header.size - sizeof header;
  if ((header.flags & vfio_user::kFlagError) != 0 || size != reply.size()) {
    if (const int code = skip(size); code != 0) return code;
    return header.error != 0 ? static_cast<int>(header.error) : EPROTO;
  }
  return receive(reply);
}

}  // namespace ugds::device
