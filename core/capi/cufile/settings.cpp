// SPDX-License-Identifier: Apache-2.0
//
// cuFile's calls that get and set parameters and statistics.
#include <cstring>
#include <string>
#include <vector>

#include "capi/cufile/driver.hpp"
#include "capi/cufile/errors.hpp"
#include "capi/cufile/parameters.hpp"
#include "capi/cufile/statistics.hpp"

namespace ugds::cufile {

namespace {

bool is_size(int p) { return p >= 0 && p < CUFILE_SIZE_PARAMETERS; }
bool is_bool(int p) { return p >= 0 && p < CUFILE_BOOL_PARAMETERS; }
bool is_string(int p) { return p >= 0 && p < CUFILE_STRING_PARAMETERS; }

CUfileError_t refuse_parameter() {
  return refuse("parameter", CU_FILE_INVALID_VALUE, "there is no such parameter, or an argument is null");
}

/// Slabs are pairs of a size in KiB, in whole pages and ascending, and a count.
using Slabs = Parameters::Slabs;

CUfileError_t set_slabs(std::optional<Slabs> Staged::*which, const std::size_t* sizes, const std::size_t* counts,
                        int length) {
  constexpr int kMost = 256;
  if (sizes == nullptr || counts == nullptr || length <= 0 || length > kMost)
    return refuse("parameter", CU_FILE_INVALID_VALUE, "null arrays, or a length that is not 1 to 256");
  if (!are_in_order(sizes, counts, static_cast<std::size_t>(length))) {
    return refuse("parameter", CU_FILE_INVALID_VALUE,
                  "a size that is no multiple of 4 KiB or does not ascend, or a "
                  "count of 0");
  }
  return guarded("parameter", [&] {
    Slabs slabs{{sizes, sizes + length}, {counts, counts + length}};
    return Driver::instance().stage([&](Staged& staged) { staged.*which = std::move(slabs); });
  });
}

CUfileError_t get_slabs(Slabs Parameters::*which, std::size_t* sizes, std::size_t* counts, int length) {
  return guarded("parameter", [&] {
    const Parameters now = Driver::instance().parameters_now();
    const Slabs& slabs = now.*which;
    if (sizes == nullptr || counts == nullptr || length < 0 || static_cast<std::size_t>(length) != slabs.sizes.size()) {
      return refuse("parameter", CU_FILE_INVALID_VALUE,
                    ("null arrays, or a length other than " + std::to_string(slabs.sizes.size())).c_str());
    }
    std::copy(slabs.sizes.begin(), slabs.sizes.end(), sizes);
    std::copy(slabs.counts.begin(), slabs.counts.end(), counts);
    return answer(CU_FILE_SUCCESS);
  });
}

/// Whether statistics of a level can be given.
CUfileError_t admit(const void* to, int level) {
  if (!Driver::instance().is_open())
    return refuse("statistics", CU_FILE_DRIVER_NOT_INITIALIZED, "the driver is not open");
  if (to == nullptr || statistics().level() < level) {
    return refuse("statistics", CU_FILE_INVALID_VALUE, "a null argument, or statistics are kept at a lower level",
                  "call cuFileSetStatsLevel() first");
  }
  return answer(CU_FILE_SUCCESS);
}

template <class Stats>
CUfileError_t give(Stats* to, int level) {
  const CUfileError_t admitted = admit(to, level);
  if (admitted.err != CU_FILE_SUCCESS) return admitted;
  return guarded("statistics", [&] {
    count_ended_requests();
    statistics().fill(*to);
    return answer(CU_FILE_SUCCESS);
  });
}

}  // namespace

}  // namespace ugds::cufile

using namespace ugds::cufile;  // NOLINT

