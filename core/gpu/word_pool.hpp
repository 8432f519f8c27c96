// SPDX-License-Identifier: Apache-2.0
//
// Words that the processor and streams share, in pinned pages of ours, each on a cache line of its own.
#pragma once

#include <mutex>
#include <vector>

#include "gpu/runtime.hpp"

namespace ugds::gpu {

class WordPool {
 public:
  /// A word that is 0, as is the rest of its cache line. Pins a page by `runtime` where none is free. Throws Failure.
  Word take(Runtime& runtime);
  void give_back(const Word& word) noexcept;

 private:
  std::mutex lock_;
  std::vector<Word> free_;
};

}  // namespace ugds::gpu
