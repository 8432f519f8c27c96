// SPDX-License-Identifier: Apache-2.0
//
// A server's session with a client that sends anything: whole messages of every kind with made-up fields and
// descriptors, and bytes that are no messages. Each message is answered at most once, by a reply to it or an error; the
// controller reaches no memory but what the client has mapped; and nothing is left of a client that has gone.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <vector>

#include "base/error.hpp"
#include "fuzz.hpp"
#include "serve/connection.hpp"
#include "serve/session.hpp"

namespace ugds::fuzz {

namespace {

using serve::Connection;
using vfio_user::Header;
using vfio_user::Message;

emulator::Controller& controller() {
  static emulator::Options options = [] {
    emulator::Options o;
    o.size = 1 << 20;
    o.lba = 512;
    o.queues = 2;
    o.depth = 16;
    o.pump_by_caller = true;
    o.virtual_clock = true;
    return o;
  }();
  static emulator::Controller* made = new emulator::Controller(options);  // NOLINT: for all inputs
  return *made;
}

class Run {
 public:
  explicit Run(Input& input) : input_(input), wake_(eventfd(0, EFD_NONBLOCK)) {
    int ends[2];
    demand(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0, "a pair of sockets");
    client_ = Descriptor(ends[0]);
    session_ = std::make_unique<serve::Session>(controller(), wake_.get());
    connection_ = std::make_unique<Connection>(Descriptor(ends[1]));
  }
  ~Run() {
    session_.reset();
    demand(controller().counters().mapped_ranges == 0, "nothing of a client that has gone is mapped");
    controller().clear_violations();
  }

  void go() {
    if (input_.byte() % 8 != 7) say(Message::version, std::array<std::uint8_t, 5>{0, 0, 1, 0, 0}, 0);
    for (unsigned i = 0; i < 64 && !input_.empty() && !ended_; ++i) step();
  }

 private:
  void step() {
    const std::uint8_t kind = input_.byte() % 12;
    switch (kind) {
      case 0: return write_register();
      case 1: return read_region();
      case 2: return map();
      case 3: return unmap();
      case 4: return write_memory();
      case 5: return say(Message::device_reset, {}, 0);
      case 6: return ask(Message::device_get_region_info, 32);
      case 7: return interrupts();
      case 8: return ask(input_.byte() % 2 == 0 ? Message::device_get_info : Message::device_get_irq_info, 16);
      case 9: {  // any message
        const auto message = static_cast<Message>(input_.value<std::uint16_t>());
        const auto files = input_.byte();
        return say(message, input_.bytes(input_.byte()), files);
      }
      case 10: {  // no message
        const auto some = input_.bytes(input_.byte());
        return send(some, 0);
      }
      default:
        for (unsigned turns = 1 + input_.byte() % 4u; turns != 0; --turns) emulator::Controller::turn(&controller());
    }
  }

  template <class Structure>
  void say(Message message, const Structure& structure, std::span<const std::uint8_t> more, std::uint8_t files) {
    std::vector<std::uint8_t> payload(sizeof structure + more.size());
    std::memcpy(payload.data(), &structure, sizeof structure);
    if (!more.empty()) std::memcpy(payload.data() + sizeof structure, more.data(), more.size());
    say(message, payload, files);
  }
  void say(Message message, std::span<const std::uint8_t> payload, std::uint8_t files) {
    const Header header{++id_, static_cast<std::uint16_t>(message),
                        static_cast<std::uint32_t>(sizeof(Header) + payload.size()), 0, 0};
    std::vector<std::uint8_t> bytes(sizeof header + payload.size());
    std::memcpy(bytes.data(), &header, sizeof header);
    if (!payload.empty()) std::memcpy(bytes.data() + sizeof header, payload.data(), payload.size());
    send(bytes, files);
  }

  /// Registers by the offsets that there are, mostly, and doorbells.
  void write_register() {
    static constexpr std::uint32_t kPlaces[] = {0x14, 0x24, 0x28, 0x30, 0x1000, 0x1004, 0x1008, 0x100c, 0x0c, 0x20};
    const std::uint8_t which = input_.byte();
    const std::uint64_t offset = which < 10 ? kPlaces[which] : input_.value<std::uint16_t>();
    const std::uint32_t region = which < 10 ? 0u : input_.byte() % 10u;
    const auto value = input_.value<std::array<std::uint8_t, 8>>();
    const std::uint32_t count = which < 10 ? (which == 2 || which == 3 ? 8 : 4) : input_.byte() % 9u;
    say(Message::region_write, vfio_user::RegionAccess{offset, region, count}, std::span(value).first(count), 0);
  }
  void read_region() {
    const vfio_user::RegionAccess access{input_.value<std::uint16_t>(), input_.byte() % 10u, input_.byte()};
    say(Message::region_read, access, {}, 0);
  }
  void map() {
    const std::uint8_t how = input_.byte();
    vfio_user::DmaMap map{sizeof map, 3, 0, std::uint64_t{input_.byte()} << 12, std::uint64_t{4096} << how % 4};
    if ((how & 0x80) != 0) map.flags = input_.byte();
    if ((how & 0x40) != 0) map.offset = input_.value<std::uint64_t>();
    if ((how & 0x20) != 0) map.iova = input_.value<std::uint64_t>();
    if ((how & 0x10) != 0) map.size = input_.value<std::uint64_t>();
    say(Message::dma_map, map, {}, (how & 0x08) != 0 ? input_.byte() : 1);
  }
  void unmap() {
    const std::uint8_t how = input_.byte();
    vfio_user::DmaUnmap unmap{sizeof unmap, 0, std::uint64_t{input_.byte()} << 12, std::uint64_t{4096} << how % 4};
    if ((how & 0x80) != 0) unmap.flags = input_.byte();
    if ((how & 0x10) != 0) unmap.size = input_.value<std::uint64_t>();
    say(Message::dma_unmap, unmap, {}, 0);
  }
  void interrupts() {
    vfio_user::IrqSet set{sizeof set, 0x24, 2, 0, 1};
    const std::uint8_t how = input_.byte();
    if ((how & 0x80) != 0) set.flags = input_.byte();
    if ((how & 0x40) != 0) set.index = input_.byte() % 8;
    if ((how & 0x20) != 0) set.start = input_.value<std::uint32_t>();
    if ((how & 0x10) != 0) set.count = input_.value<std::uint32_t>();
    const auto more = input_.bytes((how & 8) != 0 ? input_.byte() : 0);
    say(Message::device_set_irqs, set, more, (how & 4) != 0 ? input_.byte() : 2);
  }
  void ask(Message message, std::uint32_t size) {
    std::array<std::uint8_t, 32> payload{};
    std::memcpy(payload.data(), &size, sizeof size);
    const std::uint8_t how = input_.byte();
    payload[8] = how % 10;
    if ((how & 0x80) != 0) payload[0] = input_.byte();
    if ((how & 0x40) != 0) payload[1] = input_.byte();
    say(message, std::span(payload).first(size), 0);
  }
  /// Entries into what was mapped: of queues, and lists.
  void write_memory() {
    if (memory_ == nullptr) return;
    const std::size_t at = input_.value<std::uint16_t>() % (kMemory - 64);
    const auto some = input_.bytes(1 + input_.byte() % 64u);
    if (!some.empty()) std::memcpy(memory_ + at, some.data(), some.size());
  }

