// SPDX-License-Identifier: Apache-2.0
//
// The controller's state. One lock guards all of it: a turn holds it, and so does whatever the host does meanwhile.
// What is read without the lock is atomic. The functions are spread over files by what they do:
//   controller.cpp   the public face            turn.cpp       one turn: fetch, execute, complete
//   registers.cpp    registers and bring-up     fetch.cpp      entries become commands; PRPs
//   doorbells.cpp    tails, heads, shadows      queues.cpp     creation, deletion, posting
//   thread.cpp       polling and sleeping       interrupts.cpp who is told of what was posted
//   unmap.cpp        memory that goes
//   admin.cpp, identify.cpp, io.cpp   what commands do; mover.hpp moves their data
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "emulator/address_space.hpp"
#include "emulator/command.hpp"
#include "emulator/controller.hpp"
#include "emulator/faults.hpp"
#include "emulator/mover.hpp"
#include "emulator/queues.hpp"
#include "emulator/reservation.hpp"
#include "emulator/subsystem.hpp"
#include "emulator/timing.hpp"
#include "emulator/violations.hpp"
#include "nvme/commands.hpp"
#include "nvme/registers.hpp"
#include "nvme/status.hpp"

namespace ugds::emulator {

enum class State : std::uint8_t {
  disabled,
  starting,  ///< CC.EN is set, CSTS.RDY not yet
  ready,
  stopping,  ///< CC.EN is clear, CSTS.RDY not yet; commands may still be executing
  shut,      ///< shutdown is complete; nothing is fetched any more
  failed,    ///< CSTS.CFS
};

struct Controller::Impl {
  explicit Impl(const Options& wanted);
  ~Impl();

  // registers.cpp
  std::uint64_t read(std::uint32_t offset, std::uint32_t width);
  void write(std::uint32_t offset, std::uint64_t value, std::uint32_t width);
  void write_register(std::uint32_t offset, std::uint64_t value, std::uint32_t width);
  void write_configuration(std::uint32_t value);
  void start();
  void stop();
  void shut_down();
  void finish_start();
  void finish_stop();
  bool settle();
  void fail_fatally();
  void return_to_initial_state(bool as_found);
  void drop_everything();
  void bad_access(const char* how, std::uint32_t offset, std::uint32_t width);

  // doorbells.cpp
  std::uint32_t* doorbell_word(std::uint32_t offset) const;
  void write_doorbell(std::uint32_t offset, std::uint64_t value, std::uint32_t width);
  bool is_shadowed(std::uint32_t offset) const;
  void connect(Doorbell& doorbell, std::uint32_t offset, bool fresh);
  void zero_doorbell(std::uint32_t offset) noexcept;
  void zero_doorbells() noexcept;
  bool observe(SubmissionQueue& queue);
  void observe(CompletionQueue& queue);
  void park(const Doorbell& doorbell, std::uint32_t depth) const;
  void ask_to_be_rung();
  bool doorbells_changed() const;
  bool hears_every_doorbell() const;

  // turn.cpp
  bool turn();
  bool turn_safely() noexcept;
  bool fetch_all();
  bool run_due();
  bool write_late();
  bool post_held();
  void mend_torn();
  std::uint64_t next_event() const;
  void schedule(Command& command);
  void execute(Command& command);
  void complete(Command& command, std::uint16_t status, std::uint32_t result);

  // fetch.cpp
  bool fetch(SubmissionQueue& queue, std::uint32_t most);
  void accept(SubmissionQueue& queue, const nvme::SubmissionEntry& entry);
  void accept_fault(Command& command);
  std::uint16_t read_prps(Command& command, std::uint64_t prp1, std::uint64_t prp2, std::uint64_t length);
  std::uint16_t read_lists(Transfer& transfer, std::uint64_t list, std::uint64_t remaining);
  bool check_reserved(const Command& command);
  void check_lists(const Command& command);
  void check_lists_unchanged(const Command& command);
  Command& allocate();
  void release(Command& command);

  // queues.cpp
  std::uint16_t create_completion_queue(const Command& command);
  std::uint16_t create_submission_queue(const Command& command);
  std::uint16_t delete_submission_queue(Command& command, bool& hangs);
  std::uint16_t delete_completion_queue(const Command& command);
  std::uint16_t find_ring(const nvme::SubmissionEntry& entry, std::uint64_t bytes, bool writable, Ring& ring);
  std::uint16_t check_queue(std::uint32_t id, std::uint32_t entries, bool exists) const;
  void create_admin_queues();
  void drop_queues();
  void post(CompletionQueue& queue, const Posting& posting);
  void check_identifier_unused(const SubmissionQueue& queue, std::uint16_t cid);
  void write_entry(CompletionQueue& queue, const Posting& posting);

  // interrupts.cpp
  void set_interrupt(std::uint16_t vector, int eventfd);
  void raise(CompletionQueue& queue, std::uint32_t place);
  void deliver() noexcept;

  // admin.cpp, identify.cpp, io.cpp
  std::uint16_t prepare_admin(Command& command);
  std::uint16_t execute_admin(Command& command, std::uint32_t& result, bool& hangs);
  std::uint16_t set_features(const Command& command, std::uint32_t& result);
  std::uint16_t get_features(const Command& command, std::uint32_t& result);
  std::uint16_t abort(const Command& command, std::uint32_t& result);
  std::uint16_t configure_shadow(const Command& command);
  std::uint16_t identify(const Command& command);
  std::uint16_t prepare_io(Command& command);
  std::uint16_t execute_io(Command& command);
  std::uint16_t read_blocks(Command& command);
  std::uint16_t write_blocks(Command& command);
  std::uint16_t manage_dataset(const Command& command);
  std::uint16_t send(const Transfer& transfer, const void* data, std::uint64_t bytes);
  std::uint16_t receive(const Transfer& transfer, void* data, std::uint64_t bytes);
  Moved move(const Command& command, Media& media);
  Moved move_shared(const Command& command, Media& media, std::uint64_t at);
  std::uint16_t check_memory(const Command& command);
  void corrupt(const Command& command);
  /// Records a failed access as a violation; the status of a command that made it.
  std::uint16_t report(const Access& access, const char* what);

