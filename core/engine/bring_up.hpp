// SPDX-License-Identifier: Apache-2.0
//
// A controller from whatever state it is found in to one that takes commands, and back: registers, admin queue,
// Identify (NVMe Base 2.0, 3.5). Set-up only, so it may sleep and throw.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "device/device.hpp"
#include "nvme/commands.hpp"
#include "nvme/registers.hpp"
#include "queue/queue_pair.hpp"

namespace ugds::engine {

/// What Identify says of the controller and of one namespace.
struct Identity {
  std::string model, serial, firmware;
  std::uint32_t namespace_id = 0;
  std::uint32_t block_size = 0;
  std::uint64_t blocks = 0;
  std::uint64_t max_transfer = 0;  ///< bytes of one command: MDTS, the library's own cap, 16 bits of blocks
  bool volatile_write_cache = false;
  bool dataset_management = false;

  std::uint64_t capacity() const { return blocks * block_size; }
};

/// An admin command's answer.
struct Answer {
  bool timed_out = false;
  bool gone = false;
  std::uint16_t status = 0;
  std::uint32_t result = 0;
};

class Bringup {
 public:
  explicit Bringup(device::Device& device);

  /// Stops the controller if it runs, sets the admin queue up and enables it. Throws Failure: ENODEV (gone), EIO
  /// (fatal, or not ready within CAP.TO), EOPNOTSUPP (page size, command set).
  void enable();
  /// Clears CC.EN and waits for CSTS.RDY to follow. True: the controller has stopped, no DMA follows.
  bool disable() noexcept;
  /// Tells the controller that power may go, waits, and disables it.
  bool shut_down() noexcept;

  /// Runs one admin command to its end, or for at most `deadline_ns`. One at a time; thread-safe.
  Answer execute(const nvme::SubmissionEntry& command, std::uint64_t deadline_ns);
  /// The same, and throws Failure for anything but success. `what` completes "the device refused to …".
  std::uint32_t demand(const nvme::SubmissionEntry& command, const char* what);

  /// Throws Failure: EINVAL (no such namespace), EOPNOTSUPP (a format with metadata, block sizes out of range).
  Identity identify(std::uint32_t namespace_id);
  /// Asks for shadow doorbells where they are offered. Whether they are in use.
  bool configure_shadow_doorbells(std::uint32_t queue_pairs);
  /// Asks for I/O queue pairs and says how many there are.
  std::uint32_t negotiate_queues(std::uint32_t wanted);
  /// Creates both queues of a pair on the controller; its completions interrupt by `vector`, if one is given.
  void create(const queue::QueuePair& pair, std::optional<std::uint16_t> vector);

  nvme::Capabilities capabilities() const { return capabilities_; }
  std::uint64_t page_size() const { return page_size_; }
  queue::Doorbell submission_doorbell(std::uint16_t queue) const;
  queue::Doorbell completion_doorbell(std::uint16_t queue) const;

  nvme::ControllerStatus status() const;
  /// The device does not answer on the bus: two registers that cannot both be all ones are.
  bool gone() const;
  /// The controller may still use this memory: it is never given back.
  void leak();

 private:
  void write(nvme::Register r, std::uint32_t value) { device_.write32(static_cast<std::uint32_t>(r), value); }
  bool wait_ready(bool ready, std::uint64_t limit_ns, std::string& why) const;
  void pause(unsigned round) const;
  queue::Doorbell doorbell(std::uint32_t offset, std::uint16_t queue) const;

  device::Device& device_;
  nvme::Capabilities capabilities_;
  std::uint64_t page_size_ = 0;
  std::mutex admin_lock_;
  std::unique_ptr<queue::QueuePair> admin_;
  device::DmaMemory page_;             ///< what Identify writes to
  device::DmaMemory shadow_, events_;  ///< one controller page each
  bool shadow_in_use_ = false;
  bool offers_shadow_ = false;
};

}  // namespace ugds::engine
