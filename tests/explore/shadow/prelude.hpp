// SPDX-License-Identifier: Apache-2.0
//
// Included before everything else in the explorer's build: the core's atomics and mutexes become the explorer's, by
// their names. Every standard header that the core uses is taken in first, so that only the core is changed.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <climits>
#include <compare>
#include <condition_variable>
#include <csignal>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <random>
#include <set>
#include <shared_mutex>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "atomics.hpp"

namespace std {
using ugds::explore::explored_atomic;
using ugds::explore::explored_atomic_ref;
using ugds::explore::explored_mutex;
}  // namespace std

#define atomic explored_atomic
#define atomic_ref explored_atomic_ref
#define mutex explored_mutex
#define condition_variable condition_variable_any
