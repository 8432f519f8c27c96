// SPDX-License-Identifier: Apache-2.0
#include "file/dmabuf.hpp"

#include <cerrno>
#include <cstring>

#ifndef UGDS_URING

ugds::file::dmabuf::Answer ugds::file::dmabuf::probe() noexcept {
  return {false, "the library was built without liburing"};
}

#else

#include <liburing.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ugds::file::dmabuf {

namespace {

int set_slot(const io_uring& ring, const Description& description) {
  const Update asked = update(0, description);
  const long result = ::syscall(SYS_io_uring_register, ring.ring_fd, kUpdateBuffers, &asked, sizeof asked);
  return result < 0 ? -errno : static_cast<int>(result);
}

Answer ask(io_uring& ring) {
  if (const int code = io_uring_register_buffers_sparse(&ring, 1); code != 0)
    return {false, std::string("the kernel has no table of buffers: ") + std::strerror(-code)};
  // Emptying an empty slot: nothing else happens, and only who knows the flag says that it was done.
  if (const int code = set_slot(ring, Description{}); code != 1)
    return {false, std::string("the kernel does not know descriptions of buffers: ") + std::strerror(-code)};
  // No descriptor of a file is open by this number: who knows the type looks for it, and says EBADF.
  const int code = set_slot(ring, describe(-1, -1));
  if (code == -EBADF) return {true, "the kernel knows DMA-BUFs; no route of this machine is shown to be right by that"};
  return {false, std::string("the kernel knows descriptions of buffers, and no DMA-BUFs: ") + std::strerror(-code)};
}

}  // namespace

Answer probe() noexcept try {
  io_uring ring{};
  if (const int code = io_uring_queue_init(4, &ring, 0); code != 0)
    return {false, std::string("io_uring is not to be had: ") + std::strerror(-code)};
  Answer answer = ask(ring);
  io_uring_queue_exit(&ring);
  return answer;
} catch (const std::exception&) {
  return {};
}

}  // namespace ugds::file::dmabuf

#endif
