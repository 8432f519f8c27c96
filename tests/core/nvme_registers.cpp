// SPDX-License-Identifier: Apache-2.0
//
// Registers as the specification draws them (NVMe Base 2.0, 3.1.3): each field by the raw value that a controller would
// show, written out by hand.
#include <doctest/doctest.h>

#include "nvme/registers.hpp"

using namespace ugds::nvme;

TEST_CASE("registers: CAP is read field by field") {
  // MPSMAX 4, MPSMIN 1, CSS bit 37, DSTRD 2, TO 0x14, CQR, MQES 0x03ff.
  constexpr Capabilities cap{0x0041'0022'1401'03ff};
  CHECK(cap.max_queue_entries() == 1024);
  CHECK(cap.contiguous_queues_required());
  CHECK(cap.ready_timeout_ms() == 10000);
  CHECK(cap.doorbell_stride() == 16);
  CHECK(cap.nvm_command_set());
  CHECK(cap.min_page_size() == 8192);
  CHECK(cap.max_page_size() == 65536);
}

TEST_CASE("registers: CAP's extremes do not run into each other") {
  constexpr Capabilities none{0}, all{kAllOnes64};
  CHECK(none.max_queue_entries() == 1);
  CHECK(!none.contiguous_queues_required());
  CHECK(none.ready_timeout_ms() == 0);
  CHECK(none.doorbell_stride() == 4);
  CHECK(none.min_page_size() == 4096);
  CHECK(all.max_queue_entries() == 65536);
  CHECK(all.ready_timeout_ms() == 127500);
  CHECK(all.doorbell_stride() == 4u << 15);
  CHECK(all.max_page_size() == std::uint64_t{4096} << 15);
}

TEST_CASE("registers: CAP is made as it is read") {
  const Capabilities cap = Capabilities::make({.max_queue_entries = 1024,
                                               .contiguous_queues_required = true,
                                               .ready_timeout_units = 0x14,
                                               .doorbell_stride_power = 2,
                                               .min_page_power = 1,
                                               .max_page_power = 4});
  CHECK(cap.raw == 0x0041'0022'1401'03ff);
}

TEST_CASE("registers: CC holds entry sizes, page size, enable and shutdown at their places") {
  for (std::uint32_t power = 0; power <= 4; ++power) {
    const Configuration cc = Configuration::make(std::uint64_t{4096} << power);
    CHECK(cc.raw == (0x0046'0000u | power << 7));
    CHECK(cc.page_size() == std::uint64_t{4096} << power);
    CHECK(cc.submission_entry_power() == 6);
    CHECK(cc.completion_entry_power() == 4);
    CHECK(cc.command_set() == 0);
    CHECK(!cc.enabled());
    CHECK(cc.with_enabled(true).raw == (cc.raw | 1));
    CHECK(cc.with_enabled(true).with_enabled(false).raw == cc.raw);
    CHECK(cc.with_shutdown(1).raw == (cc.raw | 0x4000));
    CHECK(cc.with_shutdown(2).with_shutdown(1).shutdown_notification() == 1);
  }
}

TEST_CASE("registers: CSTS tells ready, fatal, shutdown and gone apart") {
  CHECK(ControllerStatus{0x1}.ready());
  CHECK(!ControllerStatus{0x1}.fatal());
  CHECK(ControllerStatus{0x2}.fatal());
  CHECK(ControllerStatus{0x9}.shutdown_status() == 2);
  CHECK(ControllerStatus{0x5}.shutdown_status() == 1);
  CHECK(ControllerStatus{0}.with_ready(true).with_fatal(true).with_shutdown_status(2).raw == 0xb);
  CHECK(ControllerStatus{0xffffffff}.gone());
  CHECK(!ControllerStatus{0xfffffffe}.gone());
}

TEST_CASE("registers: AQA counts from zero in both halves") {
  CHECK(AdminQueueAttributes::make(64, 128).raw == 0x007f'003f);
  CHECK(AdminQueueAttributes{0x0fff'0fff}.submission_entries() == 4096);
  CHECK(AdminQueueAttributes{0x0fff'0001}.submission_entries() == 2);
  CHECK(AdminQueueAttributes{0x0fff'0001}.completion_entries() == 4096);
}

TEST_CASE("registers: doorbells alternate and are as far apart as CAP.DSTRD says") {
  CHECK(submission_doorbell(0, 4) == 0x1000);
  CHECK(completion_doorbell(0, 4) == 0x1004);
  CHECK(submission_doorbell(1, 4) == 0x1008);
  CHECK(submission_doorbell(1, 64) == 0x1080);
  CHECK(completion_doorbell(1, 64) == 0x10c0);
  CHECK(completion_doorbell(65534, 4) == 0x1000 + 65534 * 8 + 4);
}

TEST_CASE("registers: a field replaces only its own bits") {
  CHECK(with_field<4, 3>(0xffffffffu, 0u) == 0xffffff8fu);
  CHECK(with_field<4, 3>(0u, 0xffu) == 0x70u);
  CHECK(field<60, 4>(std::uint64_t{0xf} << 60) == 0xf);
}
