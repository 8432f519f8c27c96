// SPDX-License-Identifier: Apache-2.0
#include "base/error.hpp"
#include "file/io.hpp"

#ifndef UGDS_URING

std::unique_ptr<ugds::file::Io> ugds::file::make_uring(std::uint32_t) {
  fail(ENOSYS, "open", "the library was built without liburing", "build it where liburing-dev is installed");
}

#else

#include <fcntl.h>
#include <liburing.h>
#include <linux/falloc.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>

#include "base/steps.hpp"

namespace ugds::file {

namespace {

/// What goes through the page cache is copied by the processor, in the kernel: from this size on by its own threads, so
/// that the parts of a large request are copied side by side.
constexpr std::uint64_t kWorthAThread = 256 * 1024;
constexpr unsigned kMostEntries = 1024;

class Uring final : public Io {
 public:
  explicit Uring(std::uint32_t depth) {
    setup_step("file: io_uring");
    const unsigned entries = std::clamp(std::bit_ceil(depth), 8u, kMostEntries);
    io_uring_params parameters{};
    // Room for the parts of every request at once; the kernel keeps what does not fit all the same.
    parameters.flags = IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP;
    parameters.cq_entries = entries * 4;
    if (const int code = io_uring_queue_init_params(entries, &ring_, &parameters); code < 0) {
      ugds::fail(-code, "open", std::string("io_uring is not to be had: ") + std::strerror(-code),
                 "allow it (kernel.io_uring_disabled, the container's seccomp profile), or use io=threads");
    }
    io_uring_ring_dontfork(&ring_);
    spreads_ = ::sysconf(_SC_NPROCESSORS_ONLN) > 2;
  }
  ~Uring() override { io_uring_queue_exit(&ring_); }
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;

  const char* name() const override { return "io_uring"; }

  void give(Part& part) noexcept override {
    io_uring_sqe* const sqe = entry();
    const Request& r = *part.request;
    const File& file = *r.file;
    const int descriptor = part.way != Part::Way::buffered || file.buffered() < 0 ? direct_of(file) : file.buffered();
    std::byte* const memory = part.memory + part.done;
    const std::uint64_t offset = part.offset + part.done;
    const auto bytes = static_cast<unsigned>(part.bytes - part.done);
    switch (r.kind) {
      case Kind::read: io_uring_prep_read(sqe, descriptor, memory, bytes, offset); break;
      case Kind::write:
        io_uring_prep_write(sqe, descriptor, memory, bytes, offset);
        if (r.durable) sqe->rw_flags = RWF_DSYNC;
        break;
      case Kind::flush: io_uring_prep_fsync(sqe, descriptor, IORING_FSYNC_DATASYNC); break;
      case Kind::discard:
        io_uring_prep_fallocate(sqe, descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                static_cast<off_t>(part.offset), static_cast<off_t>(part.bytes));
        break;
    }
    if (spreads_ && part.way == Part::Way::buffered && bytes >= kWorthAThread) sqe->flags |= IOSQE_ASYNC;
    io_uring_sqe_set_data(sqe, &part);
  }

  void push() noexcept override {
    // What the kernel has no memory for now stays in the ring, and goes with the next push; `take` sees to that.
    while (io_uring_sq_ready(&ring_) != 0) {
      const int given = io_uring_submit(&ring_);
      if (given == -EINTR) continue;
      if (given <= 0) break;
    }
    left_.store(io_uring_sq_ready(&ring_) != 0, std::memory_order_release);
  }

  Part* take() noexcept override {
    io_uring_cqe* cqe = nullptr;
    for (;;) {
      if (io_uring_sq_ready(&ring_) != 0) [[unlikely]]
        push();
      if (io_uring_cq_has_overflow(&ring_)) [[unlikely]]
        io_uring_get_events(&ring_);
      if (io_uring_peek_cqe(&ring_, &cqe) != 0 || cqe == nullptr) return nullptr;
      auto* const part = static_cast<Part*>(io_uring_cqe_get_data(cqe));
      if (part != nullptr) part->result = cqe->res;
      io_uring_cqe_seen(&ring_, cqe);
      if (part != nullptr) return part;  // else it answers a cancellation
    }
  }

  bool has_any() const noexcept override {
    // Not by liburing, which reads as the ring's owner does.
    const auto load = [](unsigned* word) { return std::atomic_ref(*word).load(std::memory_order_acquire); };
    return load(ring_.cq.ktail) != load(ring_.cq.khead) || left_.load(std::memory_order_acquire) ||
           (load(ring_.sq.kflags) & IORING_SQ_CQ_OVERFLOW) != 0;
  }

  void cancel(Part& part) noexcept override {
    io_uring_sqe* const sqe = entry();
    io_uring_prep_cancel64(sqe, reinterpret_cast<std::uintptr_t>(&part), 0);
    io_uring_sqe_set_data(sqe, nullptr);
  }

  void tell(int eventfd) override {
    const int code = eventfd < 0 ? io_uring_unregister_eventfd(&ring_) : io_uring_register_eventfd(&ring_, eventfd);
    if (code < 0 && eventfd >= 0)
      ugds::fail(-code, "open", std::string("io_uring tells no eventfd: ") + std::strerror(-code));
  }

 private:
  static int direct_of(const File& file) { return file.direct() >= 0 ? file.direct() : file.buffered(); }

  /// The next entry; where all are taken, the kernel is told of them first.
  io_uring_sqe* entry() noexcept {
    for (;;) {
      if (io_uring_sqe* const sqe = io_uring_get_sqe(&ring_)) return sqe;
      io_uring_submit(&ring_);
    }
  }

  io_uring ring_{};
  std::atomic<bool> left_{false};  ///< whether the kernel has not taken all that was given
  bool spreads_ = false;
};

}  // namespace

std::unique_ptr<Io> make_uring(std::uint32_t depth) { return std::make_unique<Uring>(depth); }

}  // namespace ugds::file

#endif
