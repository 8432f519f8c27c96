// SPDX-License-Identifier: Apache-2.0
//
// What tests of batches share: a batch that is closed at the end, and requests as lists.
#pragma once

#include <map>
#include <vector>

#include "engine/batch.hpp"
#include "engine_host.hpp"

namespace engine_test {

using engine::Batch;
using engine::Done;
using engine::Wanted;

/// One request of a test: Wanted, with the memory that it is of.
struct Request {
  const Buffer* buffer = nullptr;
  Wanted wanted{};
};

inline Request reading(const Buffer& buffer, std::uint64_t offset, std::uint64_t size, std::uint64_t at,
                       std::uint64_t cookie = 0) {
  return {&buffer, {.offset = offset, .size = size, .buffer_offset = at, .cookie = cookie}};
}
inline Request writing(const Buffer& buffer, std::uint64_t offset, std::uint64_t size, std::uint64_t at,
                       std::uint64_t cookie = 0) {
  return {&buffer, {.offset = offset, .size = size, .buffer_offset = at, .cookie = cookie, .write = 1}};
}

class Requests {
 public:
  static constexpr bool kOffsetsTell = false;
  explicit Requests(const std::vector<Request>& list) : list_(list.data()) {}
  const memory::Reference& begin_run(std::size_t i) {
    run_ = list_[i].buffer;
    return buffer();
  }
  const memory::Reference& buffer() const {
    static const memory::Reference none{};
    return run_ != nullptr ? run_->reference() : none;
  }
  bool same_buffer(std::size_t i) const { return list_[i].buffer == run_; }
  Wanted operator()(std::size_t i) const { return list_[i].wanted; }

 private:
  const Request* list_;
  const Buffer* run_ = nullptr;
};

/// What is told of a request: its result, and the words where it failed.
struct Told {
  std::int64_t result = 0;
  std::uint64_t completed = 0;
  std::string message{};
};

struct OpenBatch {
  Handle& handle;
  engine::BatchId id;

  OpenBatch(Handle& on, std::uint32_t capacity, engine::Priority priority = engine::Priority::unsaid)
      : handle(on), id(on.open_batch(capacity, priority)) {}
  ~OpenBatch() { handle.close_batch(id); }
  Batch& batch() { return *handle.batch(id.slot); }

  std::int64_t submit(const std::vector<Request>& list, bool all = false) {
    return batch().submit(id.generation, list.size(), all, Requests(list), [](std::size_t) { return false; });
  }
  /// Adds what is told to `told`; every cookie once.
  std::int64_t collect(std::map<std::uint64_t, Told>& told, std::size_t least, std::size_t most = ~std::size_t{0},
                       std::uint64_t limit_ns = ~std::uint64_t{0} >> 1) {
    return batch().collect(id.generation, least, most, limit_ns, {}, [&told](const Done& done) {
      CHECK(told.count(done.cookie) == 0);
      told[done.cookie] = {done.result, done.error != nullptr ? done.error->completed : 0,
                           done.error != nullptr ? done.error->message() : std::string()};
      CHECK((done.error != nullptr) == (done.result < 0));
    });
  }
  std::map<std::uint64_t, Told> all() {
    std::map<std::uint64_t, Told> told;
    collect(told, ~std::size_t{0});
    return told;
  }
};

}  // namespace engine_test
