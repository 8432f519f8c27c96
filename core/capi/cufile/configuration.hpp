// SPDX-License-Identifier: Apache-2.0
//
// cufile.json: JSON with comments. The file is the one that CUFILE_ENV_PATH_JSON names, if that is there, else
// /etc/cufile.json.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace ugds::cufile {

class Configuration {
 public:
  /// Reads the file, if there is one. Throws Failure(EINVAL) where it is no JSON.
  Configuration();
  ~Configuration();
  Configuration(const Configuration&) = delete;
  Configuration& operator=(const Configuration&) = delete;

  /// The file that was read; "" where there is none.
  const std::string& path() const { return path_; }

  // Values by group and name, such as "properties" and "io_batchsize"; nothing where the file does not say. They throw
  // Failure(EINVAL) where it says something of another kind.
  std::optional<std::size_t> number(const char* group, const char* name) const;
  std::optional<bool> truth(const char* group, const char* name) const;
  std::optional<std::string> text(const char* group, const char* name) const;
  std::optional<std::vector<std::size_t>> numbers(const char* group, const char* name) const;

 private:
  struct Contents;
  std::string path_;
  std::unique_ptr<Contents> contents_;
};

}  // namespace ugds::cufile
