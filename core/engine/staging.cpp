// SPDX-License-Identifier: Apache-2.0
#include "engine/staging.hpp"

#include <algorithm>
#include <string_view>

#include "base/environment.hpp"
#include "base/error.hpp"
#include "base/text.hpp"
#include "base/units.hpp"
#include "engine/stream.hpp"

namespace ugds::engine {

namespace {

std::uint64_t limit_of_environment() {
  const char* text = environment("UGDS_STAGING");
  if (text == nullptr || *text == '\0') return Staging::kDefaultLimit;
  return std::max(parse_size(text, "UGDS_STAGING"), Staging::kSlab);
}

}  // namespace

Staging::Staging(gpu::Runtime& runtime) : runtime_(runtime), limit_(limit_of_environment()) {
  static_assert(kSlab / kUnit == 64);
  slabs_.reserve(limit_ / kSlab);
  given_up_.reserve(limit_ / kUnit);
}

Staging& Staging::of(gpu::Runtime& runtime) {
  if (runtime.backend() == gpu::Backend::cuda) {
    static auto* cuda = new Staging(runtime);  // NOLINT: outlives every thread that may still copy
    return *cuda;
  }
  static auto* hip = new Staging(runtime);  // NOLINT
  return *hip;
}

StagingArea Staging::take_from(std::uint32_t number, std::uint32_t units) {
  Slab& slab = slabs_[number];
  const std::uint64_t run = units == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << units) - 1;
  for (std::uint32_t first = 0; first + units <= 64; ++first) {
    if ((slab.used >> first & run) != 0) continue;
    slab.used |= run << first;
    const std::uint64_t offset = first * kUnit;
    return {slab.memory->data() + offset, units * kUnit, offset, slab.reference, slab.device + offset, number, first};
  }
  return {};
}

StagingArea Staging::take(std::uint64_t size) {
  const auto units = static_cast<std::uint32_t>((std::clamp<std::uint64_t>(size, 1, kSlab) + kUnit - 1) / kUnit);
  const auto look = [&] {
    const std::lock_guard guard(lock_);
    StagingArea area;
    for (std::uint32_t i = 0; i < slabs_.size() && !area; ++i) area = take_from(i, units);
    return area;
  };
  if (const StagingArea area = look()) return area;
  const std::lock_guard making(making_);
  reclaim();
  if (const StagingArea area = look()) return area;
  if ((slabs_.size() + 1) * kSlab > limit_) return {};
  // Pinning waits for streams that wait, and whoever lets them go on gives areas back: not under the lock for that.
  Slab slab = make_slab();
  const std::lock_guard guard(lock_);
  slabs_.push_back(std::move(slab));
  return take_from(static_cast<std::uint32_t>(slabs_.size()) - 1, units);
}

Staging::Slab Staging::make_slab() {
  Slab slab;
  slab.memory = std::make_unique<memory::HostMemory>(kSlab);
  slab.device = runtime_.pin(slab.memory->data(), kSlab);
  try {
    slab.reference = memory::Registry::instance().add_staging(slab.memory->data(), kSlab);
  } catch (...) {
    runtime_.unpin(slab.memory->data());
    throw;
  }
  return slab;
}

void Staging::free_units(const StagingArea& area) noexcept {
  const std::uint64_t units = area.size / kUnit;
  const std::uint64_t run = units == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << units) - 1;
  slabs_[area.slab_number].used &= ~(run << area.first_unit);
}

void Staging::give_back(const StagingArea& area) noexcept {
  const std::lock_guard guard(lock_);
  free_units(area);
}

void Staging::give_up(const StagingArea& area, const std::atomic<std::uint64_t>* reached,
                      std::uint64_t value) noexcept {
  const std::lock_guard guard(lock_);
  given_up_.push_back({area, reached, value});  // there is room for every unit
}

/// Frees what was given up and is used by nobody any more. By one thread at a time, and not under the lock: the
/// registry's may be held by somebody who waits for the driver.
void Staging::reclaim() {
  for (std::size_t i = 0;;) {
    GivenUp one;
    {
      const std::lock_guard guard(lock_);
      if (i == given_up_.size()) return;
      one = given_up_[i];
    }
    const bool passed = one.reached == nullptr || is_at(one.reached->load(std::memory_order_acquire), one.value);
    if (!passed || memory::Registry::instance().in_flight(one.area.slab) != 0) {
      ++i;
      continue;
    }
    const std::lock_guard guard(lock_);
    free_units(one.area);
    given_up_[i] = given_up_.back();
    given_up_.pop_back();
  }
}

std::uint64_t Staging::pinned() {
  const std::lock_guard guard(lock_);
  return slabs_.size() * kSlab;
}

bool Staging::may_use_kernels() {
  static const bool may = [] {
    const char* text = environment("UGDS_GPU_KERNELS");
    return text == nullptr || std::string_view(text) != "0";
  }();
  return may;
}

}  // namespace ugds::engine