  /// 0: none; 1: memory; 2: an eventfd; others: what should not be sent, or several.
  std::vector<Descriptor> files(std::uint8_t what) {
    std::vector<Descriptor> made;
    if (what == 1) {
      made.emplace_back(memory());
    } else if (what == 2) {
      made.emplace_back(eventfd(0, EFD_NONBLOCK));
    } else if (what != 0) {
      for (int i = 0; i < 1 + what % 12; ++i) {
        made.emplace_back(what % 3 == 0 ? eventfd(0, 0) : what % 3 == 1 ? open("/dev/null", O_RDWR) : memory());
      }
    }
    return made;
  }
  int memory() {
    const int file = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    demand(file >= 0 && ftruncate(file, kMemory) == 0, "memory to send");
    if (memory_ != nullptr) munmap(memory_, kMemory);
    memory_ = static_cast<std::uint8_t*>(mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    return file;
  }

  void send(std::span<const std::uint8_t> bytes, std::uint8_t what) {
    const std::vector<Descriptor> sent = files(what);
    iovec part{const_cast<std::uint8_t*>(bytes.data()), bytes.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(16 * sizeof(int))] = {};
    if (!sent.empty()) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(sent.size() * sizeof(int));
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sent.size() * sizeof(int));
      for (std::size_t i = 0; i < sent.size(); ++i) {
        const int number = sent[i].get();
        std::memcpy(CMSG_DATA(header) + i * sizeof number, &number, sizeof number);
      }
    }
    if (sendmsg(client_.get(), &message, MSG_NOSIGNAL) < 0) return;
    serve();
  }

  /// As serve::Server does it.
  void serve() {
    for (;;) {
      switch (connection_->receive()) {
        case Connection::Progress::waiting: return;
        case Connection::Progress::message: break;
        default: ended_ = true; return;
      }
      const Header asked = connection_->request().header;
      try {
        connection_->reply(session_->handle(connection_->request()));
      } catch (const Failure& failure) {
        demand(failure.error().code > 0, "an error reply has a code");
        connection_->reply_error(failure.error().code);
      }
      if (!session_->negotiated()) ended_ = true;
      const bool answered = connection_->sending();
      static_cast<void>(connection_->flush());
      if (answered) check_reply(asked);
      if (ended_) return;
    }
  }

  void check_reply(const Header& asked) {
    std::array<std::uint8_t, 1 << 16> bytes;
    Header header{};
    ssize_t total = 0, got;
    while ((got = recv(client_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT)) > 0) {
      if (total == 0) std::memcpy(&header, bytes.data(), std::min<std::size_t>(sizeof header, got));
      total += got;
      static_cast<void>(connection_->flush());
    }
    demand(total == static_cast<ssize_t>(header.size) && header.size >= sizeof header, "a reply is as long as it says");
    demand(header.id == asked.id && header.command == asked.command, "a reply is to the message");
    demand((header.flags & vfio_user::kTypeMask) == vfio_user::kTypeReply, "a reply says that it is one");
    const bool error = (header.flags & vfio_user::kFlagError) != 0;
    demand(error == (header.error != 0) && (!error || header.size == sizeof header), "an error and nothing else");
  }

  static constexpr std::size_t kMemory = 32768;
  Input& input_;
  Descriptor wake_, client_;
  std::unique_ptr<serve::Session> session_;
  std::unique_ptr<Connection> connection_;
  std::uint8_t* memory_ = nullptr;  ///< the last that was sent
  std::uint16_t id_ = 0;
  bool ended_ = false;

 public:
  void forget() {
    if (memory_ != nullptr) munmap(memory_, kMemory);
  }
};

void run(Input& input) {
  controller().remove();
  Run one(input);
  one.go();
  one.forget();
}

const Target target("vfio_user_server", run);

}  // namespace

}  // namespace ugds::fuzz
