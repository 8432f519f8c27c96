// SPDX-License-Identifier: Apache-2.0
#include "serve/irqs.hpp"

#include <poll.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.hpp"

namespace ugds::serve {

using namespace vfio_user;

namespace {

void require(bool condition, const char* otherwise) {
  if (!condition) fail(EINVAL, "interrupts", otherwise);
}

/// Writing to anything else could wait for its reader.
bool is_eventfd(const Descriptor& file) {
  char text[64] = "";
  const std::string link = "/proc/self/fd/" + std::to_string(file.get());
  const ssize_t length = readlink(link.c_str(), text, sizeof text - 1);
  return length > 0 && std::strcmp(text, "anon_inode:[eventfd]") == 0;
}

void signal(const Descriptor& file) {
  if (!file) return;
  pollfd look{file.get(), POLLOUT, 0};
  if (poll(&look, 1, 0) != 1 || (look.revents & POLLOUT) == 0) return;
  const std::uint64_t one = 1;
  static_cast<void>(!write(file.get(), &one, sizeof one));
}

}  // namespace

Irqs::Irqs(emulator::Controller& controller) : controller_(controller) {
  kinds_[kIrqMsix].resize(controller.options().vector_count());
  // Neither is ever sent; clients expect that there is one.
  kinds_[kIrqError].resize(1);
  kinds_[kIrqRequest].resize(1);
}

void Irqs::set(const IrqSet& r, std::span<const std::byte> data, std::vector<Descriptor>& files) {
  const std::uint32_t kind = r.flags & kIrqDataMask, action = r.flags & kIrqActionsMask;
  require(r.argsz >= sizeof r && (r.flags & ~(kIrqDataMask | kIrqActionsMask)) == 0, "argsz or flags");
  require(kind == kIrqDataNone || kind == kIrqDataBool || kind == kIrqDataEventfd, "not one kind of data");
  require(action == kIrqActionMask || action == kIrqActionUnmask || action == kIrqActionTrigger, "not one action");
  require(r.index < kPciIrqs, "no such kind of interrupt");
  require(kind == kIrqDataEventfd || files.empty(), "descriptors that no eventfds are");
  require(r.count != 0 || (r.start == 0 && kind == kIrqDataNone && action == kIrqActionTrigger), "nothing is named");
  require(r.start <= count(r.index) && r.count <= count(r.index) - r.start, "beyond the interrupts that there are");
  if (action != kIrqActionTrigger) fail(ENOTSUP, "interrupts", "these cannot be masked");
  std::vector<Descriptor>& vectors = kinds_[r.index];
  if (kind == kIrqDataEventfd) {
    require(files.empty() || files.size() == r.count, "not one descriptor for each interrupt");
    for (const Descriptor& file : files) require(is_eventfd(file), "a descriptor that is not an eventfd");
    for (std::uint32_t i = 0; i < r.count; ++i)
      assign(r.index, r.start + i, files.empty() ? Descriptor() : std::move(files[i]));
  } else if (r.count == 0) {
    for (std::uint32_t i = 0; i < vectors.size(); ++i) assign(r.index, i, Descriptor());
  } else {
    require(kind != kIrqDataBool || data.size() == r.count, "not one byte for each interrupt");
    for (std::uint32_t i = 0; i < r.count; ++i)
      if (kind == kIrqDataNone || data[i] != std::byte{0}) signal(vectors[r.start + i]);
  }
}

void Irqs::assign(std::uint32_t index, std::uint32_t at, Descriptor file) {
  // The old one is closed when the controller has the new one, with `file`.
  std::swap(kinds_[index][at], file);
  if (index == kIrqMsix && enabled_) controller_.set_interrupt(static_cast<std::uint16_t>(at), kinds_[index][at].get());
}

void Irqs::enable(bool on) {
  if (on == enabled_) return;
  enabled_ = on;
  for (std::uint32_t i = 0; i < kinds_[kIrqMsix].size(); ++i)
    controller_.set_interrupt(static_cast<std::uint16_t>(i), on ? kinds_[kIrqMsix][i].get() : -1);
}

void Irqs::clear() noexcept {
  enable(false);
  for (std::vector<Descriptor>& kind : kinds_)
    for (Descriptor& file : kind) file = Descriptor();
}

}  // namespace ugds::serve
