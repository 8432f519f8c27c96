// SPDX-License-Identifier: Apache-2.0
//
// One client and what it has of the controller, from its first message to its end: memory, eventfds, configuration.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "emulator/controller.hpp"
#include "serve/client_memory.hpp"
#include "serve/config_space.hpp"
#include "serve/connection.hpp"
#include "serve/irqs.hpp"

namespace ugds::serve {

class Session {
 public:
  /// The controller is in its initial state. `wake` is written to when memory of the client's is lost. Throws Failure
  /// where there is no memory for the doorbells.
  Session(emulator::Controller& controller, int wake);
  /// Stops the controller, which then has nothing of the client's any more.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  /// Does what a message asks and answers it. Throws Failure, whose code is the answer.
  Reply handle(Request& request);
  /// Whether the client's protocol is agreed on: nothing else comes before that.
  bool negotiated() const { return negotiated_; }
  bool memory_lost() const { return memory_.lost(); }

 private:
  struct Region {
    std::uint64_t size = 0;
    std::uint32_t flags = 0;
  };

  Region region(std::uint32_t index) const;
  Reply negotiate(const Request& request);
  Reply unmap(const Request& request);
  Reply device_info(const Request& request) const;
  Reply region_info(const Request& request) const;
  Reply irq_info(const Request& request) const;
  Reply read(const Request& request);
  Reply write(const Request& request);
  void read_region(std::uint32_t index, std::uint64_t offset, std::span<std::byte> out);
  void write_region(std::uint32_t index, std::uint64_t offset, std::span<const std::byte> data);
  void reset();

  emulator::Controller& controller_;
  int doorbells_ = -1;  ///< descriptor of their memory; -1 where every ring is a message
  std::uint64_t doorbell_area_;
  std::uint64_t bar0_size_;
  bool negotiated_ = false;
  ConfigSpace config_;
  MsixTable table_;
  ClientMemory memory_;
  Irqs irqs_;
};

}  // namespace ugds::serve
