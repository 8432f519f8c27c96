// SPDX-License-Identifier: Apache-2.0
//
// A strict software NVMe controller. It is reached as hardware is: registers, doorbells in plain memory, and DMA
// through an address translation (address_space.hpp) that it never bypasses. What a real controller would corrupt
// silently, it records as a violation.
//
// A subsystem holds namespaces and their data; each opening of a device makes a controller on it. Controllers that
// share a subsystem see the same blocks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/copier.hpp"
#include "emulator/options.hpp"

namespace ugds::emulator {

class Subsystem;

/// What the controller is on a PCI bus, and in Identify: the numbers of QEMU's software controller, by which drivers
/// know that this one is made of software too.
inline constexpr std::uint16_t kPciVendor = 0x1b36, kPciDevice = 0x0010;

/// Something that no correct driver does. `what` names the rule, with the numbers.
struct Violation {
  std::string rule;  ///< a stable word, such as "unmapped-access"
  std::string what;
};

/// Figures that only the device can know.
struct Counters {
  std::uint64_t commands = 0;  ///< executed, admin included
  std::uint64_t reads = 0, writes = 0, flushes = 0;
  std::uint64_t bytes_read = 0, bytes_written = 0;
  std::uint64_t doorbells = 0;  ///< submission doorbell changes seen
  std::uint64_t wakeups = 0;    ///< times that a doorbell woke the sleeping controller
  std::uint64_t turns = 0;
  std::uint64_t mapped_bytes = 0;   ///< now
  std::uint64_t mapped_ranges = 0;  ///< now
  std::uint64_t resets = 0;
  std::uint64_t aborts = 0;
  std::uint64_t interrupts = 0;  ///< sent
  std::uint64_t rescues = 0;     ///< times that it found work which no doorbell had woken it for; see "lost-wakeup"
};

/// A fault to play: the next `count` commands that match, after `skip` that match have passed.
struct Fault {
  enum class Kind : std::uint8_t {
    status,          ///< completes with `status`; no data moves
    hang,            ///< is fetched, and completes only when aborted (see `abortable`) or never
    late,            ///< completes after `delay_ns` more
    late_write,      ///< as `hang`, and the data is written to host memory again and again until the controller stops
    duplicate,       ///< its completion is posted twice
    unknown_id,      ///< a completion with an identifier that is not in flight is posted before its own
    corrupt,         ///< completes with success, and the data differs in one bit
    ignored,         ///< completes with success, and nothing was done
    wrong_sq_head,   ///< its completion carries an impossible submission queue head
    never_ready,     ///< register level: CSTS.RDY does not follow CC.EN
    never_stopped,   ///< register level: CSTS.RDY stays 1 after CC.EN is cleared
    fatal,           ///< register level: CSTS.CFS is set when the command is fetched, and the controller stops
    remove,          ///< the device leaves the bus when the command is fetched: registers read as all ones
    lost_interrupt,  ///< no interrupt is sent for its completion
    reset_fails,     ///< bus level: `function_reset` returns false and nothing stops
    lost,            ///< is executed, and its completion is never posted
    wrong_phase,     ///< its completion is posted with the phase of the round before
    torn,            ///< the last dword of its completion is there `delay_ns` before the rest, which is ones until then
    result,          ///< its completion has `value` in dword 0, whatever it did
    identify,        ///< of an Identify of `cns`: `width` bytes of the data, from byte `at`, are `value`
    abort_lies,      ///< of an Abort: answers that the command was aborted, and leaves it alone
    abort_denies,    ///< of an Abort: answers that the command was not aborted, and has aborted it
    double_interrupt,    ///< two interrupts are sent for its completion
    spurious_interrupt,  ///< an interrupt is sent when it is fetched, with nothing to tell
    all_ones,            ///< register level: a read of the register at `at` gives all ones
    reads_as,            ///< register level: a read of the register at `at` gives `value`
  };
  Kind kind = Kind::status;
  int opcode = -1;     ///< of I/O commands where `admin` is false; -1: any
  bool admin = false;  ///< matches admin commands instead of I/O commands
  std::uint64_t skip = 0;
  std::uint64_t count = 1;
  std::uint16_t status = 0;
  std::uint64_t delay_ns = 0;
  std::uint64_t lba = 0;  ///< matches commands that touch [lba, lba + blocks)
  std::uint64_t blocks = ~std::uint64_t{0};
  bool abortable = true;  ///< `hang` and `late_write`: an Abort command ends it
  std::uint64_t value = 0;
  std::uint32_t at = kAnywhere;
  std::uint32_t width = 1;  ///< up to 8
  int cns = -1;             ///< -1: any

  static constexpr std::uint32_t kAnywhere = ~std::uint32_t{0};  ///< any register; the first byte
};

class Controller {
 public:
  /// Throws ugds::Failure for what the options ask and cannot be had.
  explicit Controller(const Options& options);
  ~Controller();
  Controller(const Controller&) = delete;
  Controller& operator=(const Controller&) = delete;

  // --- The bus -----------------------------------------------------------------------------------------------------

  /// Register access as a host's load or store would do it. Thread-safe. Offsets and widths that no register has are
  /// violations; a removed device reads as all ones.
  std::uint64_t read(std::uint32_t offset, std::uint32_t width);
  void write(std::uint32_t offset, std::uint64_t value, std::uint32_t width);

