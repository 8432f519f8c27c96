// SPDX-License-Identifier: Apache-2.0
#include "emulator/options.hpp"

#include <bit>
#include <cerrno>

#include "base/error.hpp"
#include "base/text.hpp"
#include "base/units.hpp"
#include "nvme/commands.hpp"
#include "nvme/registers.hpp"

namespace ugds::emulator {

namespace {

/// Sizes beyond this would need page tables of their own; nothing that is tested does.
constexpr std::uint64_t kMaxStoredBytes = std::uint64_t{1} << 56;

[[noreturn]] void refuse(const std::string& name, const std::string& value, const std::string& accepted) {
  fail(EINVAL, "open", "parameter " + name + "=" + value + " is not accepted", name + " accepts " + accepted);
}

std::uint64_t number(const char* name, const std::string& value, std::uint64_t low, std::uint64_t high) {
  return parse_number(value, std::string("parameter ") + name, low, high);
}

std::uint32_t number32(const char* name, const std::string& value, std::uint32_t low, std::uint32_t high) {
  return static_cast<std::uint32_t>(number(name, value, low, high));
}

/// An Identify field: printable ASCII that fits.
std::string field_text(const char* name, const std::string& value, std::size_t longest) {
  const std::string accepted = "printable ASCII, 1 to " + std::to_string(longest) + " characters";
  if (value.empty() || value.size() > longest) refuse(name, value, accepted);
  for (const char c : value)
    if (c < ' ' || c > '~') refuse(name, value, accepted);
  return value;
}

struct Entry {
  Parameter parameter;
  void (*set)(Options& options, const char* name, const std::string& value);
};

#define UGDS_SET [](Options & o, const char* name, const std::string& value)

/// The only list of parameters: the parser, the documentation and the messages are all made of it.
const std::vector<Entry>& entries() {
  static const std::vector<Entry> table = {
      {{"size", "a size", "bytes of each namespace; needed for a file that does not exist yet"},
       UGDS_SET{o.size = parse_size(value, std::string("parameter ") + name);
}
}  // namespace
, {{"file", "a path", "keeps the data in this file; the same as a path for a place"},
   UGDS_SET{if (value.empty()) refuse(name, value, "a path");
o.path = value;
}  // namespace ugds::emulator
}
, {{"name", "text", "shares the data with every controller opened under the same name"},
   UGDS_SET{if (value.empty()) refuse(name, value, "any text that is not empty");
o.name = value;
}
}
, {{"lba", "512 to 64KiB, a power of two", "block size"},
   UGDS_SET{const std::uint64_t lba = parse_size(value, std::string("parameter ") + name);
if (lba < 512 || lba > 65536 || !std::has_single_bit(lba)) refuse(name, value, "512 to 65536, a power of two");
o.lba = static_cast<std::uint32_t>(lba);
}
}
, {{"metadata", "0 to 4096", "bytes of metadata a block"}, UGDS_SET{o.metadata = number32(name, value, 0, 4096);
}
}
, {{"interleaved", "0 or 1", "metadata follows each block in the data instead of having a buffer of its own"},
   UGDS_SET{o.interleaved = parse_switch(value, name);
}
}
, {{"namespaces", "1 to 16", "namespaces, all of the same geometry"},
   UGDS_SET{o.namespaces = number32(name, value, 1, 16);
}
}
, {{"vwc", "0 or 1", "has a volatile write cache: what is not flushed may not survive a power cut"},
   UGDS_SET{o.vwc = parse_switch(value, name);
}
}
, {{"mdts", "0 to 20", "largest transfer, a power of two of the minimal page; 0: the device states none"},
   UGDS_SET{o.mdts = number32(name, value, 0, 20);
}
}
, {{"queues", "0 to 65534", "I/O queue pairs that are granted"},
   UGDS_SET{o.queues = number32(name, value, 0, nvme::kMaxIoQueues);
}
}
, {{"depth", "2 to 65536", "entries that a queue may have"}, UGDS_SET{o.depth = number32(name, value, 2, 65536);
}
}
, {{"slots", "0 to 65536", "I/O commands worked on at once; the rest stay in their queues; 0: no bound"},
   UGDS_SET{o.slots = number32(name, value, 0, kMaxSlots);
}
}
, {{"burst", "1 to 64", "entries fetched from one queue before the next has its turn"},
   UGDS_SET{o.burst = number32(name, value, 1, kMaxBurst);
}
}
, {{"stride", "0 to 15", "doorbells are 4 << stride bytes apart"}, UGDS_SET{o.stride = number32(name, value, 0, 15);
}
}
, {{"mpsmin", "0 to 4", "smallest memory page, a power of two over 4 KiB"},
   UGDS_SET{o.mpsmin = number32(name, value, 0, 4);
}
}
, {{"mpsmax", "0 to 4", "largest memory page, a power of two over 4 KiB"},
   UGDS_SET{o.mpsmax = number32(name, value, 0, 4);
}
}
, {{"timeout", "1 to 255", "CAP.TO: longest time to become ready, in units of 500 ms"},
   UGDS_SET{o.timeout = number32(name, value, 1, 255);
}
}
, {{"contiguous", "0 or 1", "CAP.CQR: queues must be contiguous in memory"},
   UGDS_SET{o.contiguous = parse_switch(value, name);
}
}
, {{"shadow", "0 or 1", "offers shadow doorbells (Doorbell Buffer Config)"},
   UGDS_SET{o.shadow = parse_switch(value, name);
}
}
, {{"doorbells", "mapped or trapped", "whether doorbells are memory, or every ring is a register write"},
   UGDS_SET{if (value != "mapped" && value != "trapped") refuse(name, value, "mapped or trapped");
o.trapped = value == "trapped";
}
}
, {{"vectors", "0 to 2048", "MSI-X vectors; by itself one for each queue and one for the admin queue"},
   UGDS_SET{o.vectors = number32(name, value, 0, kMaxVectors);
}
}
, {{"notify", "every or adaptive", "adaptive: one comes only if the completion queue was empty, by its head doorbell"},
   UGDS_SET{if (value != "every" && value != "adaptive") refuse(name, value, "every or adaptive");
o.interrupts = value == "adaptive" ? Interrupts::adaptive : Interrupts::every;
}
}
, {{"dsm", "0 or 1", "offers Dataset Management"}, UGDS_SET{o.dsm = parse_switch(value, name);
}
}
, {{"zeroes", "0 or 1", "offers Write Zeroes"}, UGDS_SET{o.zeroes = parse_switch(value, name);
}
}
, {{"enabled", "0 or 1", "is found with CC.EN and CSTS.RDY set, as a boot loader leaves it"},
   UGDS_SET{o.initially_enabled = parse_switch(value, name);
}
}
, {{"ready", "a time, at most 127s", "from CC.EN to CSTS.RDY, either way"},
   UGDS_SET{o.ready_ns = parse_duration_ns(value, name);
if (o.ready_ns > 127'000'000'000) refuse(name, value, "0 to 127s");
}
}
, {{"serial", "up to 20 characters", "serial number"}, UGDS_SET{o.serial = field_text(name, value, 20);
}
}
, {{"model", "up to 40 characters", "model number"}, UGDS_SET{o.model = field_text(name, value, 40);
}
}
, {{"firmware", "up to 8 characters", "firmware revision"}, UGDS_SET{o.firmware = field_text(name, value, 8);
}
}
, {{"latency", "a time, at most 60s", "of each read and write"}, UGDS_SET{o.latency_ns = parse_duration_ns(value, name);
if (o.latency_ns > 60'000'000'000) refuse(name, value, "0 to 60s");
}
}
, {{"bandwidth", "a size a second", "through one pipe; 0: no limit"},
   UGDS_SET{o.bandwidth = parse_size(value, std::string("parameter ") + name);
}
}
, {{"iops", "0 to 1000000000", "reads and writes a second through the same pipe; 0: no limit"},
   UGDS_SET{o.iops = number(name, value, 0, 1'000'000'000);
}
}
, {{"order", "fifo, reverse or random", "of completions among the commands that are due"},
   UGDS_SET{if (value == "fifo"){o.order = Order::fifo;
}
else if (value == "reverse") {
  o.order = Order::reverse;
}
else if (value == "random") {
  o.order = Order::random;
}
else {
  refuse(name, value, "fifo, reverse or random");
}
}
}
, {{"seed", "0 to 2^64-1", "of order=random"}, UGDS_SET{o.seed = number(name, value, 0, ~std::uint64_t{0});
}
}
, {{"clock", "real or virtual", "virtual: time passes only when the controller has nothing due"},
   UGDS_SET{if (value != "real" && value != "virtual") refuse(name, value, "real or virtual");
o.virtual_clock = value == "virtual";
}
}
, {{"pump", "thread or caller", "caller: no thread; each empty poll turn of the caller runs one controller turn"},
   UGDS_SET{if (value != "thread" && value != "caller") refuse(name, value, "thread or caller");
o.pump_by_caller = value == "caller";
}
}
, {{"copiers", "0 to 64", "threads that share the copies of commands of 128 KiB and more; needs clock=real"},
   UGDS_SET{o.copiers = number32(name, value, 0, kMaxCopiers);
}
}
, {{"idle", "a time, at most 60s", "how long the controller's thread polls before it sleeps"},
   UGDS_SET{o.idle_ns = parse_duration_ns(value, name);
if (o.idle_ns > 60'000'000'000) refuse(name, value, "0 to 60s");
}
}
,
}
;
return table;
}

#undef UGDS_SET

void parse_place(Options& options, const std::string& place) {
  if (place.find('/') != std::string::npos) {
    options.path = place;
  } else if (!place.empty()) {
    try {
      options.size = parse_size(place, "size");
    } catch (const Failure&) {
      fail(EINVAL, "open", "\"" + place + "\" is neither a size nor a path",
           "write a size, such as emulated:1GiB, or a path with a \"/\", such as emulated:./image");
    }
  }
}

}  // namespace

const std::vector<Parameter>& parameters() {
  static const std::vector<Parameter> list = [] {
    std::vector<Parameter> all;
    for (const Entry& entry : entries()) all.push_back(entry.parameter);
    return all;
  }();
  return list;
}

void check_options(const Options& o) {
  if (o.lba < 512 || o.lba > 65536 || !std::has_single_bit(o.lba))
    refuse("lba", std::to_string(o.lba), "512 to 65536, a power of two");
  if (o.metadata > 4096) refuse("metadata", std::to_string(o.metadata), "0 to 4096");
  if (o.interleaved && o.metadata == 0) refuse("interleaved", "1", "1 only together with metadata=");
  if (o.namespaces < 1 || o.namespaces > 16) refuse("namespaces", std::to_string(o.namespaces), "1 to 16");
  if (o.mdts > 20) refuse("mdts", std::to_string(o.mdts), "0 to 20");
  if (o.queues > nvme::kMaxIoQueues) refuse("queues", std::to_string(o.queues), "0 to 65534");
  if (o.depth < 2 || o.depth > 65536) refuse("depth", std::to_string(o.depth), "2 to 65536");
  if (o.slots > kMaxSlots) refuse("slots", std::to_string(o.slots), "0 to 65536");
  if (o.burst < 1 || o.burst > kMaxBurst) refuse("burst", std::to_string(o.burst), "1 to 64");
  if (o.copiers > kMaxCopiers) refuse("copiers", std::to_string(o.copiers), "0 to 64");
  if (o.copiers != 0 && o.virtual_clock)
    refuse("copiers", std::to_string(o.copiers), "only 0 with clock=virtual, where every run is to be the same");
  if (o.stride > 15) refuse("stride", std::to_string(o.stride), "0 to 15");
  if (o.mpsmax > 4) refuse("mpsmax", std::to_string(o.mpsmax), "0 to 4");
  if (o.mpsmin > o.mpsmax)
    refuse("mpsmin", std::to_string(o.mpsmin), "0 to mpsmax, which is " + std::to_string(o.mpsmax));
  if (o.vector_count() > kMaxVectors) refuse("vectors", std::to_string(o.vector_count()), "0 to 2048");
  if (o.timeout < 1 || o.timeout > 255) refuse("timeout", std::to_string(o.timeout), "1 to 255");
  if (nvme::kDoorbellBase + 2 * (std::uint64_t{o.queues} + 1) * (std::uint64_t{4} << o.stride) > 4_GiB)
    refuse("stride", std::to_string(o.stride), "what keeps the doorbells of all queues below 4 GiB");
  if (o.path.empty() && o.size == 0)
    fail(EINVAL, "open", "no size is given", "write a size, such as emulated:1GiB, or a path");
  if (o.size % o.lba != 0)
    refuse("size", std::to_string(o.size), "a multiple of the block size, which is " + std::to_string(o.lba));
  if (o.size > kMaxStoredBytes / 16 / o.namespaces)
    refuse("size", std::to_string(o.size), "at most " + format_size(kMaxStoredBytes / 16 / o.namespaces));
}

Options parse_options(const std::string& place, const std::vector<std::pair<std::string, std::string>>& query) {
  Options options;
  parse_place(options, place);
  bool widest_page_given = false;
  for (const auto& [name, value] : query) {
    const Entry* found = nullptr;
    for (const Entry& entry : entries())
      if (name == entry.parameter.name) found = &entry;
    if (found == nullptr) {
      std::vector<std::string> known;
      for (const Entry& entry : entries()) known.emplace_back(entry.parameter.name);
      const std::string near = nearest(name, known);
      fail(EINVAL, "open", "an emulated controller has no parameter \"" + name + "\"",
           near.empty() ? "docs/emulator.md lists them" : "did you mean \"" + near + "\"?");
    }
    if (name == "size" && options.size != 0) fail(EINVAL, "open", "the size is given twice", "");
    if (name == "file" && !options.path.empty()) fail(EINVAL, "open", "the path is given twice", "");
    widest_page_given = widest_page_given || name == "mpsmax";
    found->set(options, found->parameter.name, value);
  }
  if (!widest_page_given && options.mpsmax < options.mpsmin) options.mpsmax = options.mpsmin;
  check_options(options);
  return options;
}

}  // namespace ugds::emulator
