// SPDX-License-Identifier: Apache-2.0
#include "threads.hpp"

#include <sched.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstring>
#include <ctime>
#include <deque>
#include <memory>

#include "choices.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace ugds::explore {

std::uint64_t now_ns = 0;
bool fine = false;

namespace {

constexpr std::size_t kStack = 512 * 1024;
/// A lapse of time: so many empty turns of each who waits, of so long each. Longer than any deadline of a scenario, and
/// a multiple of the turns after which a wait looks around.
constexpr std::uint32_t kLapseTurns = 256;
constexpr std::uint64_t kLapseStep = 10'000'000;
/// More decisions than any execution that ends has.
constexpr std::uint32_t kMostDecisions = 2000;
/// Steps without a wait after which another thread goes on, without a choice: it may hold what this one spins for.
constexpr std::uint32_t kLongestRun = 5000;
/// Steps of a turn that finds nothing. Such turns are alike: while time passes none of them is interrupted.
constexpr std::uint32_t kEmptyTurn = 8;

struct Buffered {
  void* to;
  std::uint64_t value;
  std::uint32_t bytes;
};

struct Thread {
  ucontext_t context{};
  std::byte* stack = nullptr;
  const Body* body = nullptr;
  enum class State : std::uint8_t { idle, parked, running, finished } state = State::idle;
  const char* call = "";
  std::uint32_t turns_left = 0;  ///< of a lapse of time
  std::uint32_t steps = 0;
  std::deque<Buffered> stores;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
#endif
};

std::vector<std::unique_ptr<Thread>> threads;
std::size_t live = 0;  ///< of this execution
Thread* current = nullptr;
ucontext_t main_context;
std::uint64_t changes = 0, lapse_changes = 0;
std::uint32_t preemptions_left = 0;
Thread* go_on_with = nullptr;
World* world_now = nullptr;
#if defined(__SANITIZE_ADDRESS__)
void* main_fake = nullptr;
const void* main_bottom = nullptr;
std::size_t main_size = 0;
#endif

void drain(Thread& thread) {
  for (const Buffered& s : thread.stores) std::memcpy(s.to, &s.value, s.bytes);
  thread.stores.clear();
}

void to_main() {
  Thread& self = *current;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&self.fake, main_bottom, main_size);
#endif
  swapcontext(&self.context, &main_context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(self.fake, &main_bottom, &main_size);
#endif
}

/// Bodies end, threads do not: the next execution uses them again.
void thread_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &main_bottom, &main_size);
#endif
  for (;;) {
    try {
      current->body->run();
    } catch (const std::exception& error) {
      violated("no call throws", error.what());
    }
    drain(*current);
    current->state = Thread::State::finished;
    ++changes;
    to_main();
  }
}

void resume(Thread& thread) {
  current = &thread;
  thread.steps = 0;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&main_fake, thread.stack, kStack);
#endif
  swapcontext(&main_context, &thread.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(main_fake, nullptr, nullptr);
#endif
  current = nullptr;
  world_now->check();
}

void make_thread() {
  auto made = std::make_unique<Thread>();
  made->stack = static_cast<std::byte*>(
      mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0));
  getcontext(&made->context);
  made->context.uc_stack.ss_sp = made->stack;
  made->context.uc_stack.ss_size = kStack;
  makecontext(&made->context, thread_main, 0);
  threads.push_back(std::move(made));
}

/// Every thread that runs, until none of them has done anything but wait since all have looked.
void settle() {
  for (std::uint64_t before = changes + 1; before != changes;) {
    before = changes;
    for (std::size_t i = 0; i < live; ++i) {
      Thread* thread = threads[i].get();
      while (thread != nullptr && thread->state == Thread::State::running) {
        resume(*thread);
        thread = std::exchange(go_on_with, nullptr);
      }
    }
  }
}

/// False: all have finished.
bool decide(std::uint32_t decisions) {
  World& world = *world_now;
  const std::uint32_t actions = world.device_actions();
  Thread* parked[16];
  std::uint32_t waiting = 0, begins = 0, unfinished = 0;
  for (std::size_t i = 0; i < live; ++i) {
    Thread& thread = *threads[i];
    unfinished += thread.state != Thread::State::finished;
    waiting += thread.state == Thread::State::running;
    if (thread.state == Thread::State::parked) parked[begins++] = &thread;
  }
  if (unfinished == 0) return false;
  if (decisions > kMostDecisions) violated("every execution ends", "after 2000 decisions it had not");
  const std::uint32_t count = actions + begins + (waiting != 0 ? 1 : 0);
  // The first option is of those that lead to the end: mischief comes last.
  const std::uint32_t first = world.device_has_work() ? 0 : actions;
  const auto option = [&](std::uint32_t i) { return (i + first) % count; };
  const std::uint32_t taken = option(world.quiet() ? 0 : choose(count, "then", [&](std::uint32_t chosen) {
    const std::uint32_t i = option(chosen);
    if (i < actions) return "the device " + world.name_of(i);
    if (i < actions + begins) return std::string(parked[i - actions]->body->name) + ": " + parked[i - actions]->call;
    return std::string("time passes");
  }));
  ++changes;
  if (taken < actions) {
    world.act(taken);
    world.check();
  } else if (taken < actions + begins) {
    parked[taken - actions]->state = Thread::State::running;
  } else {
    lapse_changes = changes;
    for (std::size_t i = 0; i < live; ++i) threads[i]->turns_left = kLapseTurns;
  }
  return true;
}

}  // namespace

