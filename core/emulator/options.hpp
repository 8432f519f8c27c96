// SPDX-License-Identifier: Apache-2.0
//
// Everything that can be set of an emulated controller, each by a URI parameter of the same name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace ugds::emulator {

enum class Order : std::uint8_t { fifo, reverse, random };
/// When a completion queue that has interrupts sends one.
enum class Interrupts : std::uint8_t {
  every,     ///< for every turn that posted to it
  adaptive,  ///< only if it was empty before, as far as its head doorbell says
};

/// As many as MSI-X has.
inline constexpr std::uint32_t kMaxVectors = 2048;
inline constexpr std::uint32_t kMaxSlots = 65536, kMaxBurst = 64, kMaxCopiers = 64;

struct Options {
  // What the URI's path says: a size, or a file that keeps the data.
  std::uint64_t size = 0;  ///< bytes of each namespace, a multiple of the block size
  std::string path;        ///< empty: in memory
  std::string name;        ///< empty: a subsystem of its own

  // The medium.
  std::uint32_t lba = 4096;      ///< block size: 512 to 65536, a power of two
  std::uint32_t metadata = 0;    ///< bytes a block
  bool interleaved = false;      ///< metadata follows each block in the data (an extended LBA)
  std::uint32_t namespaces = 1;  ///< 1 to 16
  bool vwc = true;               ///< a volatile write cache: what is not flushed does not survive `power_cut`

  // The controller.
  std::uint32_t mdts = 5;                ///< largest transfer, a power of two of the minimal page; 0: states none
  std::uint32_t queues = 8;              ///< I/O queue pairs that are granted: 0 to 65534
  std::uint32_t depth = 1024;            ///< entries a queue may have: 2 to 65536
  std::uint32_t stride = 0;              ///< CAP.DSTRD: 0 to 15
  std::uint32_t mpsmin = 0, mpsmax = 0;  ///< powers of two over 4 KiB: 0 to 4
  std::uint32_t timeout = 2;             ///< CAP.TO, in units of 500 ms: 1 to 255
  bool contiguous = true;                ///< CAP.CQR
  std::uint32_t slots = 0;               ///< most I/O commands that it works on at once: 0 (no bound) to 65536
  std::uint32_t burst = kMaxBurst;       ///< entries fetched from one queue before the next has its turn: 1 to 64
  bool shadow = true;                    ///< offers Doorbell Buffer Config
  bool trapped = false;                  ///< `doorbells=trapped`: no doorbell is mapped
  bool dsm = true;                       ///< offers Dataset Management
  bool zeroes = true;                    ///< offers Write Zeroes
  std::optional<std::uint32_t> vectors;  ///< of MSI-X; see `vector_count`
  Interrupts interrupts = Interrupts::every;
  bool initially_enabled = false;  ///< `enabled=1`: found with CC.EN and CSTS.RDY set, as a boot loader leaves it
  std::uint64_t ready_ns = 0;      ///< `ready=`: from CC.EN to CSTS.RDY, either way
  std::string serial = "uGDS0001", model = "uGDS emulated NVMe controller", firmware = "1.0";

  // Its timing. Zero means: as fast as the copy.
  std::uint64_t latency_ns = 0;  ///< `latency=20us`: of each read and write
  std::uint64_t bandwidth = 0;   ///< `bandwidth=5.5GiB/s`: bytes a second through one pipe
  std::uint64_t iops = 0;        ///< commands a second through the same pipe
  Order order = Order::fifo;     ///< of completions among those that are due
  std::uint64_t seed = 1;        ///< of `order=random`
  bool virtual_clock = false;    ///< `clock=virtual`: time passes only when the controller has nothing due

  // Who runs it.
  std::uint32_t copiers = 0;        ///< threads that share the copies of large commands: 0 to 64
  bool pump_by_caller = false;      ///< `pump=caller`
  std::uint64_t idle_ns = 200'000;  ///< `idle=200us`: how long its thread polls before it sleeps

  /// Interrupt vectors: as asked for, else one for each queue and one for the admin queue, as far as MSI-X goes.
  std::uint32_t vector_count() const { return vectors.value_or(queues < kMaxVectors ? queues + 1 : kMaxVectors); }
};

/// One parameter, for documentation and for messages: `ugds info --parameters` and docs/emulator.md print this table.
struct Parameter {
  const char* name;
  const char* values;
  const char* meaning;
};
const std::vector<Parameter>& parameters();

/// `place` is what stands between "emulated:" and "?": a size such as 1GiB, or a path. Throws ugds::Failure(EINVAL)
/// that names the parameter, what it accepts and, for an unknown one, the nearest that exists. Values are already
/// decoded.
Options parse_options(const std::string& place, const std::vector<std::pair<std::string, std::string>>& query);

/// Refuses what `parse_options` would, for options that were filled in otherwise. Throws ugds::Failure(EINVAL).
void check_options(const Options& options);

}  // namespace ugds::emulator