  // thread.cpp
  void run();
  void sleep(std::uint64_t timeout_ns, bool deaf, bool belt);
  void wake();

  // unmap.cpp
  void unmap(std::uint64_t iova) noexcept;
  void check_unused(const Transfer::Piece& range);
  void check_unused_by(const Command& command, const Transfer::Piece& range);
  void check_unused_by_queued(const SubmissionQueue& queue, const Transfer::Piece& range);
  void add_in_use(const Transfer::Piece& range, const char* what, std::uint32_t cid, std::uint32_t queue);

  /// A device that has left the bus does nothing more, whoever it was that had it fetch its last command.
  bool processes() const {
    return (state == State::ready || state == State::stopping) && !removed.load(std::memory_order_relaxed);
  }
  bool is_durable() const { return (features[6] & 1) == 0 || !subsystem->has_write_cache(); }
  std::uint32_t stride() const { return 4u << options.stride; }

  const Options options;
  mutable Violations violations;
  std::mutex lock;
  std::atomic<std::uint32_t> waiting{0};  ///< callers that want the lock: the thread lets them go first

  std::atomic<std::uint32_t> cc{0}, csts{0}, aqa{0}, interrupt_mask{0};
  std::atomic<std::uint64_t> asq{0}, acq{0};
  std::uint64_t cap = 0;
  std::uint64_t page_size = 4096;  ///< CC.MPS as it was when the controller was enabled
  State state = State::disabled;
  std::atomic<bool> removed{false};
  std::atomic<bool> settling{false};  ///< a change of CSTS is due at `settle_due`
  std::uint64_t settle_due = 0;

  Clock clock;
  std::uint64_t held_at = ~std::uint64_t{0};  ///< virtual time that turns do not go beyond
  Timing timing;
  std::mt19937_64 random;
  AddressSpace memory;
  Mover mover;
  SubsystemReference subsystem;
  std::uint16_t identifier = 0;
  Faults faults;
  Counters counters;
  std::atomic<std::uint64_t> wakeups{0};

  Reservation doorbells;
  std::uint32_t admin_doorbells[2] = {0, 0};
  std::uint32_t* admin_words[2] = {&admin_doorbells[0], &admin_doorbells[1]};  ///< those, or shared memory's
  /// Its power was cut, and the host has not set CC.EN since: it may ring what it does not know to be off.
  std::atomic<bool> lost_power{false};
  bool doorbells_were_lost = false;  ///< the host may have rung a device that was gone: no mistake of its own
  std::uint64_t shadow_iova = 0, event_iova = 0;
  std::byte* shadow = nullptr;  ///< a page of CC.MPS each
  std::byte* events = nullptr;

  std::vector<std::unique_ptr<SubmissionQueue>> submission;  ///< by identifier
  std::vector<std::unique_ptr<CompletionQueue>> completion;
  /// Those that exist. The admin queue's is the first; submission queues have their turns in this order.
  std::vector<std::uint16_t> submission_ids, completion_ids;
  struct Vector {
    int eventfd = -1;
    bool may_block = false;
    bool raised = false;
  };
  std::vector<Vector> vectors;
  std::vector<std::uint16_t> raised;  ///< vectors to send when the turn ends
  std::uint32_t granted = 0;
  std::uint32_t features[16] = {};

  std::vector<std::unique_ptr<Command>> commands;
  std::vector<Command*> spare, live;
  std::uint32_t free_slots;  ///< I/O commands that may become live; `slots=0`: more than there can be
  struct Due {
    std::uint64_t due, sequence;
    Command* command;
    bool operator<(const Due& other) const {  // for a heap whose front is the earliest
      return due != other.due ? due > other.due : sequence > other.sequence;
    }
  };
  std::vector<Due> waiting_commands;  ///< a heap
  std::vector<Due> due_commands;
  /// Completion entries of which only the last dword is there yet.
  struct Torn {
    nvme::CompletionEntry* entry;
    std::uint32_t result;
    std::uint16_t sq_head, sq_id;
    std::uint64_t due;
  };
  std::vector<Torn> torn;
  std::uint64_t next_sequence = 1;
  std::uint64_t late_pattern = 0;
  std::uint32_t late_writers = 0, event_requests = 0;

  std::atomic<std::uint32_t> asleep{0};
  bool asked = false;  ///< event indices ask for every ring
  std::atomic<bool> quit{false};
  std::thread thread;  // last: everything above exists while it runs
};

/// The lock, taken by whoever is not the controller's own thread.
class HostGuard {
 public:
  explicit HostGuard(Controller::Impl& impl) : impl_(impl) {
    impl.waiting.fetch_add(1, std::memory_order_relaxed);
    impl.lock.lock();
    impl.waiting.fetch_sub(1, std::memory_order_relaxed);
  }
  ~HostGuard() { impl_.lock.unlock(); }
  HostGuard(const HostGuard&) = delete;
  HostGuard& operator=(const HostGuard&) = delete;

 private:
  Controller::Impl& impl_;
};

}  // namespace ugds::emulator