extern "C" {

CUfileError_t cuFileGetParameterSizeT(int parameter, size_t* value) {
  if (!is_size(parameter) || value == nullptr) return refuse_parameter();
  return guarded("parameter", [&] {
    *value = Driver::instance().parameters_now().size(parameter);
    return answer(CU_FILE_SUCCESS);
  });
}

CUfileError_t cuFileGetParameterBool(int parameter, bool* value) {
  if (!is_bool(parameter) || value == nullptr) return refuse_parameter();
  return guarded("parameter", [&] {
    *value = Driver::instance().parameters_now().truth(parameter);
    return answer(CU_FILE_SUCCESS);
  });
}

CUfileError_t cuFileGetParameterString(int parameter, char* text, int size) {
  if (!is_string(parameter) || text == nullptr || size <= 0) return refuse_parameter();
  return guarded("parameter", [&] {
    const Parameters now = Driver::instance().parameters_now();
    const std::string& value = now.strings[static_cast<std::size_t>(parameter)];
    if (value.size() >= static_cast<std::size_t>(size))
      return refuse("parameter", CU_FILE_INVALID_VALUE, "the text does not fit", "pass room for 256 bytes");
    std::memcpy(text, value.c_str(), value.size() + 1);
    return answer(CU_FILE_SUCCESS);
  });
}

CUfileError_t cuFileGetParameterMinMaxValue(int parameter, size_t* least, size_t* most) {
  if (!is_size(parameter) || least == nullptr || most == nullptr) return refuse_parameter();
  const Limits limits = limits_of(parameter);
  *least = limits.least;
  *most = limits.most;
  return answer(CU_FILE_SUCCESS);
}

CUfileError_t cuFileSetParameterSizeT(int parameter, size_t value) {
  if (!is_size(parameter)) return refuse_parameter();
  return guarded("parameter", [&] {
    return Driver::instance().stage([&](Staged& s) { s.sizes[static_cast<std::size_t>(parameter)] = value; });
  });
}

CUfileError_t cuFileSetParameterBool(int parameter, bool value) {
  if (!is_bool(parameter)) return refuse_parameter();
  return guarded("parameter", [&] {
    return Driver::instance().stage([&](Staged& s) { s.bools[static_cast<std::size_t>(parameter)] = value; });
  });
}

CUfileError_t cuFileSetParameterString(int parameter, const char* text) {
  if (!is_string(parameter) || text == nullptr || *text == '\0') return refuse_parameter();
  return guarded("parameter", [&] {
    std::string value = text;
    return Driver::instance().stage(
        [&](Staged& s) { s.strings[static_cast<std::size_t>(parameter)] = std::move(value); });
  });
}

CUfileError_t cuFileSetParameterPosixPoolSlabArray(const size_t* sizes, const size_t* counts, int length) {
  return set_slabs(&Staged::posix, sizes, counts, length);
}
CUfileError_t cuFileGetParameterPosixPoolSlabArray(size_t* sizes, size_t* counts, int length) {
  return get_slabs(&Parameters::posix, sizes, counts, length);
}
CUfileError_t cuFileSetParameterGpuBounceBufferSlabArray(const size_t* sizes, const size_t* counts, int length) {
  return set_slabs(&Staged::gpu, sizes, counts, length);
}
CUfileError_t cuFileGetParameterGpuBounceBufferSlabArray(size_t* sizes, size_t* counts, int length) {
  return get_slabs(&Parameters::gpu, sizes, counts, length);
}

CUfileError_t cuFileSetStatsLevel(int level) {
  if (level < 0 || level > 3) return refuse("statistics", CU_FILE_INVALID_VALUE, "a level that is not 0 to 3");
  statistics().set_level(level);
  return answer(CU_FILE_SUCCESS);
}

CUfileError_t cuFileGetStatsLevel(int* level) {
  if (level == nullptr) return refuse("statistics", CU_FILE_INVALID_VALUE, "a null argument");
  *level = statistics().level();
  return answer(CU_FILE_SUCCESS);
}

CUfileError_t cuFileStatsStart(void) {
  const CUfileError_t admitted = admit(&statistics(), 1);
  if (admitted.err == CU_FILE_SUCCESS) statistics().start();
  return admitted;
}

CUfileError_t cuFileStatsStop(void) {
  const CUfileError_t admitted = admit(&statistics(), 0);
  if (admitted.err == CU_FILE_SUCCESS) statistics().stop();
  return admitted;
}

CUfileError_t cuFileStatsReset(void) {
  const CUfileError_t admitted = admit(&statistics(), 0);
  if (admitted.err == CU_FILE_SUCCESS) statistics().reset();
  return admitted;
}

CUfileError_t cuFileGetStatsL1(CUfileStatsLevel1_t* stats) { return give(stats, 1); }
CUfileError_t cuFileGetStatsL2(CUfileStatsLevel2_t* stats) { return give(stats, 2); }
CUfileError_t cuFileGetStatsL3(CUfileStatsLevel3_t* stats) { return give(stats, 3); }

// What there is none of here.

CUfileError_t cuFileDriverGetP2PFlags(int, int* flags) {
  if (flags == nullptr) return refuse("P2P flags", CU_FILE_INVALID_VALUE, "a null argument");
  *flags = 0;
  return answer(CU_FILE_SUCCESS);
}

CUfileError_t cuFileDriverSetP2PFlags(int, int) {
  return refuse("P2P flags", CU_FILE_PLATFORM_NOT_SUPPORTED, "files are not read by peers' DMA here",
                "give a whole controller to uGDS for that (ugds bind)");
}

CUfileError_t cuFileExportPCIeTopology(const char*) {
  return refuse("topology", CU_FILE_PLATFORM_NOT_SUPPORTED, "the machine's topology is not looked at by this library",
                "ask `ugds devices`");
}

}  // extern "C"
