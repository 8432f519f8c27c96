// SPDX-License-Identifier: Apache-2.0
//
// An NVMe controller that does one thing at a time, when it is told to: which command completes next and how, what an
// Abort answers, whether disabling and resetting stop it. It keeps the rules that the host's memory depends on: what it
// may still execute must be mapped. Whatever it does to memory goes through the mappings of the device interface.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "device/device.hpp"
#include "nvme/entries.hpp"

namespace ugds::explore {

/// What a controller may do beside completing commands, and how often in one execution.
struct Traits {
  std::uint32_t errors = 1;      ///< commands that fail
  std::uint32_t duplicates = 0;  ///< completions posted once more
  std::uint32_t unknown = 0;     ///< completions of no command, by an identifier whose slot is in use
  std::uint32_t bad_heads = 0;   ///< completions with a submission queue head beyond the ring
  std::uint32_t fatal = 0;       ///< CSTS.CFS
  std::uint32_t removals = 0;    ///< all registers read as all ones
  bool aborts = true;            ///< Abort is answered in every way; else never
  bool stuck = false;            ///< clearing CC.EN may be ignored, and a reset of the function may fail
  std::uint32_t restarts = 0;    ///< starts that may fail
  std::uint32_t queues = 1;      ///< granted
  std::uint8_t mdts = 0;
};

class Controller final : public device::Device {
 public:
  explicit Controller(const Traits& traits) : traits_(traits), left_(traits) { living = this; }
  ~Controller() override;
  /// The one that there is.
  static Controller* living;

  // --- What it can do next -----------------------------------------------------------------------------------------
  std::uint32_t actions();
  /// Whether the first of them is what one that works would do; else it has nothing to do, and all are mischief.
  bool has_work() const;
  void act(std::uint32_t action);
  std::string name_of(std::uint32_t action) const;
  /// It may still execute commands: nothing of theirs may be released.
  bool may_run() const { return may_run_; }
  bool has_left_the_bus() const { return gone_; }
  /// It never posted what it should not.
  bool keeps_rules() const {
    return traits_.duplicates == left_.duplicates && traits_.unknown == left_.unknown &&
           traits_.bad_heads == left_.bad_heads;
  }
  /// Nothing may be unmapped, or reported as closed, that a command of its may still use.
  void check() const;
  bool uses(const device::Mapping& mapping) const;
  /// Whether a command that it may execute has data in this memory.
  bool touches(const std::byte* begin, std::size_t bytes) const;
  /// It was left running by whoever had it: its mappings stay, and nobody will ever end them.
  void forget() { mappings_.clear(); }
  /// From now on it works, and a reset of the function stops it.
  void mend();
  std::size_t mappings() const { return mappings_.size(); }
  std::size_t outstanding() const { return commands_.size(); }
  /// Completions ever posted.
  std::size_t posted() const { return posted_; }
  /// What a write has left, by LBA.
  std::map<std::uint64_t, std::uint64_t> media;
  static constexpr std::uint32_t kBlock = 4096;
  static constexpr std::uint64_t kBlocks = 64;
  /// What a read of a block gives: the first and the last word of it.
  std::uint64_t word(std::uint64_t lba) const;

  // --- device::Device ----------------------------------------------------------------------------------------------
  const std::string& uri() const override { return uri_; }
  device::Transport transport() const override { return device::Transport::vfio; }
  device::Limits limits() const override { return {}; }
  std::uint32_t read32(std::uint32_t offset) override;
  std::uint64_t read64(std::uint32_t offset) override;
  void write32(std::uint32_t offset, std::uint32_t value) override;
  void write64(std::uint32_t offset, std::uint64_t value) override;
  std::uint32_t* doorbell(std::uint32_t) override { return nullptr; }
  device::Mapping map(void* address, Bytes length, device::Access access, std::uint64_t* pages) override;
  void unmap(const device::Mapping& mapping) noexcept override;
  OwnMemory allocate(Bytes size, std::uint64_t* pages) override;
  void free(const OwnMemory& own) noexcept override;
  bool reset() noexcept override;
  Turn turn() const override;

 private:
  struct Mapped {
    std::uint64_t length;
    std::byte* memory;
    bool writable;
  };
  struct Queue {
    std::uint64_t submission = 0, completion = 0;
    std::uint32_t submission_size = 0, completion_size = 0;
    std::uint32_t head = 0, tail = 0;     ///< of the submission queue
    std::uint32_t posted = 0, taken = 0;  ///< completion queue: ours, and the host's head
    bool phase = true;
    bool is_there() const { return submission_size != 0; }
  };
  struct Command {
    std::uint16_t queue = 0, cid = 0;
    std::uint8_t opcode = 0;
    bool aborting = false;  ///< Abort was answered with "aborted", its completion is still to come
    std::uint64_t lba = 0;
    std::vector<std::uint64_t> pages;  ///< of its data
    nvme::SubmissionEntry entry;
  };
  struct Action {
    enum class Kind : std::uint8_t {
      complete,
      complete_error,
      complete_aborted,
      duplicate,
      unknown,
      bad_head,
      fatal,
      remove,
      abort_completed,
      abort_promised,
      abort_refused,
      abort_failed,
      stop,
      start,
      start_failed,
    } kind;
    std::uint32_t command = 0;
  };

  bool waits_for_abort() const { return abort_waits_ && traits_.aborts && !fatal_; }
  void stop();
  void start();
  void fetch(std::uint16_t queue);
  void admin(const nvme::SubmissionEntry& entry);
  void parse(Command& command, const nvme::SubmissionEntry& entry);
  void move_data(const Command& command);
  void post(std::uint16_t queue, std::uint16_t cid, std::uint16_t status, std::uint32_t result, bool bad_head = false);
  std::uint32_t room(std::uint16_t queue) const;
  std::byte* reach(std::uint64_t iova, std::uint64_t bytes, bool write) const;
  std::vector<Command>::iterator abort_target();

  Traits traits_, left_;
  std::uint32_t cc_ = 0;
  bool may_run_ = false, ready_ = false, fatal_ = false, gone_ = false;
  bool stopping_ = false, starting_ = false;
  std::uint32_t shutdown_ = 0;
  std::uint64_t asq_ = 0, acq_ = 0;
  std::uint32_t aqa_ = 0;
  std::vector<Queue> queues_;
  std::vector<Command> commands_;  ///< that it may execute, by age
  Command last_;                   ///< that completed, for duplicates
  bool has_last_ = false;
  bool abort_waits_ = false;
  nvme::SubmissionEntry abort_;
  std::size_t posted_ = 0;
  std::vector<Action> offered_;
  std::map<std::uint64_t, Mapped> mappings_;
  std::uint64_t next_iova_ = std::uint64_t{1} << 40;
  std::string uri_ = "explored:";
};

}  // namespace ugds::explore
