// SPDX-License-Identifier: Apache-2.0
//
// What people write: URIs, the emulated controller's options, sizes, times, modes, PCI addresses, environment. Each is
// taken or refused with words for people; what is taken is within what the messages promise.
#include "base/text.hpp"

#include <cstdlib>
#include <string>

#include "base/error.hpp"
#include "device/pci.hpp"
#include "emulator/options.hpp"
#include "engine/handle.hpp"
#include "engine/scheduler.hpp"
#include "fuzz.hpp"
#include "gpu/visible.hpp"

namespace ugds::fuzz {

namespace {

/// Runs it; a refusal says what is wrong.
template <class Body>
void taken_or_refused(Body&& body) {
  try {
    body();
  } catch (const Failure& failure) {
    demand(failure.error().code > 0 && failure.error().cause[0] != '\0', "a refusal has a code and a cause");
    demand(!failure.error().message().empty(), "a refusal has a message");
  }
}

void uri(const std::string& text) {
  const Uri uri = parse_uri(text);
  demand(uri.scheme.find_first_of(":?/") == std::string::npos, "a scheme is a word");
  for (std::size_t i = 0; i < uri.query.size(); ++i) {
    demand(!uri.query[i].first.empty(), "a parameter has a name");
    for (std::size_t j = 0; j < i; ++j) demand(uri.query[i].first != uri.query[j].first, "no parameter is given twice");
  }
  emulator::Options options = emulator::parse_options(uri.place, uri.query);
  emulator::check_options(options);
  demand(options.lba >= 512 && options.lba <= 65536 && (options.lba & (options.lba - 1)) == 0, "lba");
  demand(options.size % options.lba == 0, "the size is whole blocks");
  demand(options.queues <= 65534 && options.depth >= 2 && options.depth <= 65536, "queues and depth");
  demand(options.namespaces >= 1 && options.namespaces <= 16 && options.metadata <= 4096, "namespaces and metadata");
  demand(options.vector_count() <= emulator::kMaxVectors && options.copiers <= 64, "vectors and copiers");
  demand(!options.serial.empty() && options.serial.size() <= 20 && options.model.size() <= 40, "Identify's texts");
}

void number(Input& input, const std::string& text) {
  const auto low = input.value<std::uint64_t>(), high = low + input.value<std::uint64_t>();
  const std::uint64_t got = parse_number(text, "n", low, high);
  demand(got >= low && got <= high, "a number is within its bounds");
}

/// Opens nothing: no transport has this name, and whatever comes before it is looked at first.
void policy(Input& input, const std::string& text) {
  engine::Policy policy;
  policy.queues = input.value<std::uint32_t>();
  policy.depth = input.value<std::uint32_t>();
  policy.deadline_ns = input.value<std::uint64_t>();
  try {
    const engine::Handle handle("nothing:x?" + text, policy);
    broken("a device was opened that there is not");
  } catch (const Failure& failure) {
    demand(std::string(failure.error().operation) == "open", "it is opening that failed");
    throw;
  }
}

void variable(const char* name, const std::string& text, void (*look)()) {
  setenv(name, text.c_str(), 1);
  try {
    look();
  } catch (...) {
    unsetenv(name);
    throw;
  }
  unsetenv(name);
}

void run(Input& input) {
  const std::uint8_t what = input.byte();
  Input numbers = input;
  if (what == 5 || what == 7) input.bytes(16);
  const auto rest = input.bytes(4096);
  const std::string text(rest.begin(), rest.end());
  taken_or_refused([&] {
    switch (what) {
      case 0: return uri(text);
      case 1: return uri("emulated:1MiB?" + text);
      case 2: return static_cast<void>(parse_size(text, "size"));
      case 3: return static_cast<void>(parse_duration_ns(text, "time"));
      case 4: return static_cast<void>(parse_switch(text, "switch"));
      case 5: return number(numbers, text);
      case 6: return static_cast<void>(engine::Scheduler(text));
      case 7: return policy(numbers, text);
      case 8:
        if (const auto address = device::pci_address(text)) demand(address->size() == 12, "a PCI address in full");
        return;
      case 9:
        return variable("UGDS_GPUS", text, [] {
          for (int gpu = -2; gpu < 70; ++gpu) static_cast<void>(gpu::is_visible(gpu));
        });
      case 10:
        return variable("UGDS_INTERRUPT_MODE", text, [] {
          Input nothing(nullptr, 0);
          policy(nothing, "");
        });
      default: demand(nearest(text, {"emulated", "pci", "vfio-user"}).size() < 10, "a near word is a known one");
    }
  });
}

const Target target("text", run);

}  // namespace

}  // namespace ugds::fuzz
