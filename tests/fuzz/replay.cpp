// SPDX-License-Identifier: Apache-2.0
//
// Runs every input that is kept, without a fuzzer: `fuzz_replay`, or `fuzz_replay TARGET FILE…` for some of one target.
// The last line that it printed names the one that broke something.
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz.hpp"

namespace {

namespace fs = std::filesystem;
using ugds::fuzz::Target;

void run(const Target& target, const fs::path& file) {
  std::printf("%s %s\n", target.name, file.filename().c_str());
  std::fflush(stdout);
  std::ifstream in(file, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  ugds::fuzz::Input input(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  target.body(input);
}

}  // namespace

int main(int count, char** arguments) {
  unsigned run_count = 0, empty = 0;
  for (const Target* target = Target::first; target != nullptr; target = target->next) {
    std::vector<fs::path> files;
    if (count > 1) {
      if (std::strcmp(target->name, arguments[1]) != 0) continue;
      files.assign(arguments + 2, arguments + count);
    } else {
      std::error_code none;
      for (const auto& entry : fs::directory_iterator(fs::path(UGDS_FUZZ_CORPUS) / target->name, none))
        files.push_back(entry.path());
    }
    if (files.empty()) {
      std::printf("%s: no input\n", target->name);
      ++empty;
    }
    for (const fs::path& file : files) run(*target, file);
    run_count += static_cast<unsigned>(files.size());
  }
  // As the other C++ tests say it.
  std::printf("test cases: %u | %u passed | %u failed | 0 skipped\n", run_count + empty, run_count, empty);
  return run_count == 0 || empty != 0 ? 1 : 0;
}
