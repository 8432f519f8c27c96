// SPDX-License-Identifier: Apache-2.0
//
// Identify (NVMe Base 2.0, 5.17; NVM Command Set 1.0, 4.1.5).
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "emulator/impl.hpp"

namespace ugds::emulator {

namespace status = nvme::status;

namespace {

using Page = std::array<std::byte, nvme::kIdentifySize>;

/// A structure's bytes as an Identify page.
template <class Structure>
Page page_of(const Structure& structure) {
  static_assert(sizeof(Structure) == nvme::kIdentifySize);
  Page page;
  std::memcpy(page.data(), &structure, sizeof structure);
  return page;
}

nvme::IdentifyController describe_controller(const Options& o, const Subsystem& subsystem, std::uint16_t identifier) {
  nvme::IdentifyController c{};
  c.vid = c.ssvid = kPciVendor;
  nvme::set_text(c.serial, o.serial);
  nvme::set_text(c.model, o.model);
  nvme::set_text(c.firmware, o.firmware);
  c.cmic = subsystem.is_shared() ? 2 : 0;
  c.mdts = static_cast<std::uint8_t>(o.mdts);
  c.cntlid = identifier;
  c.ver = 0x0002'0000;
  c.reserved84[111 - 84] = 1;  // CNTRLTYPE: an I/O controller
  c.oacs = o.shadow ? nvme::oacs::doorbell_buffer_config : std::uint16_t{0};
  c.acl = 3;
  c.aerl = 3;
  c.frmw = 0x3;  // one slot, read only
  c.sqes = 0x66;
  c.cqes = 0x44;
  c.nn = o.namespaces;
  c.oncs = static_cast<std::uint16_t>((o.dsm ? nvme::oncs::dataset_management : 0) |
                                      (o.zeroes ? nvme::oncs::write_zeroes : 0));
  // Bits 2:1: Flush takes the identifier of all namespaces.
  c.vwc = static_cast<std::uint8_t>((subsystem.has_write_cache() ? 1 : 0) | 6);
  const std::string name = "nqn.2024-01.io.ugds:" + (o.name.empty() ? o.serial : o.name);
  std::memcpy(c.reserved530 + (768 - 530), name.data(), std::min<std::size_t>(name.size(), 223));
  return c;
}

/// Formats 0 to 7 have blocks of 512 bytes to 64 KiB without metadata, 8 to 15 with 8 bytes of it, 16 to 23 with what
/// the options ask, if that is something else: then an index needs more than four bits.
nvme::IdentifyNamespace describe_namespace(const Geometry& g) {
  nvme::IdentifyNamespace n{};
  n.nsze = n.ncap = n.nuse = g.blocks;
  const bool special = g.metadata != 0 && g.metadata != 8;
  n.nlbaf = special ? 23 : 15;
  for (std::uint32_t i = 0; i <= n.nlbaf; ++i) {
    n.formats[i].data_power = static_cast<std::uint8_t>(9 + i % 8);
    n.formats[i].metadata = static_cast<std::uint16_t>(i < 8 ? 0 : i < 16 ? 8 : g.metadata);
  }
  const auto power = static_cast<std::uint32_t>(std::countr_zero(g.lba));
  const std::uint32_t index = power - 9 + (g.metadata == 0 ? 0 : special ? 16 : 8);
  n.flbas = static_cast<std::uint8_t>((index & 0xf) | (g.interleaved ? 0x10 : 0) | (index >> 4) << 5);
  n.mc = 3;
  n.dlfeat = 1 | 1 << 3;  // deallocated blocks read as zeros; Write Zeroes can deallocate
  return n;
}

/// A UUID (type 3) that is the same whenever the same subsystem is opened.
Page describe_identifiers(const Options& o, std::uint32_t nsid) {
  Page page{};
  std::uint64_t hash[2] = {0xcbf29ce484222325u, 0x84222325cbf29ce4u};
  for (const char c : o.serial + '/' + o.name + '/' + o.path + '/' + std::to_string(nsid))
    for (std::uint64_t& h : hash) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3u + 1;
  page[0] = std::byte{3};
  page[1] = std::byte{16};
  std::memcpy(page.data() + 4, hash, sizeof hash);
  page[4 + 6] = (page[4 + 6] & std::byte{0x0f}) | std::byte{0x80};  // version 8: of our own making
  page[4 + 8] = (page[4 + 8] & std::byte{0x3f}) | std::byte{0x80};
  return page;
}

}  // namespace

std::uint16_t Controller::Impl::identify(const Command& command) {
  const std::uint32_t nsid = command.entry.nsid;
  Page page{};
  switch (static_cast<nvme::Cns>(command.entry.cdw10 & 0xff)) {
    case nvme::Cns::controller: page = page_of(describe_controller(options, *subsystem, identifier)); break;
    case nvme::Cns::active_namespaces: {
      if (nsid >= nvme::kAllNamespaces - 1) return status::invalid_namespace;
      std::size_t at = 0;
      for (std::uint32_t next = nsid + 1; next <= options.namespaces; ++next, at += sizeof next)
        std::memcpy(page.data() + at, &next, sizeof next);
      break;
    }
    case nvme::Cns::ns:
    case nvme::Cns::descriptors:
      if (nsid < 1 || nsid > options.namespaces) {
        violations.add("nsid", "Identify of namespace %u of %u", nsid, options.namespaces);
        return status::invalid_namespace;
      }
      page = (command.entry.cdw10 & 0xff) == static_cast<std::uint32_t>(nvme::Cns::ns)
                 ? page_of(describe_namespace(subsystem->geometry()))
                 : describe_identifiers(options, nsid);
      break;
    default: return status::invalid_field;
  }
  if (command.has_fault && command.fault.kind == Fault::Kind::identify) {
    const Fault& lie = command.fault;
    const std::size_t at = lie.at < page.size() ? lie.at : 0;
    std::memcpy(page.data() + at, &lie.value, std::min<std::size_t>({lie.width, sizeof lie.value, page.size() - at}));
  }
  return send(command.transfer, page.data(), page.size());
}

}  // namespace ugds::emulator
