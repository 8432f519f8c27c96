// SPDX-License-Identifier: Apache-2.0
//
// The client's side against a server that answers anything: a device that opens, or an error that says why not; no
// memory of ours beyond what was asked for is written; descriptors that a server sends are closed.
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "device/vfio_user.hpp"
#include "fuzz.hpp"
#include "nvme/registers.hpp"

namespace ugds::fuzz {

namespace {

using vfio_user::Header;
using vfio_user::Message;

/// Where the server listens: one socket for all inputs.
struct Place {
  Place() {
    char folder[] = "/tmp/ugds-fuzz-XXXXXX";
    demand(mkdtemp(folder) != nullptr, "a folder for the socket");
    path = std::string(folder) + "/s";
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size());
    listener = Descriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    demand(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
               listen(listener.get(), 8) == 0,
           "a socket");
  }
  ~Place() {
    unlink(path.c_str());
    rmdir(path.substr(0, path.size() - 2).c_str());
  }
  std::string path;
  Descriptor listener;
};

/// Answers as a correct server would, but for what the input says; and ends the connection when that is used up.
class Server {
 public:
  Server(int listener, int stop, Input input) : listener_(listener), stop_(stop), input_(input) {}

  /// Whoever comes a second time is turned away.
  void run() {
    for (bool first = true;; first = false) {
      pollfd looks[] = {{listener_, POLLIN, 0}, {stop_, POLLIN, 0}};
      if (poll(looks, 2, -1) > 0 && looks[1].revents != 0) return;
      const Descriptor connection(accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC));
      while (first && answer(connection.get())) continue;
    }
  }

 private:
  static bool receive(int connection, void* to, std::size_t bytes) {
    auto* at = static_cast<char*>(to);
    while (bytes != 0) {
      const ssize_t got = recv(connection, at, bytes, 0);
      if (got <= 0) return false;
      at += got;
      bytes -= static_cast<std::size_t>(got);
    }
    return true;
  }

  bool answer(int connection) {
    Header header;
    if (!receive(connection, &header, sizeof header)) return false;
    std::vector<std::uint8_t> payload(header.size - sizeof header);
    if (!receive(connection, payload.data(), payload.size())) return false;
    std::vector<std::uint8_t> reply = honest(static_cast<Message>(header.command), payload);
    Header out{header.id, header.command, 0, vfio_user::kTypeReply, 0};
    int file = wants_file_ ? doorbells() : -1;
    std::size_t files = file >= 0 ? 1 : 0;
    bool end = false;
    // Up to three changes a reply.
    std::uint8_t changes = input_.byte();
    if (changes > 0xc0)
      changes &= 3;
    else
      changes = changes % 4 == 3 ? 1 : 0;
    std::uint32_t more = 0;
    for (; changes != 0; --changes) {
      switch (input_.byte() % 9) {
        case 0: change(reply); break;
        case 1: reply.resize(input_.value<std::uint16_t>() % 512); break;
        case 2: out.flags |= vfio_user::kFlagError, out.error = input_.byte(); break;
        case 3: out.id ^= input_.byte(); break;
        case 4: out.command ^= input_.byte(); break;
        case 5: out.flags ^= input_.value<std::uint32_t>(); break;
        case 6: more = input_.value<std::uint32_t>(); break;  // says another length than it has, and ends
        case 7: end = true; break;
        default: files = input_.byte() % 17;
      }
    }
    out.size = static_cast<std::uint32_t>(sizeof out + reply.size()) + more;
    std::vector<std::uint8_t> bytes(sizeof out + reply.size());
    std::memcpy(bytes.data(), &out, sizeof out);
    if (!reply.empty()) std::memcpy(bytes.data() + sizeof out, reply.data(), reply.size());
    if (end) bytes.resize(input_.byte() % (bytes.size() + 1));
    if (files != 0 && file < 0) file = open("/dev/null", O_RDWR | O_CLOEXEC);
    const bool sent = send(connection, bytes, file, files);
    if (file >= 0) close(file);
    return sent && !end && more == 0;
  }

  void change(std::vector<std::uint8_t>& reply) {
    const std::size_t at = input_.byte();
    const auto some = input_.bytes(1 + input_.byte() % 8u);
    for (std::size_t i = 0; i < some.size() && at + i < reply.size(); ++i) reply[at + i] ^= some[i];
  }

  static bool send(int connection, const std::vector<std::uint8_t>& bytes, int file, std::size_t files) {
    iovec part{const_cast<std::uint8_t*>(bytes.data()), bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(16 * sizeof(int))] = {};
    if (files != 0) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(files * sizeof(int));
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(files * sizeof(int));
      for (std::size_t i = 0; i < files; ++i) std::memcpy(CMSG_DATA(header) + i * sizeof file, &file, sizeof file);
    }
    return sendmsg(connection, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }

