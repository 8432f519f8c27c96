// SPDX-License-Identifier: Apache-2.0
#include "emulator/subsystem.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/steps.hpp"
#include "base/text.hpp"
#include "emulator/impl.hpp"

namespace ugds::emulator {

namespace {

struct Named {
  std::shared_ptr<Subsystem> subsystem;
  std::uint64_t open = 0;
  bool kept = false;  // a controller was opened on it; until then it goes with its last reference
};

struct Registry {
  std::mutex lock;
  std::map<std::string, Named> named;
};

/// Never destroyed: controllers may be left open until after the end of `main`.
constinit std::atomic<Registry*> the_registry{nullptr};

Registry& registry() {
  if (Registry* now = the_registry.load(std::memory_order_acquire); now != nullptr) [[likely]]
    return *now;
  // A child of a fork starts with another one: in the parent's, a thread that does not exist here may hold the lock and
  // may be half-way through a change, and the subsystems' threads do not exist here either. It is leaked there.
  static constinit std::atomic<bool> hooked{false};
  if (!hooked.exchange(true)) on_fork(ForkOrder::subsystems, {nullptr, nullptr, [] { the_registry.store(nullptr); }});
  auto made = std::make_unique<Registry>();
  Registry* first = nullptr;
  if (!the_registry.compare_exchange_strong(first, made.get())) return *first;
  return *made.release();
}

}  // namespace

Subsystem::Subsystem(const Options& options) : vwc_(options.vwc), name_(options.name), path_(options.path) {
  geometry_ = {options.lba, options.metadata, options.interleaved, options.namespaces, options.size / options.lba};
  setup_step("emulator: media");
  if (path_.empty()) {
    media_ = make_memory_media(geometry_.total_bytes());
  } else {
    FileMedia file = open_file_media(path_, geometry_.total_bytes());
    const std::uint64_t a_block = std::uint64_t{options.lba} + options.metadata;
    const std::uint64_t each = file.bytes / options.namespaces;
    if (file.bytes == 0 || file.bytes % options.namespaces != 0 || each % a_block != 0)
      fail(EINVAL, "open",
           "image " + path_ + " has " + std::to_string(file.bytes) + " bytes, which " +
               std::to_string(options.namespaces) + " namespaces of " + std::to_string(a_block) +
               "-byte blocks do not fill",
           "give the lba=, metadata= and namespaces= that it was made with");
    if (options.size != 0 && each / a_block != geometry_.blocks)
      fail(EINVAL, "open",
           "parameter size=" + std::to_string(options.size) + ": image " + path_ + " exists with " +
               std::to_string(each / a_block * options.lba) + " bytes a namespace",
           "leave size= out");
    geometry_.blocks = each / a_block;
    media_ = std::move(file.media);
  }
  cache_ = std::make_unique<WriteCache>(*media_, geometry_);
}

int Subsystem::discard(std::uint32_t nsid, std::uint64_t block, std::uint64_t blocks, bool durable) {
  const Geometry& g = geometry_;
  const std::uint64_t start = block, end = block + blocks;
  // A command may name 2^32 blocks. Where metadata does not lie elsewhere, what was never written is passed over, and
  // the rest is changed piece by piece.
  constexpr std::uint64_t kPiece = std::uint64_t{64} << 20;
  while (block < end) {
    if (g.separate() == 0) {
      const std::uint64_t last = g.data_at(nsid, end);
      const std::uint64_t data = media_->next_data(g.data_at(nsid, block), last);
      if (data >= last) break;
      block = (data - g.data_at(nsid, 0)) / g.unit();
    }
    const std::uint64_t part = std::min(std::max<std::uint64_t>(1, kPiece / g.unit()), end - block);
    const int error = change(nsid, block, part, durable, [&](Media& media) {
      const int data = media.discard(g.data_at(nsid, block), part * g.unit());
      return data != 0 ? data : media.discard(g.metadata_at(nsid, block), part * g.separate());
    });
    if (error != 0) return error;
    block += part;
  }
  // What was passed over may still have images of older contents.
  if (durable) return change(nsid, start, blocks, true, [](Media&) { return 0; });
  return 0;
}

std::uint64_t Subsystem::place(std::uint32_t nsid, std::uint64_t offset, std::uint64_t bytes) const {
  const std::uint64_t size = geometry_.namespace_bytes();
  if (nsid < 1 || nsid > geometry_.namespaces || offset > size || bytes > size - offset)
    fail(ERANGE, "peek or poke",
         "namespace " + std::to_string(nsid) + " has no bytes [" + std::to_string(offset) + ", +" +
             std::to_string(bytes) + ")",
         "there are " + std::to_string(geometry_.namespaces) + " namespaces of " + std::to_string(size) + " bytes");
  return (nsid - 1) * size + offset;
}

void Subsystem::peek(std::uint32_t nsid, std::uint64_t offset, void* out, std::uint64_t bytes) {
  const std::uint64_t at = place(nsid, offset, bytes);
  if (const int error = media_->read(at, out, bytes); error != 0) fail(error, "peek", "the image cannot be read");
}

void Subsystem::poke(std::uint32_t nsid, std::uint64_t offset, const void* data, std::uint64_t bytes) {
  const std::uint64_t at = place(nsid, offset, bytes);
  if (const int error = media_->write(at, data, bytes); error != 0) fail(error, "poke", "the image cannot be written");
}

std::uint16_t Subsystem::attach(Controller::Impl* controller) {
  std::lock_guard guard(controllers_lock_);
  controllers_.push_back(controller);
  return next_identifier_++;
}

void Subsystem::detach(Controller::Impl* controller) noexcept {
  std::lock_guard guard(controllers_lock_);
  std::erase(controllers_, controller);
}

void Subsystem::power_cut(double survive, std::uint64_t seed) {
  // Every controller is held at once, so that none writes or flushes between the cut of another and its own.
  std::lock_guard guard(controllers_lock_);
  std::vector<std::unique_ptr<HostGuard>> held;
  for (Controller::Impl* controller : controllers_) held.push_back(std::make_unique<HostGuard>(*controller));
  for (Controller::Impl* controller : controllers_) {
    controller->lost_power.store(true, std::memory_order_release);
    controller->return_to_initial_state(false);
  }
  cache_->power_cut(survive, seed);
}

void Subsystem::require_same(const Options& o) const {
  auto differ = [&](const char* parameter, const std::string& here, const std::string& there) {
    fail(EINVAL, "open",
         std::string("parameter ") + parameter + "=" + here + " differs from subsystem \"" + name_ + "\", which has " +
             there,
         "open every controller of a name with the same geometry, or forget the subsystem");
  };
  if (o.path != path_) differ("file", o.path, path_.empty() ? "memory" : path_);
  if (o.lba != geometry_.lba) differ("lba", std::to_string(o.lba), std::to_string(geometry_.lba));
  if (o.metadata != geometry_.metadata)
    differ("metadata", std::to_string(o.metadata), std::to_string(geometry_.metadata));
  if (o.interleaved != geometry_.interleaved)
    differ("interleaved", o.interleaved ? "1" : "0", geometry_.interleaved ? "1" : "0");
  if (o.namespaces != geometry_.namespaces)
    differ("namespaces", std::to_string(o.namespaces), std::to_string(geometry_.namespaces));
  if (o.vwc != vwc_) differ("vwc", o.vwc ? "1" : "0", vwc_ ? "1" : "0");
  if ((o.size != 0 || path_.empty()) && o.size / o.lba != geometry_.blocks)
    differ("size", std::to_string(o.size), std::to_string(geometry_.blocks * geometry_.lba));
}

SubsystemReference::SubsystemReference(const Options& options) : name_(options.name) {
  setup_step("emulator: subsystem");
  if (name_.empty()) {
    subsystem_ = std::make_shared<Subsystem>(options);
    return;
  }
  std::lock_guard guard(registry().lock);
  const auto found = registry().named.find(name_);
  if (found != registry().named.end()) {
    found->second.subsystem->require_same(options);
    subsystem_ = found->second.subsystem;
    ++found->second.open;
    return;
  }
  subsystem_ = std::make_shared<Subsystem>(options);
  registry().named.emplace(name_, Named{subsystem_, 1});
}

void SubsystemReference::keep() noexcept {
  subsystem_->keep();
  if (name_.empty()) return;
  std::lock_guard guard(registry().lock);
  const auto found = registry().named.find(name_);
  if (found != registry().named.end() && found->second.subsystem == subsystem_) found->second.kept = true;
}

SubsystemReference::~SubsystemReference() {
  if (name_.empty()) return;
  std::lock_guard guard(registry().lock);
  const auto found = registry().named.find(name_);
  // In a child of a fork, the name may be another subsystem's by now.
  if (found == registry().named.end() || found->second.subsystem != subsystem_) return;
  if (--found->second.open == 0 && !found->second.kept) registry().named.erase(found);
}

bool forget_subsystem(const std::string& name) {
  std::shared_ptr<Subsystem> last;  // destroyed after the lock is released: giving memory back takes time
  std::lock_guard guard(registry().lock);
  const auto found = registry().named.find(name);
  if (found == registry().named.end() || found->second.open != 0) return false;
  last = std::move(found->second.subsystem);
  registry().named.erase(found);
  return true;
}

}  // namespace ugds::emulator
