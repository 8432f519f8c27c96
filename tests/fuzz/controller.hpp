// SPDX-License-Identifier: Apache-2.0
//
// A controller made up by an input: what a correct one does, but for the deviations that the input lists. It reaches
// memory only by addresses that the library has mapped, and counts what it has posted.
#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include "device/device.hpp"
#include "fuzz.hpp"
#include "nvme/entries.hpp"
#include "nvme/identify.hpp"
#include "nvme/registers.hpp"

namespace ugds::fuzz {

/// From the input; see Deviation::read.
struct Deviation {
  enum Kind : std::uint8_t { registers, identify, admin, io, stray, removal, reset, kinds };
  /// What becomes of a command.
  enum Action : std::uint8_t { status, lose, twice, wrong_phase, wrong_id, wrong_head, forge, late, actions };

  std::uint8_t kind = registers;
  std::uint8_t which = 0;   ///< register, Identify page, opcode
  std::uint8_t skip = 0;    ///< so many that match pass first
  std::uint8_t count = 0;   ///< so many more than one are met
  std::uint8_t action = 0;  ///< and of registers: 0 the value, 1 all ones, 2 the value's bits are turned over
  std::uint16_t place = 0;
  std::uint64_t value = 0;
  std::vector<std::uint8_t> bytes;

  static Deviation read(Input& input);
  bool meets();
};

class Controller final : public device::Device {
 public:
  explicit Controller(std::vector<Deviation> deviations);
  ~Controller() override;

  const std::string& uri() const override { return uri_; }
  device::Transport transport() const override { return device::Transport::emulated; }
  device::Limits limits() const override { return {}; }
  std::uint32_t read32(std::uint32_t offset) override { return static_cast<std::uint32_t>(read(offset, 4)); }
  std::uint64_t read64(std::uint32_t offset) override { return read(offset, 8); }
  void write32(std::uint32_t offset, std::uint32_t value) override { write(offset, value); }
  void write64(std::uint32_t offset, std::uint64_t value) override { write(offset, value); }
  std::uint32_t* doorbell(std::uint32_t) override { return nullptr; }
  device::Mapping map(void* address, Bytes length, device::Access access, std::uint64_t* pages) override;
  void unmap(const device::Mapping& mapping) noexcept override;
  bool reset() noexcept override;
  /// As if its power were taken: nothing is left to hold memory for.
  bool release() noexcept override;
  Turn turn() const override {
    return [](void* self) { static_cast<Controller*>(self)->work(); };
  }
  void* turn_context() const override { return const_cast<Controller*>(this); }

  static constexpr std::uint64_t kBlocks = 256, kBlock = 512;
  /// What block `lba` holds at byte `at`.
  static std::uint8_t content(std::uint64_t lba, std::uint64_t at) {
    return static_cast<std::uint8_t>(lba * 7 + at * 3 + 1);
  }

  /// Bytes of I/O commands for which a success was posted, honestly or not (1 for one without data), and whether a
  /// deviation has met one of them or a register.
  struct Account {
    std::uint64_t posted = 0;
    bool deviated = false;
  };
  Account account;

 private:
  struct Queue {
    std::uint64_t ring = 0;
    std::uint32_t entries = 0, head = 0, tail = 0;
    bool phase = true;
    std::uint16_t completion = 0;
  };
  struct Late {
    std::uint16_t queue;
    nvme::SubmissionEntry entry;
    unsigned turns;
  };

  std::uint64_t read(std::uint32_t offset, std::uint32_t width);
  std::uint64_t value_of(std::uint32_t offset) const;
  void write(std::uint32_t offset, std::uint64_t value);
  void ring(std::uint32_t index, std::uint32_t value);
  void work();
  void execute(std::uint16_t queue, const nvme::SubmissionEntry& entry);
  void execute_admin(const nvme::SubmissionEntry& entry);
  void execute_io(std::uint16_t queue, const nvme::SubmissionEntry& entry);
  bool deviate(std::uint16_t queue, const nvme::SubmissionEntry& entry, Deviation::Kind kind);
  void answer_identify(const nvme::SubmissionEntry& entry);
  void move(const nvme::SubmissionEntry& entry);
  void finish(std::uint16_t queue, const nvme::SubmissionEntry& entry, std::uint16_t status, std::uint32_t result = 0);
  void post(std::uint16_t queue, const nvme::CompletionEntry& entry, bool phase_is_right = true);
  Queue* find(std::map<std::uint16_t, Queue>& queues, std::uint16_t id);
  std::byte* reach(std::uint64_t iova, std::uint64_t bytes, bool write);
  void stop();

  std::string uri_ = "fuzz:controller";
  std::vector<Deviation> deviations_;
  std::map<std::uint64_t, std::pair<std::uint64_t, bool>> mapped_;  ///< length, and whether it may be written to
  std::map<std::uint16_t, Queue> submission_, completion_;
  std::vector<Late> late_;
  std::map<std::pair<std::uint16_t, std::uint16_t>, std::uint64_t> in_flight_;  ///< by queue and identifier
  std::uint64_t capabilities_, asq_ = 0, acq_ = 0;
  std::uint32_t cc_ = 0, csts_ = 0, aqa_ = 0;
  bool gone_ = false;
  bool lied_ = false;  ///< of CC, which its reader writes back
};

}  // namespace ugds::fuzz
