// SPDX-License-Identifier: Apache-2.0
//
// What the library says where the kernel helper is not there, is another version, or refuses. That it works is shown in
// a virtual machine (tests/vm).
#include <doctest/doctest.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "base/error.hpp"
#include "base/text.hpp"
#include "device/device.hpp"
#include "device/ugds_drv_words.hpp"
#include "uapi/ugds_drv.h"

using namespace ugds;

namespace {

template <class Body>
Error error_of(Body body) {
  try {
    body();
  } catch (const Failure& failure) {
    return failure.error();
  }
  FAIL("it did not fail");
  return {};
}

Error open_error(const std::string& uri) {
  return error_of([&] { device::open(uri, parse_uri(uri)); });
}

bool holds(const char* text, const char* part) { return std::string(text).find(part) != std::string::npos; }

}  // namespace

TEST_CASE("ugds_drv: another version of the helper is refused, and which of the two is to be replaced is said") {
  const Error newer = error_of([] { device::fail_version("/dev/ugds_drv0", 0, UGDS_DRV_API_VERSION + 1); });
  CHECK(newer.code == EPROTO);
  CHECK(holds(newer.cause, ("version " + std::to_string(UGDS_DRV_API_VERSION + 1)).c_str()));
  CHECK(holds(newer.hint, "newer release of this library"));
  const Error older = error_of([] { device::fail_version("/dev/ugds_drv0", 0, UGDS_DRV_API_VERSION - 1); });
  CHECK(holds(older.hint, "load the newer ugds_drv"));
  const Error other = error_of([] { device::fail_version("/dev/ugds_drv0", -ENOTTY, 0); });
  CHECK(other.code == EPROTO);
  CHECK(holds(other.cause, "does not answer"));
  CHECK(holds(other.hint, "drv/README.md"));
}

TEST_CASE("ugds_drv: what is no node of its is refused") {
  CHECK(open_error("/dev/ugds_drv-none").code == ENOENT);
  // What is not named like one is a file, or none.
  CHECK(open_error("/dev/no-such-node").code == ENOENT);
  const Error error = open_error("/dev/null");
  CHECK(error.code == EINVAL);
  CHECK(holds(error.cause, "neither a regular file nor a block device"));
  CHECK(error.hint[0] != '\0');
  CHECK(open_error("/dev/ugds_drv0?fd=1000000").code == EBADF);
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const Error pipe_error = open_error("/dev/ugds_drv0?fd=" + std::to_string(ends[0]));
  CHECK(pipe_error.code == EINVAL);
  CHECK(holds(pipe_error.cause, "none of ugds_drv's"));
  close(ends[0]);
  close(ends[1]);
  CHECK(holds(open_error("/dev/ugds_drv0?df=3").hint, "interrupts and fd"));
  CHECK(open_error("/dev/ugds_drv0?iommu=type1").code == EINVAL);
}

TEST_CASE("ugds_drv: every reason of the helper's has words, and the placement of memory is told in numbers") {
  for (std::uint32_t reason = UGDS_DRV_REASON_ARGUMENT; reason <= UGDS_DRV_REASON_NOT_BUILT; ++reason) {
    CAPTURE(reason);
    if (reason == UGDS_DRV_REASON_ARRAY || reason == UGDS_DRV_REASON_TOKEN || reason == UGDS_DRV_REASON_MAPPED)
      continue;
    CHECK(device::reason_words(reason, EINVAL) != device::reason_words(0, EINVAL));
  }
  const Error moved = error_of([] { device::fail_to_import(EXDEV, UGDS_DRV_REASON_NOT_PEER, 4096, Bytes(65536)); });
  CHECK(moved.code == EOPNOTSUPP);
  CHECK(holds(moved.cause, "only 4 KiB of 64 KiB"));
  CHECK(holds(moved.hint, "no direct route"));
  const Error far = error_of([] { device::fail_to_import(EREMOTEIO, UGDS_DRV_REASON_EXPORTER, 0, Bytes(4096)); });
  CHECK(far.code == EOPNOTSUPP);
  CHECK(holds(far.hint, "ugds devices"));
  const Error limit = error_of([] { device::fail_to_map_host(ENOMEM, UGDS_DRV_REASON_LIMIT, Bytes(4096)); });
  CHECK(limit.code == ENOMEM);
  CHECK(holds(limit.hint, "ulimit -l"));
  CHECK(error_of([] { device::fail_to_map_host(ENODEV, 0, Bytes(4096)); }).code == ENODEV);
}
