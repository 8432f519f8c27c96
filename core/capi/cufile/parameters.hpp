// SPDX-License-Identifier: Apache-2.0
//
// cuFile's parameters. A value is what the program set, else what the environment says, else cufile.json, else the
// default. What the program sets is staged while the driver is closed; opening checks all values, and takes them.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "capi/cufile/abi.h"

namespace ugds::cufile {

struct Parameters {
  std::array<std::size_t, CUFILE_SIZE_PARAMETERS> sizes{};
  std::array<bool, CUFILE_BOOL_PARAMETERS> bools{};
  std::array<std::string, CUFILE_STRING_PARAMETERS> strings;
  struct Slabs {
    std::vector<std::size_t> sizes, counts;
  };
  Slabs posix, gpu;

  std::size_t size(int parameter) const { return sizes[static_cast<std::size_t>(parameter)]; }
  bool truth(int parameter) const { return bools[static_cast<std::size_t>(parameter)]; }
};

/// What the program set since the driver was closed.
struct Staged {
  std::array<std::optional<std::size_t>, CUFILE_SIZE_PARAMETERS> sizes;
  std::array<std::optional<bool>, CUFILE_BOOL_PARAMETERS> bools;
  std::array<std::optional<std::string>, CUFILE_STRING_PARAMETERS> strings;
  std::optional<Parameters::Slabs> posix, gpu;
};

struct Limits {
  std::size_t least, most;
  std::size_t unit;  ///< the value is a multiple of it
};
/// The limits of a parameter in the library's own numbers; `parameter` is one.
Limits limits_of(int parameter);

/// Whether sizes of slabs are whole pages, in KiB, that ascend, and no count is 0.
bool are_in_order(const std::size_t* sizes, const std::size_t* counts, std::size_t length);

/// The values as they would be taken now. Throws Failure(EINVAL) where the environment or the file is malformed.
Parameters resolve(const Staged& staged);
/// Throws Failure(ERANGE) where a value is outside its limits.
void check(const Parameters& parameters);
/// The same for one.
void check(int parameter, std::size_t value);

}  // namespace ugds::cufile
