#include <fsdp/world.h>

#include "comm/single_communicator.h"
#include "comm/thread_communicator.h"
#include "runtime/errors.h"

#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

namespace fsdp {

World::World() : communicator_(detail::make_single_communicator()) {
}

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

namespace {

/// What a rank throws because another failed may come before the cause: that
/// rank may still be destroying its net.
class FirstError {
 public:
  void add_cause(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    cause_ = cause_ ? cause_ : std::move(error);
  }
  void add_consequence(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    consequence_ = consequence_ ? consequence_ : std::move(error);
  }
  void rethrow() const {
    if (const auto& error = cause_ ? cause_ : consequence_) {
      std::rethrow_exception(error);
    }
  }

 private:
  std::mutex mutex_;
  std::exception_ptr cause_;
  std::exception_ptr consequence_;
};

void run_rank(
    const std::function<void(World)>& rank_main,
    const World& world,
    FirstError& first) {
  auto& communicator = world.communicator();
  try {
    rank_main(world);
  } catch (const c10::DistBackendError& error) {
    first.add_consequence(std::current_exception());
    communicator.signal_failure(detail::text_of(error));
  } catch (const CommunicationError& error) {
    first.add_consequence(std::current_exception());
    communicator.signal_failure(error.what());
  } catch (const std::exception& error) {
    first.add_cause(std::current_exception());
    communicator.signal_failure(detail::text_of(error));
  } catch (...) {
    first.add_cause(std::current_exception());
    communicator.signal_failure("an exception of an unknown type");
  }
  detail::leave_for_good(communicator); // nets of this rank may live on
}

} // namespace

void run_as_threads(
    int size,
    const std::function<void(World)>& rank_main,
    std::chrono::milliseconds timeout) {
  FirstError first;
  std::vector<std::thread> threads;
  for (auto& world : thread_worlds(size, timeout)) {
    threads.emplace_back([&, world] { run_rank(rank_main, world, first); });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  first.rethrow();
}

} // namespace fsdp