  /// The word behind a doorbell, for plain stores; nullptr where the store must go through `write`, which wakes a
  /// sleeping controller: the admin queue's, all of them with `doorbells=trapped`, and those that have a shadow.
  std::uint32_t* doorbell(std::uint32_t offset);

  /// Where the interrupts of a vector go: 1 is written to `eventfd` when entries were posted to a completion queue that
  /// uses it, once a turn and after they are visible. -1: nowhere. The caller keeps the descriptor open; once another
  /// was set, it is not used any more. What would block is dropped. Stays over resets. Thread-safe. Throws
  /// Failure(EINVAL) for a vector that is not there.
  void set_interrupt(std::uint16_t vector, int eventfd);

  /// Puts the doorbells, the admin queue's too, into new memory that another process may map, by the descriptor that is
  /// returned: doorbell by doorbell as in the registers, from byte 0x1000 on. The descriptor is the controller's, until
  /// the next call. Whoever has the memory of an earlier call rings nothing any more. Resets the function, as `plug`
  /// does. No other thread may access a register meanwhile. Throws Failure(ENOMEM).
  int share_doorbells();
  /// Bytes that the doorbells take from register 0x1000 on.
  std::uint64_t doorbell_bytes() const;

  /// The function-level reset of the bus: everything stops at once, registers take their initial values. True: it has
  /// stopped and no DMA follows.
  bool function_reset();

  /// One turn of the controller in the calling thread, for `pump=caller`: looks at every queue, fetches, executes what
  /// is due and posts completions. Thread-safe; a turn already running elsewhere makes it return at once.
  static void turn(void* controller);
  bool pumped_by_caller() const;

  /// With `clock=virtual` the word that holds its time, in nanoseconds from 0, which only grows; else nullptr. Lives as
  /// long as the controller. To be read by any thread, in any memory order.
  const std::atomic<std::uint64_t>* virtual_clock() const;

  // --- Address translation, as an IOMMU's driver uses it -----------------------------------------------------------

  /// Maps page-aligned memory of this process. Returns the IOVA of its first byte; the range is consecutive, congruent
  /// to the address modulo 64 KiB, never reused and never equal to a pointer. Throws Failure(EFAULT) if the memory is
  /// not there, or not writable though `writable`.
  std::uint64_t map(void* address, std::uint64_t length, bool writable);
  /// The same for memory that this process does not reach by its address: only `range.copier` does, called by the
  /// controller's threads (with `pump=caller`, by the caller's) while a command's data moves, until `unmap` has
  /// returned. Whether the memory is there is not looked at. It holds data alone: queues, lists, doorbells and the
  /// pages of admin commands in it are a violation ("foreign-access"). Throws Failure: EINVAL, ENOSPC, ENOMEM.
  std::uint64_t map(const ForeignRange& range, bool writable);
  /// Maps at an IOVA of the caller's choice, for a host in another process: `iova`, `address` and `length` are
  /// multiples of 4096, below 2^48. Nothing is touched. Throws Failure: EINVAL, EEXIST where something is mapped.
  void map_at(std::uint64_t iova, void* address, std::uint64_t length, bool writable);
  /// Unmaps exactly what one `map` returned. A range that a queued or executing command could still touch is a
  /// violation, and so is anything that was not mapped.
  void unmap(std::uint64_t iova) noexcept;

  // --- For tests ---------------------------------------------------------------------------------------------------

  const Options& options() const;
  std::vector<Violation> violations() const;
  void clear_violations();
  Counters counters() const;
  void inject(const Fault& fault);
  void clear_faults();
  /// Surprise removal: registers read as all ones, nothing completes any more. `plug` undoes it, after which the
  /// controller is in its initial state.
  void remove();
  void plug();
  /// Takes the power away from the subsystem: every controller on it resets as by `function_reset`, and of what was
  /// written and not flushed each block survives with probability `survive` (by `seed`).
  void power_cut(double survive, std::uint64_t seed);
  /// Direct access to the stored bytes, behind the protocol's back. Namespaces count from 1. Throws Failure(ERANGE).
  void peek(std::uint32_t nsid, std::uint64_t offset, void* out, std::uint64_t length) const;
  void poke(std::uint32_t nsid, std::uint64_t offset, const void* data, std::uint64_t length);
  /// Bytes of backing memory or file in use by the subsystem.
  std::uint64_t stored_bytes() const;
  /// With `clock=virtual`: the time now, and moving it on.
  std::uint64_t virtual_now_ns() const;
  void advance_ns(std::uint64_t ns);
  /// With `clock=virtual`: a turn that finds nothing to do moves time to this at most, and to this where nothing else
  /// is to come; ~0 holds nothing. For a simulation in which the host has times of its own.
  void hold_time_at(std::uint64_t ns);

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

/// Plants a fault in every controller that is made from now on, from its first register access. Thread-safe.
void inject_at_open(const Fault& fault);
/// Ends that. Controllers that are there keep theirs.
void clear_faults_at_open();

/// Named subsystems (`name=`) live until they are forgotten here. False where the name is unknown or still open.
bool forget_subsystem(const std::string& name);

}  // namespace ugds::emulator
