#include <fsdp/world.h>

#include "comm/single_communicator.h"
#include "comm/thread_communicator.h"

#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace fsdp {

World::World() : communicator_(detail::make_single_communicator()) {}

World::World(std::shared_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)) {
  if (communicator_ == nullptr) {
    throw std::invalid_argument(
        "World: communicator is null. Pass one, or use World() for a single"
        " process.");
  }
}

int World::rank() const {
  return communicator_->rank();
}

int World::size() const {
  return communicator_->size();
}

Communicator& World::communicator() const {
  return *communicator_;
}

World World::split(int color, int key) const {
  return World(communicator_->split(color, key));
}

std::vector<World> thread_worlds(int size, std::chrono::milliseconds timeout) {
  std::vector<World> worlds;
  for (auto& communicator : detail::make_thread_communicators(size, timeout)) {
    worlds.emplace_back(std::move(communicator));
  }
  return worlds;
}

void run_as_threads(
    int size,
    const std::function<void(World)>& rank_main,
    std::chrono::milliseconds timeout) {
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (auto& world : thread_worlds(size, timeout)) {
    threads.emplace_back([&, world] {
      try {
        rank_main(world);
      } catch (const std::exception& error) {
        {
          const std::lock_guard lock(mutex);
          first = first ? first : std::current_exception();
        }
        world.communicator().signal_failure(error.what());
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

} // namespace fsdp
