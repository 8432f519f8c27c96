// SPDX-License-Identifier: Apache-2.0
#include "capi/cufile/configuration.hpp"

#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/environment.hpp"
#include "base/error.hpp"

namespace ugds::cufile {

using Json = nlohmann::json;

struct Configuration::Contents {
  Json json;
  const Json* find(const char* group, const char* name) const {
    const auto outer = json.find(group);
    if (outer == json.end()) return nullptr;
    const auto inner = outer->find(name);
    return inner == outer->end() ? nullptr : &*inner;
  }
};

namespace {

[[noreturn]] void refuse(const std::string& path, const char* group, const char* name, const char* wanted) {
  fail(EINVAL, "configuration", path + ": " + group + "." + name + " is not " + wanted, "correct the file");
}

}  // namespace

Configuration::Configuration() : contents_(std::make_unique<Contents>()) {
  const char* named = environment("CUFILE_ENV_PATH_JSON");
  std::ifstream file;
  for (const char* path : {named, "/etc/cufile.json"}) {
    if (path == nullptr || *path == '\0') continue;
    file.open(path);
    if (!file) continue;
    path_ = path;
    break;
  }
  if (path_.empty()) return;
  try {
    contents_->json = Json::parse(file, nullptr, true, true);
  } catch (const std::exception& error) {  // also what reading it says, as of a directory
    fail(EINVAL, "configuration", path_ + " is not JSON: " + error.what(),
         "correct the file, or name another by "
         "CUFILE_ENV_PATH_JSON");
  }
  if (!contents_->json.is_object())
    fail(EINVAL, "configuration", path_ + " is JSON, and no object", "put the parameters into { and }");
  for (const char* group : {"execution", "logging", "miscellaneous", "profile", "properties"}) {
    const auto found = contents_->json.find(group);
    if (found == contents_->json.end() || found->is_object()) continue;
    fail(EINVAL, "configuration", path_ + ": " + group + " is not an object of parameters", "correct the file");
  }
}

Configuration::~Configuration() = default;

std::optional<std::size_t> Configuration::number(const char* group, const char* name) const {
  const Json* value = contents_->find(group, name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number_unsigned()) refuse(path_, group, name, "a number of 0 or more");
  return value->get<std::size_t>();
}

std::optional<bool> Configuration::truth(const char* group, const char* name) const {
  const Json* value = contents_->find(group, name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) refuse(path_, group, name, "true or false");
  return value->get<bool>();
}

std::optional<std::string> Configuration::text(const char* group, const char* name) const {
  const Json* value = contents_->find(group, name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) refuse(path_, group, name, "a text");
  return value->get<std::string>();
}

std::optional<std::vector<std::size_t>> Configuration::numbers(const char* group, const char* name) const {
  const Json* value = contents_->find(group, name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_array()) refuse(path_, group, name, "a list of numbers");
  std::vector<std::size_t> all;
  for (const Json& one : *value) {
    if (!one.is_number_unsigned()) refuse(path_, group, name, "a list of numbers of 0 or more");
    all.push_back(one.get<std::size_t>());
  }
  return all;
}

}  // namespace ugds::cufile
