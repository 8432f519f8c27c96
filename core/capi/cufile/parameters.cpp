// SPDX-License-Identifier: Apache-2.0
#include "capi/cufile/parameters.hpp"

#include <strings.h>

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "capi/cufile/configuration.hpp"

namespace ugds::cufile {

namespace {

constexpr std::size_t kMostKib = SIZE_MAX / 1024 / 4 * 4;
constexpr std::size_t kMostThreshold = UINT32_MAX;

struct SizeRow {
  const char* group;
  const char* name;
  std::size_t otherwise;
  Limits limits;
};
/// In the order of their numbers.
constexpr SizeRow kSizes[CUFILE_SIZE_PARAMETERS] = {
    {"profile", "cufile_stats", 0, {0, 3, 1}},
    {"execution", "max_io_queue_depth", 128, {1, 256, 1}},
    {"execution", "max_io_threads", 4, {0, 32, 1}},
    {"execution", "min_io_threshold_size_kb", 8192, {4, kMostThreshold, 1}},
    {"execution", "max_request_parallelism", 4, {0, 8, 1}},
    {"properties", "max_direct_io_size_kb", 16384, {64, 16384, 4}},
    {"properties", "max_device_cache_size_kb", 131072, {0, kMostKib, 4}},
    {"properties", "per_buffer_cache_size_kb", 1024, {64, 16384, 4}},
    {"properties", "max_device_pinned_mem_size_kb", 33554432, {64, kMostKib, 4}},
    {"properties", "io_batchsize", 128, {1, 256, 1}},
    {"properties", "poll_mode_max_size_kb", 4, {4, kMostKib, 4}},
    {"properties", "batch_io_timeout_ms", 5, {1, 1000, 1}},
};

struct BoolRow {
  const char* group;
  const char* name;
  const char* variable;
  bool otherwise;
};
constexpr BoolRow kBools[CUFILE_BOOL_PARAMETERS] = {
    {"properties", "use_poll_mode", nullptr, false},
    {"properties", "allow_compat_mode", "CUFILE_ALLOW_COMPAT_MODE", true},
    {"properties", "force_compat_mode", "CUFILE_FORCE_COMPAT_MODE", false},
    {"miscellaneous", "api_check_aggressive", nullptr, false},
    {"execution", "parallel_io", nullptr, true},
    {"profile", "nvtx", "CUFILE_NVTX", false},
    {"properties", "allow_system_memory", nullptr, true},
    {"properties", "use_pci_p2pdma", "CUFILE_USE_PCIP2PDMA", false},
    {"properties", "prefer_iouring", nullptr, false},
    {"properties", "force_odirect_mode", nullptr, false},
    {"miscellaneous", "skip_topology_detection", "CUFILE_SKIP_TOPOLOGY_DETECTION", false},
    {"properties", "stream_memops_bypass", nullptr, false},
};

struct StringRow {
  const char* name;  ///< in "logging"; nullptr: the environment alone says
  const char* variable;
  const char* otherwise;
};
constexpr StringRow kStrings[CUFILE_STRING_PARAMETERS] = {
    {"level", "CUFILE_LOGGING_LEVEL", "ERROR"},
    {nullptr, "CUFILE_LOGFILE_PATH", ""},
    {"dir", nullptr, ""},
};

[[noreturn]] void refuse_variable(const char* name, const char* text) {
  fail(EINVAL, "configuration", std::string(name) + "=" + text + " in the environment is neither true nor false",
       "set it to true or false, or not at all");
}

std::optional<bool> truth_in_environment(const char* name) {
  const char* text = name == nullptr ? nullptr : environment(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  for (const char* yes : {"true", "1", "yes", "on"}) {
    if (strcasecmp(text, yes) == 0) return true;
  }
  for (const char* no : {"false", "0", "no", "off"}) {
    if (strcasecmp(text, no) == 0) return false;
  }
  refuse_variable(name, text);
}

Parameters::Slabs slabs_in(const Configuration& file, const char* sizes, const char* counts,
                           Parameters::Slabs otherwise) {
  auto found_sizes = file.numbers("properties", sizes);
  auto found_counts = file.numbers("properties", counts);
  if (!found_sizes && !found_counts) return otherwise;
  Parameters::Slabs slabs{found_sizes.value_or(otherwise.sizes), found_counts.value_or(otherwise.counts)};
  if (slabs.sizes.size() != slabs.counts.size() || slabs.sizes.empty()) {
    fail(EINVAL, "configuration",
         file.path() + ": properties." + sizes + " and properties." + counts + " are not equally long",
         "give one count for each size");
  }
  if (!are_in_order(slabs.sizes.data(), slabs.counts.data(), slabs.sizes.size())) {
    fail(EINVAL, "configuration",
         file.path() + ": properties." + sizes + " are not multiples of 4 that ascend, or a count is 0",
         "correct the file");
  }
  return slabs;
}

}  // namespace

bool are_in_order(const std::size_t* sizes, const std::size_t* counts, std::size_t length) {
  for (std::size_t i = 0; i < length; ++i) {
    if (sizes[i] == 0 || sizes[i] % 4 != 0 || counts[i] == 0 || (i != 0 && sizes[i] <= sizes[i - 1])) return false;
  }
  return true;
}

Limits limits_of(int parameter) { return kSizes[parameter].limits; }

Parameters resolve(const Staged& staged) {
  const Configuration file;
  Parameters p;
  for (std::size_t i = 0; i < p.sizes.size(); ++i) {
    const SizeRow& row = kSizes[i];
    // Documentation and files in the field have them in either group.
    const auto in_file = [&] {
      auto found = file.number(row.group, row.name);
      return found || std::strcmp(row.name, "io_batchsize") != 0 ? found : file.number("profile", row.name);
    };
    p.sizes[i] = staged.sizes[i] ? *staged.sizes[i] : in_file().value_or(row.otherwise);
  }
  for (std::size_t i = 0; i < p.bools.size(); ++i) {
    const BoolRow& row = kBools[i];
    std::optional<bool> found = staged.bools[i];
    if (!found) found = truth_in_environment(row.variable);
    if (!found) found = file.truth(row.group, row.name);
    p.bools[i] = found.value_or(row.otherwise);
  }
  for (std::size_t i = 0; i < p.strings.size(); ++i) {
    const StringRow& row = kStrings[i];
    std::optional<std::string> found = staged.strings[i];
    if (const char* text = row.variable == nullptr ? nullptr : environment(row.variable); !found && text != nullptr)
      found = text;
    if (!found && row.name != nullptr) found = file.text("logging", row.name);
    p.strings[i] = found.value_or(row.otherwise);
  }
  p.posix = staged.posix
                ? *staged.posix
                : slabs_in(file, "posix_pool_slab_size_kb", "posix_pool_slab_count", {{4, 1024, 16384}, {128, 64, 64}});
  p.gpu = staged.gpu
              ? *staged.gpu
              : slabs_in(file, "gpu_bounce_buffer_slab_size_kb", "gpu_bounce_buffer_slab_count", {{1024}, {128}});
  return p;
}

void check(int parameter, std::size_t value) {
  const SizeRow& row = kSizes[parameter];
  const Limits& limits = row.limits;
  if (value >= limits.least && value <= limits.most && value % limits.unit == 0) return;
  std::string cause = std::string(row.group) + "." + row.name + " is " + std::to_string(value) + ", and may be " +
                      std::to_string(limits.least) + " to " + std::to_string(limits.most);
  if (limits.unit != 1) cause += ", a multiple of " + std::to_string(limits.unit);
  fail(ERANGE, "configuration", cause, "set it to such a value before the driver is opened");
}

void check(const Parameters& parameters) {
  for (int i = 0; i < CUFILE_SIZE_PARAMETERS; ++i) check(i, parameters.size(i));
}

}  // namespace ugds::cufile
