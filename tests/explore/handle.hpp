// SPDX-License-Identifier: Apache-2.0
//
// An open handle of an execution, the calls that its threads make, and the end: what must be true when all of them have
// returned.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>

#include "buffers.hpp"
#include "engine/batch.hpp"
#include "engine/handle.hpp"
#include "engine/one_command.hpp"
#include "stand_ins.hpp"
#include "threads.hpp"

namespace ugds::explore {

/// How a request goes.
enum class Way : std::uint8_t { operation, short_way };

class Opened : public World {
 public:
  explicit Opened(const Traits& traits, std::uint32_t depth = 3);
  ~Opened() override;

  engine::Handle& handle() { return *handle_; }
  Controller& device() { return *Controller::living; }
  Buffer& a() { return *buffers_[0]; }
  Buffer& b() { return *buffers_[1]; }

  /// A request over whole pages of a buffer, to its end. Its result.
  std::int64_t read(Way way, memory::Reference memory, Buffer& buffer, std::size_t first, std::uint64_t lba,
                    std::size_t pages = 1, const engine::Interrupt& interrupt = {});
  std::int64_t write(Way way, Buffer& buffer, std::size_t first, std::uint64_t lba);

  /// Runs the threads, and then the end.
  void run(const std::vector<Body>& bodies, Fineness fineness = {});

  std::uint32_t device_actions() override { return Controller::living != nullptr ? device().actions() : 0; }
  bool device_has_work() override { return Controller::living != nullptr && device().has_work(); }
  void act(std::uint32_t action) override { device().act(action); }
  std::string name_of(std::uint32_t action) override { return device().name_of(action); }
  bool quiet() override { return quiet_; }
  void check() override;

 private:
  std::int64_t run_transfer(Way way, const engine::Transfer& transfer, const engine::Interrupt& interrupt);
  void end();

  std::unique_ptr<engine::Handle> handle_;
  std::unique_ptr<Buffer> buffers_[2];
  bool quiet_ = false;
};

}  // namespace ugds::explore
