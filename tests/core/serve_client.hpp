// SPDX-License-Identifier: Apache-2.0
//
// A client of a served controller, as small as can be: messages, and one queue pair in memory that both sides map.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "base/descriptor.hpp"
#include "base/error.hpp"
#include "nvme/commands.hpp"
#include "nvme/entries.hpp"
#include "nvme/registers.hpp"
#include "serve/server.hpp"
#include "vfio_user/protocol.hpp"

namespace serve_test {

using namespace ugds;
using namespace ugds::vfio_user;
using nvme::CompletionEntry;
using nvme::CompletionWord;
using nvme::Register;
using nvme::SubmissionEntry;
using serve::Server;

constexpr std::uint64_t kPage = 4096;

/// A folder that goes with the test.
struct Folder {
  Folder() {
    char name[] = "/tmp/ugds-serve-XXXXXX";
    REQUIRE(mkdtemp(name) != nullptr);
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string at(const std::string& name) const { return path + "/" + name; }
  std::string path;
};

/// Memory with a descriptor.
struct Shared {
  explicit Shared(std::uint64_t bytes, unsigned flags = MFD_ALLOW_SEALING)
      : file(memfd_create("client", MFD_CLOEXEC | flags)), size(bytes) {
    REQUIRE(ftruncate(file.get(), static_cast<off_t>(bytes)) == 0);
    at = static_cast<std::byte*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0));
    REQUIRE(static_cast<void*>(at) != MAP_FAILED);
  }
  ~Shared() { munmap(at, size); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  Descriptor file;
  std::uint64_t size;
  std::byte* at;
};

class Client {
 public:
  explicit Client(const std::string& path) : socket_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    REQUIRE(path.size() < sizeof address.sun_path);
    std::memcpy(address.sun_path, path.c_str(), path.size());
    REQUIRE(connect(socket_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
    const timeval limit{20, 0};
    setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }

  int socket() const { return socket_.get(); }

  /// False where the connection has ended.
  bool send(const void* bytes, std::size_t size, const std::vector<int>& files = {}, int flags = 0) {
    iovec part{const_cast<void*>(bytes), size};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    std::vector<char> control(CMSG_SPACE(files.size() * sizeof(int)));
    if (!files.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(files.size() * sizeof(int));
      std::memcpy(CMSG_DATA(header), files.data(), files.size() * sizeof(int));
    }
    return sendmsg(socket_.get(), &message, MSG_NOSIGNAL | flags) == static_cast<ssize_t>(size);
  }

  /// The errno of the reply; 0: it is in `payload` and `file`. -1: the connection has ended.
  int call(Message command, const void* request, std::size_t size, const std::vector<int>& files = {}) {
    std::vector<std::byte> message(sizeof(Header) + size);
    const Header header{++id_, static_cast<std::uint16_t>(command), static_cast<std::uint32_t>(message.size()), 0, 0};
    std::memcpy(message.data(), &header, sizeof header);
    if (size != 0) std::memcpy(message.data() + sizeof header, request, size);
    if (!send(message.data(), message.size(), files)) return -1;
    return receive();
  }
  template <class Structure>
  int call(Message command, const Structure& request, const std::vector<int>& files = {}) {
    return call(command, &request, sizeof request, files);
  }

  int receive() {
    Header header{};
    if (!take(&header, sizeof header)) return -1;
    CHECK(header.size >= sizeof header);
    CHECK((header.flags & kTypeMask) == kTypeReply);
    payload.resize(header.size - sizeof header);
    if (!take(payload.data(), payload.size())) return -1;
    return (header.flags & kFlagError) != 0 ? static_cast<int>(header.error) : 0;
  }

  int negotiate() { return call(Message::version, Version{kMajor, kMinor}); }
  int map(const Shared& memory, std::uint64_t iova) {
    return call(Message::dma_map, DmaMap{sizeof(DmaMap), 3, 0, iova, memory.size}, {memory.file.get()});
  }
  int set_irq(std::uint32_t vector, int event) {
    return call(Message::device_set_irqs,
                IrqSet{sizeof(IrqSet), kIrqDataEventfd | kIrqActionTrigger, kIrqMsix, vector, 1}, {event});
  }
  std::uint64_t read(std::uint32_t region, std::uint64_t offset, std::uint32_t width) {
    REQUIRE(call(Message::region_read, RegionAccess{offset, region, width}) == 0);
    std::uint64_t value = 0;
    std::memcpy(&value, payload.data() + sizeof(RegionAccess), width);
    return value;
  }
  void write(std::uint32_t region, std::uint64_t offset, std::uint64_t value, std::uint32_t width) {
    struct {
      RegionAccess access;
      std::uint64_t value;
    } request{{offset, region, width}, value};
    REQUIRE(call(Message::region_write, &request, sizeof request.access + width) == 0);
  }
  std::uint32_t read(Register r) {
    return static_cast<std::uint32_t>(read(kRegionBar0, static_cast<std::uint64_t>(r), 4));
  }
  void write(Register r, std::uint64_t value, std::uint32_t width) {
    write(kRegionBar0, static_cast<std::uint64_t>(r), value, width);
  }

  std::vector<std::byte> payload;
  Descriptor file;

 private:
  bool take(void* to, std::size_t size) {
    auto* at = static_cast<char*>(to);
    while (size != 0) {
      iovec part{at, size};
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
      msghdr message{};
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      const ssize_t got = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC);
      if (got <= 0) return false;
      if (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr && header->cmsg_type == SCM_RIGHTS) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
        file = Descriptor(fd);
      }
      at += got;
      size -= static_cast<std::size_t>(got);
    }
    return true;
  }

