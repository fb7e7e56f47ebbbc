#include <fsdp/world.h>

#include "api/world_state.h"
#include "comm/single_communicator.h"
#include "comm/thread_communicator.h"
#include "runtime/errors.h"

#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

namespace fsdp {

namespace {

/// Of a world whose ranks are all on this host.
World make_local_world(std::shared_ptr<Communicator> communicator) {
  detail::Placement placement;
  placement.local_rank = communicator->rank();
  placement.local_size = communicator->size();
  return detail::WorldState::make_world(
      std::move(communicator), std::move(placement));
}

} // namespace

World::World() : World(detail::make_single_communicator()) {
}

World::World(std::shared_ptr<Communicator> communicator) {
  if (communicator == nullptr) {
    throw std::invalid_argument(
        "World: communicator is null. Pass one, or use World() for a single"
        " process.");
  }
  *this = make_local_world(std::move(communicator));
}

World::World(FromState, std::shared_ptr<detail::WorldState> state)
    : state_(std::move(state)) {
}

int World::rank() const {
  return state_->communicator().rank();
}

int World::size() const {
  return state_->communicator().size();
}

int World::local_rank() const {
  return state_->placement().local_rank;
}

int World::local_size() const {
  return state_->placement().local_size;
}

Communicator& World::communicator() const {
  auto& communicator = state_->communicator();
  TORCH_CHECK_WITH(
      DistBackendError,
      !communicator.has_ended(),
      communicator.ended_text("fsdp::World"));
  return communicator;
}

void World::barrier() const {
  detail::communicate([&] { communicator().barrier("World::barrier"); });
}

World World::split(int color, int key) const {
  return detail::communicate([&] { return state_->split(color, key); });
}

void World::shutdown() const {
  detail::communicate([&] { state_->shutdown(); });
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
    const std::shared_ptr<Communicator>& rank_communicator,
    FirstError& first) {
  auto& communicator = *rank_communicator;
  try {
    rank_main(World(rank_communicator));
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
  for (auto& communicator : detail::make_thread_communicators(size, timeout)) {
    threads.emplace_back([&, mine = std::move(communicator)] {
      run_rank(rank_main, mine, first);
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  first.rethrow();
}

} // namespace fsdp
