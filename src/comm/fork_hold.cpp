#include "comm/fork_hold.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <vector>

namespace fsdp::detail {
namespace {

struct ForkRegistry {
  std::mutex mutex; // a fork waits for it
  std::vector<int> descriptors;
  std::atomic<uint64_t> generation = 0;
};

// Never destroyed: descriptors of static objects may outlive any other static.
ForkRegistry& fork_registry() {
  static ForkRegistry& registry = *new ForkRegistry;
  return registry;
}

void before_fork() {
  fork_registry().mutex.lock();
}

void after_fork_in_parent() {
  fork_registry().mutex.unlock();
}

// Only what is safe in the child of a process with threads: no allocation.
void after_fork_in_child() {
  ForkRegistry& registry = fork_registry();
  for (const int descriptor : registry.descriptors) {
    ::close(descriptor);
  }
  registry.descriptors.clear();
  ++registry.generation;
  registry.mutex.unlock();
}

void watch_forks() {
  static const int error = ::pthread_atfork(
      &before_fork, &after_fork_in_parent, &after_fork_in_child);
  if (error != 0) {
    throw std::system_error(error, std::generic_category(), "pthread_atfork");
  }
}

} // namespace

uint64_t fork_generation() {
  return fork_registry().generation;
}

ForkHold::ForkHold() {
  watch_forks();
  fork_registry().mutex.lock();
}

ForkHold::~ForkHold() {
  fork_registry().mutex.unlock();
}

void ForkHold::close_in_children(int descriptor) const {
  fork_registry().descriptors.push_back(descriptor);
}

void ForkHold::forget(int descriptor) const {
  auto& descriptors = fork_registry().descriptors;
  descriptors.erase(
      std::remove(descriptors.begin(), descriptors.end(), descriptor),
      descriptors.end());
}

} // namespace fsdp::detail
