// SPDX-License-Identifier: Apache-2.0
#include "nvme/status.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <iterator>

namespace ugds::nvme {

namespace {

struct Row {
  std::uint16_t status;
  int code;
  const char* words;
};

// Sorted by status; the order is checked below.
constexpr Row kRows[] = {
    {0x000, 0, "success (0x000)"},
    {0x001, EOPNOTSUPP, "generic: invalid command opcode (0x001)"},
    {0x002, EINVAL, "generic: invalid field in command (0x002)"},
    {0x003, EPROTO, "generic: command identifier conflict (0x003)"},
    {0x004, EIO, "generic: data transfer error (0x004)"},
    {0x005, ECANCELED, "generic: aborted, power loss notification (0x005)"},
    {0x006, EIO, "generic: internal error (0x006)"},
    {0x007, ECANCELED, "generic: abort requested (0x007)"},
    {0x008, ECANCELED, "generic: aborted, submission queue deleted (0x008)"},
    {0x009, ECANCELED, "generic: aborted, failed fused command (0x009)"},
    {0x00a, ECANCELED, "generic: aborted, missing fused command (0x00a)"},
    {0x00b, EINVAL, "generic: invalid namespace or format (0x00b)"},
    {0x00c, EPROTO, "generic: command sequence error (0x00c)"},
    {0x00d, EINVAL, "generic: invalid SGL segment descriptor (0x00d)"},
    {0x00e, EINVAL, "generic: invalid number of SGL descriptors (0x00e)"},
    {0x00f, EINVAL, "generic: data SGL length invalid (0x00f)"},
    {0x010, EINVAL, "generic: metadata SGL length invalid (0x010)"},
    {0x011, EINVAL, "generic: SGL descriptor type invalid (0x011)"},
    {0x012, EINVAL, "generic: invalid use of controller memory buffer (0x012)"},
    {0x013, EINVAL, "generic: PRP offset invalid (0x013)"},
    {0x014, EINVAL, "generic: atomic write unit exceeded (0x014)"},
    {0x015, EACCES, "generic: operation denied (0x015)"},
    {0x016, EINVAL, "generic: SGL offset invalid (0x016)"},
    {0x018, EINVAL, "generic: host identifier inconsistent format (0x018)"},
    {0x019, ETIMEDOUT, "generic: keep alive timer expired (0x019)"},
    {0x01a, EINVAL, "generic: keep alive timeout invalid (0x01a)"},
    {0x01b, ECANCELED, "generic: aborted, preempt and abort (0x01b)"},
    {0x01c, EIO, "generic: sanitize failed (0x01c)"},
    {0x01d, EBUSY, "generic: sanitize in progress (0x01d)"},
    {0x01e, EINVAL, "generic: SGL data block granularity invalid (0x01e)"},
    {0x01f, EOPNOTSUPP, "generic: command not supported for queue in CMB (0x01f)"},
    {0x020, EROFS, "generic: namespace is write protected (0x020)"},
    {0x021, EINTR, "generic: command interrupted (0x021)"},
    {0x022, EAGAIN, "generic: transient transport error (0x022)"},
    {0x023, EPERM, "generic: prohibited by command and feature lockdown (0x023)"},
    {0x024, EAGAIN, "generic: admin command media not ready (0x024)"},
    {0x080, ERANGE, "generic: LBA out of range (0x080)"},
    {0x081, ENOSPC, "generic: capacity exceeded (0x081)"},
    {0x082, EAGAIN, "generic: namespace not ready (0x082)"},
    {0x083, EBUSY, "generic: reservation conflict (0x083)"},
    {0x084, EBUSY, "generic: format in progress (0x084)"},
    {0x100, EINVAL, "command specific: completion queue invalid (0x100)"},
    {0x101, EINVAL, "command specific: invalid queue identifier (0x101)"},
    {0x102, EINVAL, "command specific: invalid queue size (0x102)"},
    {0x103, EBUSY, "command specific: abort command limit exceeded (0x103)"},
    {0x105, EBUSY, "command specific: asynchronous event request limit exceeded (0x105)"},
    {0x106, EINVAL, "command specific: invalid firmware slot (0x106)"},
    {0x107, EINVAL, "command specific: invalid firmware image (0x107)"},
    {0x108, EINVAL, "command specific: invalid interrupt vector (0x108)"},
    {0x109, EINVAL, "command specific: invalid log page (0x109)"},
    {0x10a, EINVAL, "command specific: invalid format (0x10a)"},
    {0x10c, EINVAL, "command specific: invalid queue deletion (0x10c)"},
    {0x10d, EINVAL, "command specific: feature identifier not saveable (0x10d)"},
    {0x10e, EINVAL, "command specific: feature not changeable (0x10e)"},
    {0x10f, EINVAL, "command specific: feature not namespace specific (0x10f)"},
    {0x115, ENOSPC, "command specific: namespace insufficient capacity (0x115)"},
    {0x116, ENOSPC, "command specific: namespace identifier unavailable (0x116)"},
    {0x118, EBUSY, "command specific: namespace already attached (0x118)"},
    {0x119, EACCES, "command specific: namespace is private (0x119)"},
    {0x11a, EINVAL, "command specific: namespace not attached (0x11a)"},
    {0x180, EINVAL, "command specific: conflicting attributes (0x180)"},
    {0x181, EINVAL, "command specific: invalid protection information (0x181)"},
    {0x182, EROFS, "command specific: attempted write to read only range (0x182)"},
    {0x183, EINVAL, "command specific: command size limit exceeded (0x183)"},
    {0x1b8, EINVAL, "command specific: zoned boundary error (0x1b8)"},
    {0x1b9, ENOSPC, "command specific: zone is full (0x1b9)"},
    {0x1ba, EROFS, "command specific: zone is read only (0x1ba)"},
    {0x1bb, EIO, "command specific: zone is offline (0x1bb)"},
    {0x1bc, EINVAL, "command specific: zone invalid write (0x1bc)"},
    {0x280, EIO, "media error: write fault (0x280)"},
    {0x281, EIO, "media error: unrecovered read error (0x281)"},
    {0x282, EILSEQ, "media error: end-to-end guard check error (0x282)"},
    {0x283, EILSEQ, "media error: end-to-end application tag check error (0x283)"},
    {0x284, EILSEQ, "media error: end-to-end reference tag check error (0x284)"},
    {0x285, EIO, "media error: compare failure (0x285)"},
    {0x286, EACCES, "media error: access denied (0x286)"},
    {0x287, EIO, "media error: deallocated or unwritten logical block (0x287)"},
    {0x288, EILSEQ, "media error: end-to-end storage tag check error (0x288)"},
    {0x300, EIO, "path: internal path error (0x300)"},
    {0x301, EIO, "path: asymmetric access persistent loss (0x301)"},
    {0x302, EIO, "path: asymmetric access inaccessible (0x302)"},
    {0x303, EAGAIN, "path: asymmetric access transition (0x303)"},
    {0x360, EIO, "path: controller pathing error (0x360)"},
    {0x370, EIO, "path: host pathing error (0x370)"},
    {0x371, ECANCELED, "path: command aborted by host (0x371)"},
};

constexpr bool sorted() {
  for (std::size_t i = 1; i < std::size(kRows); ++i)
    if (kRows[i - 1].status >= kRows[i].status) return false;
  return true;
}
static_assert(sorted());

const Row* find(std::uint16_t status) {
  const Row* row = std::lower_bound(std::begin(kRows), std::end(kRows), status,
                                    [](const Row& r, std::uint16_t s) { return r.status < s; });
  return row != std::end(kRows) && row->status == status ? row : nullptr;
}

const char* type_words(std::uint16_t status) {
  switch (static_cast<StatusType>(status >> 8 & 7)) {
    case StatusType::generic: return "generic";
    case StatusType::command_specific: return "command specific";
    case StatusType::media: return "media error";
    case StatusType::path: return "path";
    case StatusType::vendor: return "vendor specific";
  }
  return "reserved status type";
}

}  // namespace

const char* status_words(std::uint16_t status) {
  if (const Row* row = find(status)) return row->words;
  thread_local char text[64];
  std::snprintf(text, sizeof text, "%s: code 0x%02x (0x%03x)", type_words(status), status & 0xff, status);
  return text;
}

int status_errno(std::uint16_t status) {
  const Row* row = find(status);
  return row != nullptr ? row->code : EIO;
}

const char* status_hint(std::uint16_t status) {
  switch (status) {
    case status::unrecovered_read_error: return "the blocks cannot be read; restore them from a copy and rewrite them";
    case status::write_fault: return "the device could not store the data; check its health (SMART) and replace it";
    case status::namespace_write_protected: return "the namespace is write protected; clear the protection";
    case status::lba_out_of_range: return "the range lies beyond the namespace; compare it with the device's size";
    case status::capacity_exceeded: return "the device is full; free space on it";
    case status::invalid_prp_offset:
    case status::data_transfer_error: return "the device could not reach the memory; check the IOMMU's log";
    case status::internal_error:
      return "the device failed in itself: repeat the request, and if that fails too, look at its health (SMART) and "
             "firmware";
    case 0x015:
    case 0x023:
    case 0x286: return "the device forbids it: look at its locks, reservations and lockdown";
    case 0x083: return "another host holds a reservation; release it there";
    case 0x01d:
    case 0x084: return "the device is being sanitized or formatted; wait until that is done";
    case 0x182:
    case 0x1ba: return "the range is read-only: write elsewhere, or make it writable";
    case 0x021:
    case 0x022:
    case 0x024:
    case status::namespace_not_ready:
    case 0x303: return "repeat the request after a moment";
    case 0x282:
    case 0x283:
    case 0x284:
    case 0x288:
      return "the stored data and its protection do not agree; restore the blocks from a copy and rewrite them";
    case 0x287: return "the blocks were never written, or were discarded; write them first";
    case 0x300:
    case 0x301:
    case 0x302:
    case 0x360:
    case 0x370: return "the path to the device has failed; look at its link, or use another";
    default: return "";
  }
}

}  // namespace ugds::nvme
