// SPDX-License-Identifier: Apache-2.0
//
// The library's own modes, and the names by which modes are known.
#include "engine/mode.hpp"

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>

#include "base/error.hpp"

namespace ugds::engine {

namespace {

/// Polls; what large requests have in flight stays small enough for others to pass.
class Latency final : public Mode {
 public:
  Settings begin() const override { return {}; }
};

/// Deep queues, and waiters that leave their processor to others.
class Throughput final : public Mode {
 public:
  void plan(Policy& policy) const override {
    if (policy.depth == 0) policy.depth = 256;
    if (policy.interrupts == Interrupts::unsaid) policy.interrupts = Interrupts::yes;
  }
  Settings begin() const override {
    Settings settings;
    settings.waiting.fill({.sleeps = true});
    settings.pacing.latency_low = settings.pacing.latency_high = 0;
    settings.window = 64;
    settings.refill = 16;
    return settings;
  }
};

/// Reads before writes: writes are background requests unless they say otherwise.
class Priority final : public Mode {
 public:
  Settings begin() const override {
    Settings settings;
    settings.background_writes = true;
    return settings;
  }
};

/// Polls or sleeps, by what either takes for requests of a size on this machine as it is now.
class Adaptive final : public Mode {
 public:
  void plan(Policy& policy) const override {
    if (policy.interrupts == Interrupts::unsaid) policy.interrupts = Interrupts::yes;
  }
  Settings begin() const override {
    Settings settings;
    for (unsigned i = 0; i < kSizeClasses; ++i) settings.waiting[i] = {.sleeps = i >= 2, .explore = kOften};
    return settings;
  }
  bool adjust(const Observed& observed, Settings& settings) override {
    bool changed = false;
    for (unsigned i = 0; i < kSizeClasses; ++i) changed |= choose(observed.waiting[i], settings.waiting[i], next_[i]);
    return changed;
  }

 private:
  /// One in so many goes the other way: at first, and when nothing changes. What the other way costs more than the
  /// chosen one is spread over so many.
  static constexpr std::uint32_t kOften = 16, kSeldom = 2048;
  static constexpr std::uint32_t kEnough = 6;

  /// A processor is worth a quarter of a request's time. Once asleep, somewhat more: where either is about as good, a
  /// machine with other work would have it change its mind again and again, and try the other way often each time.
  static bool is_better_asleep(std::uint64_t slept, std::uint64_t polled, const Waiting::Way& way) {
    return slept < polled + polled / 4 + (way.sleeps ? polled / 8 : 0);
  }

  static bool choose(const Waiting::Seen& seen, Waiting::Way& way, std::uint64_t& next) {
    if (seen.polled_samples < kEnough || seen.slept_samples < kEnough || seen.requests < next) return false;
    const bool sleeps = is_better_asleep(seen.slept, seen.polled, way);
    // What is seldom tried is known late: where the last try says otherwise, more of them decide.
    const bool lately = way.sleeps ? is_better_asleep(seen.slept, seen.last_polled, way)
                                   : is_better_asleep(seen.last_slept, seen.polled, way);
    const bool settled = sleeps == way.sleeps && lately == sleeps;
    const std::uint32_t explore = settled ? std::min(way.explore * 2, kSeldom) : kOften;
    // The next judgement is due when the other way has been seen some more times.
    next = seen.requests + std::uint64_t{explore} * 3;
    const bool changed = sleeps != way.sleeps || explore != way.explore;
    way = {.sleeps = sleeps, .explore = explore};
    return changed;
  }

  std::array<std::uint64_t, kSizeClasses> next_{};
};

template <class Made>
std::unique_ptr<Mode> make() {
  return std::make_unique<Made>();
}

struct Names {
  std::mutex lock;
  std::map<std::string, MakeMode> modes{{"latency", make<Latency>},
                                        {"throughput", make<Throughput>},
                                        {"priority", make<Priority>},
                                        {"adaptive", make<Adaptive>}};
};

Names& names() {
  static auto* const all = new Names;  // NOLINT: modes of others may be made until the end
  return *all;
}

}  // namespace

void register_mode(const std::string& name, MakeMode make_one) {
  for (const char* own : {"latency", "throughput", "priority", "adaptive"}) {
    if (name == own)
      fail(EEXIST, "register mode", "\"" + name + "\" is one of the library's own", "choose another name");
  }
  std::lock_guard guard(names().lock);
  names().modes[name] = std::move(make_one);
}

std::unique_ptr<Mode> make_mode(const std::string& name) {
  MakeMode make_one;
  {
    std::lock_guard guard(names().lock);
    const auto found = names().modes.find(name);
    if (found != names().modes.end()) make_one = found->second;
  }
  if (make_one) return make_one();
  std::string known;
  for (const std::string& one : mode_names()) known += (known.empty() ? "" : ", ") + one;
  fail(EINVAL, "open", "there is no mode \"" + name + "\"", "use one of: " + known);
}

std::vector<std::string> mode_names() {
  std::lock_guard guard(names().lock);
  std::vector<std::string> list;
  for (const auto& [name, make_one] : names().modes) list.push_back(name);
  return list;
}

}  // namespace ugds::engine
