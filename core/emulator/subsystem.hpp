// SPDX-License-Identifier: Apache-2.0
//
// A subsystem: namespaces and their data, shared by the controllers that are open on it. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "emulator/controller.hpp"
#include "emulator/geometry.hpp"
#include "emulator/media.hpp"
#include "emulator/write_cache.hpp"

namespace ugds::emulator {

class Subsystem {
 public:
  /// Throws Failure for a file that cannot be had, or whose size does not fit the geometry.
  explicit Subsystem(const Options& options);

  const Geometry& geometry() const { return geometry_; }
  bool has_write_cache() const { return vwc_; }
  /// Whether several controllers can be on it.
  bool is_shared() const { return !name_.empty(); }

  /// To be read by whoever likes; changed through `change` alone.
  Media& media() { return *media_; }
  /// A change of blocks; `change(media)` makes it. See WriteCache::write.
  template <class Change>
  int change(std::uint32_t nsid, std::uint64_t block, std::uint64_t blocks, bool durable, Change&& change) {
    return cache_->write(nsid, block, blocks, durable || !vwc_, [&] { return change(*media_); });
  }
  /// The blocks and their metadata read as zeros afterwards.
  int discard(std::uint32_t nsid, std::uint64_t block, std::uint64_t blocks, bool durable);
  int flush(std::uint32_t nsid) { return cache_->flush(nsid); }
  std::uint64_t stored_bytes() const { return media_->stored_bytes(); }
  /// A controller was opened on it. See Media::keep.
  void keep() noexcept { media_->keep(); }

  /// Throws Failure(ERANGE).
  void peek(std::uint32_t nsid, std::uint64_t offset, void* out, std::uint64_t bytes);
  void poke(std::uint32_t nsid, std::uint64_t offset, const void* data, std::uint64_t bytes);

  /// Controllers that lose power together. A controller's identifier is the return value.
  std::uint16_t attach(Controller::Impl* controller);
  void detach(Controller::Impl* controller) noexcept;
  void power_cut(double survive, std::uint64_t seed);

 private:
  friend class SubsystemReference;
  void require_same(const Options& options) const;
  std::uint64_t place(std::uint32_t nsid, std::uint64_t offset, std::uint64_t bytes) const;

  Geometry geometry_;
  bool vwc_;
  std::string name_, path_;
  std::unique_ptr<Media> media_;
  std::unique_ptr<WriteCache> cache_;
  std::mutex controllers_lock_;
  std::vector<Controller::Impl*> controllers_;
  std::uint16_t next_identifier_ = 1;
};

/// Keeps a subsystem open. With a name, every reference of that name is to the same one.
class SubsystemReference {
 public:
  /// Throws Failure(EINVAL) naming the parameter in which the options differ from the subsystem of that name.
  explicit SubsystemReference(const Options& options);
  ~SubsystemReference();
  SubsystemReference(const SubsystemReference&) = delete;
  SubsystemReference& operator=(const SubsystemReference&) = delete;
  /// The name stays after the last reference has gone, until it is forgotten.
  void keep() noexcept;
  Subsystem* operator->() const { return subsystem_.get(); }
  Subsystem& operator*() const { return *subsystem_; }

 private:
  std::shared_ptr<Subsystem> subsystem_;
  std::string name_;
};

}  // namespace ugds::emulator
