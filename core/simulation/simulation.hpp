// SPDX-License-Identifier: Apache-2.0
//
// Scheduling, measured: callers of one open device, each a closed loop of requests, simulated in one thread. The engine
// is the real one, and so is the controller, an emulated one with `pump=caller&clock=virtual`; what is simulated is
// time. Every caller has its turn until none has anything left to do at the present instant, and only then does time
// go on to the controller's next event. The same plan gives the same latencies, to the nanosecond, on any machine.
//
// Software costs nothing here: what is measured is the order in which requests reach the device and are served by it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/handle.hpp"
#include "engine/policy.hpp"
#include "memory/registry.hpp"
#include "nvme/commands.hpp"

namespace ugds::simulation {

/// One caller.
struct Actor {
  nvme::Opcode opcode = nvme::Opcode::read;  ///< or write
  std::uint64_t size = 0;                    ///< of each request
  /// 0: synchronous requests, one after another. Else a batch that has so many, and gets a new one for each that ended.
  std::uint32_t depth = 0;
  engine::Priority priority = engine::Priority::unsaid;
  /// Between a synchronous request's end and the next one: a time drawn evenly from 0 to twice this. The loops of
  /// callers that never pause fall into step with each other.
  std::uint64_t pause_ns = 0;
  /// A synchronous request goes to the next queue pair in a round, common to all who do so, and holds it until it has
  /// ended, while others wait for theirs in order: the policy of the uGDS paper, 2.5. To be used with kControlMode.
  bool holds_queue = false;
};

struct Span {
  std::uint64_t warm_up_ns = 0;   ///< nothing is recorded in it
  std::uint64_t duration_ns = 0;  ///< requests that end in it are
  std::uint64_t seed = 1;         ///< of pauses
};

/// What became of one actor's requests.
struct Outcome {
  std::uint64_t bytes = 0;
  std::vector<std::uint64_t> latencies;  ///< of each request, in nanoseconds, in the order in which they ended
};

/// A mode without a pacer, for what is compared with. register_control_mode() makes it known.
inline constexpr const char* kControlMode = "unpaced";
void register_control_mode();

/// Runs the actors over an open device that nobody else uses, all of them into `buffer`. Throws Failure: EINVAL (no
/// actors, a request larger than buffer or device, a device without `pump=caller&clock=virtual`, of another transport,
/// or with too few queue pairs), and what a request of an actor fails with.
std::vector<Outcome> run(engine::Handle& handle, const memory::Reference& buffer, std::span<const Actor> actors,
                         const Span& span);

}  // namespace ugds::simulation
