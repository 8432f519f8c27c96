// SPDX-License-Identifier: Apache-2.0
#include "kernels.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "memory.hpp"
#include "stream.hpp"

namespace fake_cuda {

namespace {

std::uint8_t pattern(std::uint64_t i, std::uint64_t seed) {
  return static_cast<std::uint8_t>((seed + i * 2654435761U) >> 16);
}

/// ugds_copy(orders), the row's one: it is read when the kernel runs.
CUresult copy(const Arguments& arguments, unsigned row, unsigned) {
  struct Order {
    std::uint64_t source, destination, bytes;
  } order;
  const std::byte* at = memory().reach(arguments[0] + row * sizeof order, sizeof order);
  if (at == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
  std::memcpy(&order, at, sizeof order);
  if (order.bytes == 0) return CUDA_SUCCESS;
  const std::byte* from = memory().reach(order.source, order.bytes);
  std::byte* to = memory().reach(order.destination, order.bytes);
  if (from == nullptr || to == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
  std::memmove(to, from, order.bytes);
  return CUDA_SUCCESS;
}

/// ugds_pieces(reached, reached_at, allowed, allowed_at, order, source, destination, bytes, piece, area, count, tell)
CUresult pieces(const Arguments& arguments, unsigned, unsigned blocks) {
  const auto [reached, reached_at, allowed, allowed_at, order, source, destination, bytes, piece, area, count, tell] =
      arguments;
  const auto word_at = [](std::uint64_t address) {
    return reinterpret_cast<std::uint64_t*>(address % 8 != 0 ? nullptr : memory().reach(address, 8));
  };
  std::uint64_t* const told = word_at(reached);
  std::uint64_t* const asked = word_at(allowed);
  if (asked == nullptr || (tell != 0 && told == nullptr)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (blocks > 1 && (blocks > 8 || blocks > count || (tell & 1) != 0)) return CUDA_ERROR_INVALID_VALUE;
  const auto say = [&](std::uint64_t block, std::uint64_t value) {
    std::atomic_ref<std::uint64_t>(told[block]).store(value, std::memory_order_release);
  };
  std::uint64_t said[3] = {source, destination, bytes};
  if ((tell & 1) != 0) say(0, reached_at + 1);
  // Its blocks one after the other, as their pieces come.
  for (std::uint64_t number = 0, place = 0; number == 0 || number < count; ++number) {
    const auto further = [&] {
      const std::uint64_t now = std::atomic_ref<std::uint64_t>(*asked).load(std::memory_order_acquire);
      return static_cast<std::int64_t>(now - allowed_at - number - 1);
    };
    for (int asks = 0; further() < 0; ++asks) {
      if (is_released()) return CUDA_SUCCESS;
      std::this_thread::sleep_for(std::chrono::microseconds(asks < 1000 ? 1 : 50));
    }
    if (further() >= std::int64_t{1} << 32) return CUDA_SUCCESS;
    if (number == 0 && order != 0) {
      const std::byte* at = memory().reach(order, sizeof said);
      if (at == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
      std::memcpy(said, at, sizeof said);
    }
    const auto [from, to, all] = said;
    const std::uint64_t through = std::min(number * piece, all);
    const std::uint64_t size = std::min(all - through, piece);
    if (size != 0) {
      const bool gathers = (tell & 4) != 0;
      const std::byte* here = memory().reach(from + (gathers ? through : place), size);
      std::byte* there = memory().reach(to + (gathers ? place : through), size);
      if (here == nullptr || there == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
      std::memcpy(there, here, size);
    }
    place = place + piece >= area ? 0 : place + piece;
    if ((tell & 2) != 0) say(number % blocks, reached_at + 2 + number / blocks);
  }
  return CUDA_SUCCESS;
}

/// ugds_spin(nanoseconds). It sleeps instead: a test machine has few processors.
CUresult spin(const Arguments& arguments, unsigned, unsigned) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(arguments[0]));
  return CUDA_SUCCESS;
}

/// ugds_fill(address, bytes, seed)
CUresult fill(const Arguments& arguments, unsigned, unsigned) {
  const std::uint64_t address = arguments[0], bytes = arguments[1], seed = arguments[2];
  if (bytes == 0) return CUDA_SUCCESS;
  std::byte* to = memory().reach(address, bytes);
  if (to == nullptr) return CUDA_ERROR_ILLEGAL_ADDRESS;
  for (std::uint64_t i = 0; i < bytes; i++) to[i] = static_cast<std::byte>(pattern(i, seed));
  return CUDA_SUCCESS;
}

/// ugds_check(address, bytes, seed, result): adds how many bytes are wrong to the 64-bit word at `result`.
CUresult check(const Arguments& arguments, unsigned, unsigned) {
  const std::uint64_t address = arguments[0], bytes = arguments[1], seed = arguments[2], result = arguments[3];
  const std::byte* from = bytes == 0 ? nullptr : memory().reach(address, bytes);
  std::byte* to = result % 8 != 0 ? nullptr : memory().reach(result, 8);
  if (to == nullptr || (from == nullptr && bytes != 0)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  std::uint64_t wrong = 0;
  for (std::uint64_t i = 0; i < bytes; i++) wrong += from[i] != static_cast<std::byte>(pattern(i, seed));
  std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(to)).fetch_add(wrong, std::memory_order_relaxed);
  return CUDA_SUCCESS;
}

constexpr Kernel kernels[] = {{"ugds_copy", 1, copy},
                              {"ugds_pieces", 12, pieces, true},
                              {"ugds_spin", 1, spin},
                              {"ugds_fill", 3, fill},
                              {"ugds_check", 4, check}};

bool is_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '$';
}

}  // namespace

const Kernel* find_kernel(const std::string& name) {
  for (const Kernel& kernel : kernels) {
    if (name == kernel.name) return &kernel;
  }
  return nullptr;
}

std::vector<std::string> entries_of(const std::string& ptx) {
  static const std::string word = ".entry";
  std::vector<std::string> names;
  for (auto at = ptx.find(word); at != std::string::npos; at = ptx.find(word, at)) {
    at = ptx.find_first_not_of(" \t\r\n", at + word.size());
    std::string name;
    for (; at < ptx.size() && is_name(ptx[at]); at++) name += ptx[at];
    if (!name.empty()) names.push_back(name);
  }
  return names;
}

}  // namespace fake_cuda
