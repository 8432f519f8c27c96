// SPDX-License-Identifier: Apache-2.0
//
// Identify data structures (NVMe Base 2.0, 5.17.2.1; NVM Command Set 1.0, 4.1.5.1): the fields that are used, at their
// places.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ugds::nvme {

inline constexpr std::size_t kIdentifySize = 4096;

/// CNS values of Identify.
enum class Cns : std::uint8_t { ns = 0x00, controller = 0x01, active_namespaces = 0x02, descriptors = 0x03 };

#pragma pack(push, 1)

struct IdentifyController {
  std::uint16_t vid;
  std::uint16_t ssvid;
  char serial[20];
  char model[40];
  char firmware[8];
  std::uint8_t rab;
  std::uint8_t ieee[3];
  std::uint8_t cmic;
  std::uint8_t mdts;  ///< largest transfer, a power of two in units of CAP.MPSMIN; 0: the device states no limit
  std::uint16_t cntlid;
  std::uint32_t ver;
  std::uint8_t reserved84[172];
  std::uint16_t oacs;  ///< bit 8: Doorbell Buffer Config
  std::uint8_t acl;    ///< aborts at once, 0-based
  std::uint8_t aerl;
  std::uint8_t frmw;
  std::uint8_t lpa;
  std::uint8_t elpe;
  std::uint8_t npss;
  std::uint8_t reserved264[248];
  std::uint8_t sqes;
  std::uint8_t cqes;
  std::uint16_t maxcmd;
  std::uint32_t nn;    ///< highest namespace identifier
  std::uint16_t oncs;  ///< bit 2: Dataset Management, bit 3: Write Zeroes
  std::uint16_t fuses;
  std::uint8_t fna;
  std::uint8_t vwc;  ///< bit 0: a volatile write cache is present
  std::uint16_t awun;
  std::uint16_t awupf;
  std::uint8_t reserved530[3566];
};
static_assert(sizeof(IdentifyController) == kIdentifySize);
static_assert(offsetof(IdentifyController, mdts) == 77);
static_assert(offsetof(IdentifyController, oacs) == 256);
static_assert(offsetof(IdentifyController, sqes) == 512);
static_assert(offsetof(IdentifyController, nn) == 516);
static_assert(offsetof(IdentifyController, oncs) == 520);
static_assert(offsetof(IdentifyController, vwc) == 525);

struct LbaFormat {
  std::uint16_t metadata;   ///< bytes a block
  std::uint8_t data_power;  ///< block size as a power of two; 0: not available
  std::uint8_t performance;
};

struct IdentifyNamespace {
  std::uint64_t nsze;  ///< size in blocks
  std::uint64_t ncap;
  std::uint64_t nuse;
  std::uint8_t nsfeat;
  std::uint8_t nlbaf;  ///< formats, 0-based
  std::uint8_t flbas;  ///< format in use: index bits 3:0 here, 5:4 in bits 6:5; bit 4: metadata is interleaved
  std::uint8_t mc;
  std::uint8_t dpc;
  std::uint8_t dps;
  std::uint8_t nmic;
  std::uint8_t rescap;
  std::uint8_t fpi;
  std::uint8_t dlfeat;
  std::uint8_t reserved34[94];
  LbaFormat formats[64];
  std::uint8_t vendor[3712];
};
static_assert(sizeof(IdentifyNamespace) == kIdentifySize);
static_assert(offsetof(IdentifyNamespace, formats) == 128);

#pragma pack(pop)

namespace oacs {
inline constexpr std::uint16_t doorbell_buffer_config = 1u << 8;
}
namespace oncs {
inline constexpr std::uint16_t dataset_management = 1u << 2;
inline constexpr std::uint16_t write_zeroes = 1u << 3;
}  // namespace oncs

/// Index of the format in use: all six bits of it. The upper two count only where more than 16 formats exist.
constexpr std::uint32_t format_index(std::uint8_t flbas, std::uint8_t nlbaf) {
  std::uint32_t index = flbas & 0x0fu;
  if (nlbaf >= 16) index |= (flbas >> 5 & 3u) << 4;
  return index;
}
static_assert(format_index(0x00, 0) == 0 && format_index(0x21, 63) == 17 && format_index(0x61, 0) == 1);

constexpr bool metadata_interleaved(std::uint8_t flbas) { return (flbas & 0x10) != 0; }

/// An ASCII field, padded with spaces, as the specification writes it.
template <std::size_t n>
void set_text(char (&out)[n], std::string_view text) {
  for (std::size_t i = 0; i < n; ++i) out[i] = i < text.size() ? text[i] : ' ';
}

/// Such a field without its padding; bytes that are not printable ASCII become '?'.
inline std::string get_text(const char* in, std::size_t n) {
  std::string text(in, n);
  for (char& c : text)
    if (c < ' ' || c > '~') c = '?';
  while (!text.empty() && (text.back() == ' ' || text.back() == '?')) text.pop_back();
  return text;
}

}  // namespace ugds::nvme
