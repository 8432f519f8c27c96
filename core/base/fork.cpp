// SPDX-License-Identifier: Apache-2.0
#include "base/fork.hpp"

#include <pthread.h>

#include <array>
#include <atomic>
#include <mutex>

#include "base/immortal.hpp"

namespace ugds {

namespace {

struct Tables {
  std::mutex lock;
  std::array<ForkHooks, static_cast<std::size_t>(ForkOrder::observed_events) + 1> hooks{};  // by ForkOrder
  bool registered = false;
};
constinit Immortal<Tables> tables;
std::atomic<unsigned> generation{0};

void call(void (*hook)()) {
  if (hook != nullptr) hook();
}

void prepare() {
  tables.value.lock.lock();
  for (const ForkHooks& hooks : tables.value.hooks) call(hooks.prepare);
}

void in_parent() {
  auto& all = tables.value.hooks;
  for (auto hooks = all.rbegin(); hooks != all.rend(); ++hooks) call(hooks->parent);
  tables.value.lock.unlock();
}

void in_child() {
  generation.fetch_add(1);
  auto& all = tables.value.hooks;
  for (auto hooks = all.rbegin(); hooks != all.rend(); ++hooks) call(hooks->child);
  tables.value.lock.unlock();
}

}  // namespace

void on_fork(ForkOrder order, const ForkHooks& hooks) {
  std::lock_guard guard(tables.value.lock);
  if (!tables.value.registered) pthread_atfork(prepare, in_parent, in_child);
  tables.value.registered = true;
  tables.value.hooks[static_cast<std::size_t>(order)] = hooks;
}

unsigned fork_generation() { return generation.load(std::memory_order_relaxed); }

}  // namespace ugds