  Descriptor socket_;
  std::uint16_t id_ = 0;
};

/// Brought up, with queue pair 1 of 16 entries and interrupts on `vector`. Its memory is at kBase: four pages of rings,
/// and 16 pages of data from kData on.
class Drive {
 public:
  static constexpr std::uint64_t kBase = 0x7f00'0000'0000, kData = 4 * kPage;
  static constexpr std::uint32_t kDepth = 16;

  explicit Drive(const std::string& path, std::uint16_t vector = 1) : client(path), memory(20 * kPage) {
    REQUIRE(client.negotiate() == 0);
    REQUIRE(client.map(memory, kBase) == 0);
    REQUIRE(client.call(Message::device_get_region_info, RegionInfo{256, 0, kRegionBar0, 0, 0, 0}) == 0);
    REQUIRE(static_cast<bool>(client.file));
    doorbells = static_cast<std::uint32_t*>(
        mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, client.file.get(), nvme::kDoorbellBase));
    REQUIRE(static_cast<void*>(doorbells) != MAP_FAILED);
    client.write(Register::aqa, nvme::AdminQueueAttributes::make(kDepth, kDepth).raw, 4);
    client.write(Register::asq, kBase, 8);
    client.write(Register::acq, kBase + kPage, 8);
    client.write(Register::cc, nvme::Configuration::make(kPage).with_enabled(true).raw, 4);
    while ((client.read(Register::csts) & 1) == 0) std::this_thread::yield();
    REQUIRE(run(0, nvme::create_completion_queue(1, kDepth, Iova(kBase + 3 * kPage), true, vector)) == 0);
    REQUIRE(run(0, nvme::create_submission_queue(1, kDepth, Iova(kBase + 2 * kPage), 1)) == 0);
  }
  ~Drive() { munmap(doorbells, kPage); }
  Drive(const Drive&) = delete;
  Drive& operator=(const Drive&) = delete;

  void submit(int queue, SubmissionEntry entry) {
    Ring& ring = rings[queue];
    entry.cid = static_cast<std::uint16_t>(ring.tail);
    reinterpret_cast<SubmissionEntry*>(memory.at + 2 * queue * kPage)[ring.tail] = entry;
    ring.tail = (ring.tail + 1) % kDepth;
    store(2 * queue, ring.tail);
  }
  /// The status of the next completion; -1 where there is none.
  int poll(int queue) {
    Ring& ring = rings[queue];
    CompletionEntry& entry = reinterpret_cast<CompletionEntry*>(memory.at + (2 * queue + 1) * kPage)[ring.head];
    const CompletionWord word{std::atomic_ref<std::uint32_t>(entry.last).load(std::memory_order_acquire)};
    if (word.phase() != ring.phase) return -1;
    ring.head = (ring.head + 1) % kDepth;
    if (ring.head == 0) ring.phase = !ring.phase;
    store(2 * queue + 1, ring.head);
    return word.status();
  }
  int run(int queue, const SubmissionEntry& entry) {
    submit(queue, entry);
    const std::uint64_t end = monotonic_ns() + 20'000'000'000;
    for (;;) {
      const int status = poll(queue);
      if (status >= 0) return status;
      REQUIRE(monotonic_ns() < end);
      std::this_thread::yield();
    }
  }
  static SubmissionEntry transfer(nvme::Opcode opcode, std::uint64_t lba, std::uint64_t iova = kBase + kData) {
    SubmissionEntry e = nvme::block_command(opcode, 1, Lba(lba), 1);
    e.prp1 = iova;
    return e;
  }
  void store(int index, std::uint32_t value) const {
    std::atomic_ref<std::uint32_t>(doorbells[index]).store(value, std::memory_order_release);
  }

  Client client;
  Shared memory;
  std::uint32_t* doorbells = nullptr;
  struct Ring {
    std::uint32_t tail = 0, head = 0;
    bool phase = true;
  } rings[2];
};

/// Waits until the server has seen its client go.
inline void await_idle(const Server& server) {
  const std::uint64_t end = monotonic_ns() + 20'000'000'000;
  while (server.connected()) {
    REQUIRE(monotonic_ns() < end);
    std::this_thread::yield();
  }
}

inline std::size_t open_files() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

}  // namespace serve_test
