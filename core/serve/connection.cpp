// SPDX-License-Identifier: Apache-2.0
#include "serve/connection.hpp"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace ugds::serve {

using vfio_user::Header;

namespace {

/// SCM_MAX_FD: what one message can carry at all.
constexpr std::size_t kMostFiles = 253;
constexpr std::size_t kLargest = sizeof(Header) + sizeof(vfio_user::RegionAccess) + vfio_user::kDefaultMaxTransfer;

}  // namespace

void Reply::append(const void* bytes, std::size_t size) {
  const std::size_t before = payload.size();
  payload.resize(before + size);
  std::memcpy(payload.data() + before, bytes, size);
}

Connection::Progress Connection::receive() {
  if (complete_) {
    complete_ = false;
    have_ = 0;
    request_.payload.clear();
    request_.files.clear();
    request_.files_lost = false;
  }
  while (have_ < sizeof(Header)) {
    const Progress progress = read_some(reinterpret_cast<std::byte*>(&request_.header) + have_, sizeof(Header) - have_);
    if (progress != Progress::message) return progress;
  }
  const Header& header = request_.header;
  if (header.size < sizeof(Header) || (header.flags & vfio_user::kTypeMask) != vfio_user::kTypeCommand)
    return Progress::malformed;
  if (header.size > kLargest) return Progress::too_large;
  request_.payload.resize(header.size - sizeof(Header));
  while (have_ < header.size) {
    const std::size_t done = have_ - sizeof(Header);
    const Progress progress = read_some(request_.payload.data() + done, request_.payload.size() - done);
    if (progress != Progress::message) return progress;
  }
  complete_ = true;
  return Progress::message;
}

Connection::Progress Connection::read_some(std::byte* to, std::size_t bytes) {
  iovec part{to, bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostFiles * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t got = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN || errno == EINTR ? Progress::waiting : Progress::closed;
  take_files(&message);
  if (got == 0) return Progress::closed;
  have_ += static_cast<std::size_t>(got);
  return Progress::message;
}

void Connection::take_files(const void* received) {
  auto* message = static_cast<msghdr*>(const_cast<void*>(received));
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part != nullptr; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
      Descriptor file(fd);
      // One message may be sent in pieces, each with as many as one can carry.
      if (request_.files.size() < kMostFiles) {
        request_.files.push_back(std::move(file));
      } else {
        request_.files_lost = true;
      }
    }
  }
  if ((message->msg_flags & MSG_CTRUNC) != 0) request_.files_lost = true;
}

void Connection::reply(const Reply& reply) { queue(vfio_user::kTypeReply, 0, reply.payload, reply.file); }

void Connection::reply_error(int code) {
  queue(vfio_user::kTypeReply | vfio_user::kFlagError, static_cast<std::uint32_t>(code), {}, -1);
}

void Connection::queue(std::uint32_t flags, std::uint32_t error, std::span<const std::byte> payload, int file) {
  if ((request_.header.flags & vfio_user::kNoReply) != 0) return;
  const Header header{request_.header.id, request_.header.command,
                      static_cast<std::uint32_t>(sizeof(Header) + payload.size()), flags, error};
  out_.resize(header.size);
  std::memcpy(out_.data(), &header, sizeof header);
  if (!payload.empty()) std::memcpy(out_.data() + sizeof header, payload.data(), payload.size());
  sent_ = 0;
  out_file_ = file;
}

Connection::Progress Connection::flush() {
  while (sending()) {
    iovec part{out_.data() + sent_, out_.size() - sent_};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (out_file_ >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(header), &out_file_, sizeof out_file_);
    }
    const ssize_t done = sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno == EAGAIN ? Progress::waiting : Progress::closed;
    sent_ += static_cast<std::size_t>(done);
    out_file_ = -1;
  }
  return Progress::message;
}

}  // namespace ugds::serve
