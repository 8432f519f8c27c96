// SPDX-License-Identifier: Apache-2.0
//
// A controller that another process serves by vfio-user (`vfio-user:/run/ssd/cntrl`): an NVMe target, a DPU's, or
// `ugds serve`. No part of it is in the kernel. Registers are messages; doorbells are memory where the server has them
// so; the server maps the memory that it is told of, which needs a descriptor for that.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "device/device.hpp"
#include "device/iova_space.hpp"
#include "device/vfio_user_connection.hpp"

namespace ugds::device {

class VfioUserDevice final : public Device {
 public:
  /// `place` is the socket, or its folder. Throws Failure.
  VfioUserDevice(std::string text, const Uri& uri);
  ~VfioUserDevice() override;

  const std::string& uri() const override { return uri_; }
  Transport transport() const override { return Transport::vfio_user; }
  Limits limits() const override { return limits_; }
  Gone gone() const override {
    return {"the server has gone: it closed the connection", "start it again, then close the device and open it again"};
  }

  const char* unreachable() const override {
    return connection_.stuck() ? "its server does not answer: it may be stopped (SIGSTOP), or its machine overloaded"
                               : "";
  }

  /// A closed connection is a device that has gone. A server that does not answer is a controller that has failed and
  /// that nobody can stop: what it was given stays held.
  std::uint32_t read32(std::uint32_t offset) override;
  std::uint64_t read64(std::uint32_t offset) override;
  void write32(std::uint32_t offset, std::uint32_t value) override;
  void write64(std::uint32_t offset, std::uint64_t value) override;
  std::uint32_t* doorbell(std::uint32_t offset) override;
  Mapping map(void* address, Bytes length, Access access, std::uint64_t* pages) override;
  void unmap(const Mapping& mapping) noexcept override;
  void set_interrupts(std::span<const int> eventfds) override;
  bool reset() noexcept override;

 private:
  /// A part of BAR0 that both sides have mapped.
  struct Area {
    std::uint64_t offset, size;
    std::byte* memory;
  };

  void find_device();
  void map_doorbells();
  void map_areas(const VfioUserConnection::Reply& reply);
  void add_area(int descriptor, std::uint64_t place, std::uint64_t offset, std::uint64_t size);
  void enable_bus_master();
  void enable_msix();
  void find_interrupts();
  void unmap_areas() noexcept;
  int access_region(bool write, std::uint32_t region, std::uint64_t offset, void* data, std::uint32_t size);
  template <class T>
  T read_config(std::uint64_t offset);
  template <class T>
  void write_config(std::uint64_t offset, T value);
  template <class T>
  T read(std::uint32_t offset);

  std::string uri_;
  VfioUserConnection connection_;
  Limits limits_;
  bool can_reset_ = false;
  std::vector<Area> areas_;
  std::mutex lock_;  ///< over space_
  IovaSpace space_;
};

}  // namespace ugds::device
