// SPDX-License-Identifier: Apache-2.0
#include "choices.hpp"

#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <utility>
#include <vector>

namespace ugds::explore {

namespace {

struct Choice {
  std::uint32_t taken = 0, count = 0;
};

std::vector<Choice> path;
std::size_t position = 0;
std::uint32_t depth = 0;
std::uint64_t executions = 0, choices_beyond = 0;
const char* scenario_name = "";
/// Only for the replay that a report makes: the words of each choice.
std::vector<std::string> words;
bool telling = false;

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

double seconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

std::uint32_t take(std::uint32_t count) {
  if (position == path.size()) {
    if (path.size() >= depth) {
      ++choices_beyond;
      return 0;
    }
    path.push_back({0, count});
  }
  const Choice& choice = path[position++];
  if (telling) return choice.taken;
  if (choice.count != count) violated("an execution repeats", "the same choices led to another number of options");
  return choice.taken;
}

/// To the next sequence. False: there is none.
bool advance() {
  while (!path.empty()) {
    if (++path.back().taken < path.back().count) return true;
    path.pop_back();
  }
  return false;
}

/// What a broken engine does is seen with the choices that led to it.
void report_crashes() {
  static std::byte stack[65536];
  const stack_t other{stack, 0, sizeof stack};
  sigaltstack(&other, nullptr);
  struct sigaction action {};
  action.sa_handler = [](int) { violated("nothing crashes", "the program was about to be ended by a signal"); };
  action.sa_flags = SA_ONSTACK;
  for (const int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) sigaction(number, &action, nullptr);
}

}  // namespace

std::uint32_t choose(std::uint32_t count, const char* what, const std::function<std::string(std::uint32_t)>& option) {
  if (count <= 1) return 0;
  const std::uint32_t taken = take(count);
  if (telling) words.push_back(std::string(what) + ": " + option(taken));
  return taken;
}

std::uint32_t choose(std::uint32_t count, const char* what) {
  return choose(count, what, [](std::uint32_t i) { return std::to_string(i); });
}

void violated(const char* property, const std::string& how) {
  std::printf("VIOLATED: %s\n  scenario: %s, execution %llu\n  %s\n", property, scenario_name,
              static_cast<unsigned long long>(executions + 1), how.c_str());
  for (const std::string& word : words) std::printf("  - %s\n", word.c_str());
  if (!telling) {
    std::printf("  choices:");
    for (std::size_t i = 0; i < position; ++i) std::printf(" %u", path[i].taken);
    std::printf("\n  in words: UGDS_EXPLORE_REPLAY=\"");
    for (std::size_t i = 0; i < position; ++i) std::printf("%s%u", i == 0 ? "" : " ", path[i].taken);
    std::printf("\" with this scenario alone\n");
  }
  std::fflush(stdout);
  std::_Exit(1);
}

void explore(const Scenario& scenario, const std::function<void()>& body) {
  scenario_name = scenario.name;
  depth = scenario.depth;
  if (kSanitized) depth -= std::min(depth, scenario.less_under_sanitizers);
  if (const char* deeper = std::getenv("UGDS_EXPLORE_DEEPER")) depth += static_cast<std::uint32_t>(std::atoi(deeper));
  if (!kSanitized) report_crashes();
  path.clear();
  std::vector<Choice> kept;
  executions = choices_beyond = 0;
  if (const char* replay = std::getenv("UGDS_EXPLORE_REPLAY")) {
    // Counts are not known yet: they are taken as they come.
    telling = true;
    depth = 0;
    for (const char* at = replay; *at != '\0'; ++depth) {
      char* end = nullptr;
      path.push_back({static_cast<std::uint32_t>(std::strtoul(at, &end, 10)), 0});
      at = end;
    }
  }
  // What is done once a process, such as finding the number of processors, is done before anything is counted.
  std::swap(path, kept);
  const std::uint32_t wanted = std::exchange(depth, 0);
  position = 0;
  body();
  depth = wanted;
  std::swap(path, kept);
  const double start = seconds();
  choices_beyond = 0;
  do {
    position = 0;
    words.clear();
    body();
    ++executions;
  } while (!telling && advance());
  if (telling) {
    for (const std::string& word : words) std::printf("  - %s\n", word.c_str());
  }
  std::printf("explored: %s: %llu executions to a depth of %u choices in %.1f s%s\n", scenario.name,
              static_cast<unsigned long long>(executions), depth, seconds() - start,
              choices_beyond == 0 ? ", which is all of it" : "");
  std::fflush(stdout);
}

}  // namespace ugds::explore