  static int doorbells() {
    const int file = memfd_create("doorbells", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    return file >= 0 && ftruncate(file, 8192) == 0 ? file : -1;
  }

  template <class Structure>
  static void add(std::vector<std::uint8_t>& to, const Structure& structure) {
    const auto* from = reinterpret_cast<const std::uint8_t*>(&structure);
    to.insert(to.end(), from, from + sizeof structure);
  }

  std::vector<std::uint8_t> honest(Message message, const std::vector<std::uint8_t>& asked) {
    std::vector<std::uint8_t> reply;
    wants_file_ = false;
    switch (message) {
      case Message::version: {
        add(reply, vfio_user::Version{0, 1});
        const char text[] = "{\"capabilities\":{\"max_msg_fds\":8}}";
        add(reply, text);
        break;
      }
      case Message::device_get_info: add(reply, vfio_user::DeviceInfo{16, 3, 9, 5}); break;
      case Message::device_get_region_info:
        wants_file_ = true;
        add(reply, vfio_user::RegionInfo{64, 15, 0, 32, 8192, 0});
        add(reply, vfio_user::SparseMmap{{1, 1, 0}, 1, 0});
        add(reply, vfio_user::SparseArea{4096, 4096});
        break;
      case Message::device_get_irq_info: add(reply, vfio_user::IrqInfo{16, 1, 2, 3}); break;
      case Message::region_read: {
        vfio_user::RegionAccess access{};
        std::memcpy(&access, asked.data(), std::min(sizeof access, asked.size()));
        add(reply, access);
        std::array<std::uint8_t, 256> config{};
        config[6] = 0x10, config[8] = 1, config[9] = 2, config[10] = 8, config[11] = 1, config[0x34] = 0x40;
        config[0x40] = 0x11;
        for (std::uint32_t i = 0; i < access.count && i < 64; ++i)
          reply.push_back(access.region == 7 && access.offset + i < 256 ? config[access.offset + i] : 0);
        break;
      }
      case Message::region_write:
        reply.assign(asked.begin(), asked.begin() + std::min<std::ptrdiff_t>(16, std::ssize(asked)));
        break;
      case Message::dma_unmap: reply = asked; break;
      default: break;
    }
    return reply;
  }

  int listener_, stop_;
  Input input_;
  bool wants_file_ = false;
};

std::size_t open_descriptors() {
  std::size_t count = 0;
  for (int i = 0; i < 256; ++i) count += fcntl(i, F_GETFD) >= 0;
  return count;
}

void use(const std::string& path) {
  device::VfioUserDevice device("vfio-user:" + path, parse_uri("vfio-user:" + path));
  device::DmaMemory memory(device, Bytes(8192), true);
  static_cast<void>(device.read32(static_cast<std::uint32_t>(nvme::Register::csts)));
  static_cast<void>(device.read64(static_cast<std::uint32_t>(nvme::Register::cap)));
  device.write32(static_cast<std::uint32_t>(nvme::Register::cc), 1);
  for (const std::uint32_t offset : {0x1000u, 0x1004u, 0x1ffcu, 0x2000u, 0x7ffcu}) {
    if (std::uint32_t* word = device.doorbell(offset); word != nullptr) *word = 1;
  }
  const int events[] = {0, -1, 1};
  device.set_interrupts(std::span(events).first(std::min<std::size_t>(3, device.limits().interrupt_vectors)));
  static_cast<void>(device.reset());
}

void run(Input& input) {
  static const Place place;
  static const Descriptor stop(eventfd(0, EFD_CLOEXEC));
  const std::size_t before = open_descriptors();
  std::thread server([&] { Server(place.listener.get(), stop.get(), input).run(); });
  const QuickTime quick;  // a server that refuses is asked again for a second, which nobody waits here
  try {
    use(place.path);
  } catch (const Failure& failure) {
    demand(failure.error().code > 0 && failure.error().cause[0] != '\0', "a refusal has a code and a cause");
  }
  std::uint64_t count = 1;
  demand(write(stop.get(), &count, sizeof count) == sizeof count, "the server is told to stop");
  server.join();
  demand(read(stop.get(), &count, sizeof count) == sizeof count, "and was");
  demand(open_descriptors() == before, "every descriptor that came is closed");
}

const Target target("vfio_user_client", run);

}  // namespace

}  // namespace ugds::fuzz