bool in_thread() { return current != nullptr; }
void happened() { ++changes; }

void run_threads(World& world, const std::vector<Body>& bodies, Fineness fineness) {
  while (threads.size() < bodies.size()) make_thread();
  world_now = &world;
  live = bodies.size();
  preemptions_left = fineness.preemptions;
  fine = preemptions_left != 0;
  for (std::size_t i = 0; i < live; ++i) {
    threads[i]->body = &bodies[i];
    threads[i]->state = Thread::State::running;
    threads[i]->turns_left = 0;
  }
  for (std::uint32_t decisions = 0;; ++decisions) {
    settle();
    if (!decide(decisions)) break;
  }
  fine = false;
}

void begin(const char* call) {
  drain(*current);
  current->call = call;
  current->state = Thread::State::parked;
  ++changes;
  to_main();
}

void idle() {
  if (current == nullptr) violated("nothing waits outside of a thread", "a wait was reached in set-up or clean-up");
  Thread& self = *current;
  drain(self);
  self.steps = 0;
  if (self.turns_left != 0) {
    if (changes == lapse_changes) {
      --self.turns_left;
      now_ns += kLapseStep;
      return;
    }
    self.turns_left = 0;
  }
  to_main();
}

void step() {
  if (current == nullptr) return;
  Thread& self = *current;
  if (++self.steps > kLongestRun) {
    self.steps = 0;
    drain(self);
    ++changes;
    to_main();
    return;
  }
  if (preemptions_left == 0 || (self.turns_left != 0 && self.steps <= kEmptyTurn)) return;
  Thread* others[16];
  std::uint32_t count = 0;
  for (std::size_t i = 0; i < live; ++i) {
    Thread* const other = threads[i].get();
    if (other != &self && other->state == Thread::State::running) others[count++] = other;
  }
  // Whether what this thread has stored is seen before it goes on is a choice too.
  const std::uint32_t ways = self.stores.empty() ? 1 : 2;
  const std::uint32_t taken = choose(1 + count * ways, "step", [&](std::uint32_t i) {
    if (i == 0) return std::string(self.body->name) + " goes on";
    return std::string(others[(i - 1) / ways]->body->name) + " goes on" +
           ((i - 1) % ways == 1 ? ", and does not see yet what " + std::string(self.body->name) + " stored" : "");
  });
  if (taken == 0) return;
  --preemptions_left;
  if ((taken - 1) % ways == 0) drain(self);
  go_on_with = others[(taken - 1) / ways];
  ++changes;
  to_main();
}

void fence() {
  step();
  if (current != nullptr) drain(*current);
}

void flush_stores() {
  if (current != nullptr) drain(*current);
}

void buffered_store(void* to, const void* from, std::uint32_t bytes) {
  Buffered store{to, 0, bytes};
  std::memcpy(&store.value, from, bytes);
  // What is on its own stack may be gone before it is stored; and nobody else looks at it.
  const auto* const at = static_cast<std::byte*>(to);
  if (current == nullptr || (at >= current->stack && at < current->stack + kStack)) {
    std::memcpy(to, from, bytes);
  } else {
    current->stores.push_back(store);
  }
}

void buffered_load(void* to, const void* from, std::uint32_t bytes) {
  std::memcpy(to, from, bytes);
  if (current == nullptr) return;
  for (const Buffered& s : current->stores) {
    if (s.to == from && s.bytes == bytes) std::memcpy(to, &s.value, bytes);
  }
}

}  // namespace ugds::explore

#include "shadow/atomics.hpp"

namespace ugds::explore {

void explored_mutex::lock() {
  if (fine) fence();
  while (taken_) idle();
  taken_ = true;
}
bool explored_mutex::try_lock() {
  if (fine) fence();
  return !std::exchange(taken_, true);
}
void explored_mutex::unlock() {
  if (fine) fence();
  taken_ = false;
}

}  // namespace ugds::explore

// Other ways of waiting, of the C library.
extern "C" int sched_yield() noexcept { return 0; }
extern "C" int nanosleep(const timespec* wait, timespec*) {
  ugds::explore::now_ns +=
      static_cast<std::uint64_t>(wait->tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(wait->tv_nsec);
  ugds::explore::idle();
  return 0;
}
