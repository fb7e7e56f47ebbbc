#include "api/world_state.h"

#include "runtime/errors.h"

#include <c10/util/irange.h>

#include <utility>
#include <vector>

namespace fsdp::detail {

World WorldState::make_world(
    std::shared_ptr<Communicator> communicator,
    Placement placement,
    Log log) {
  auto wrapped = WorldCommunicator::make(
      std::move(communicator), std::make_shared<WorldMembers>());
  return World(
      World::FromState(),
      std::make_shared<WorldState>(
          std::move(wrapped), std::move(placement), log));
}

WorldState::WorldState(
    std::shared_ptr<WorldCommunicator> communicator,
    Placement placement,
    Log log)
    : communicator_(std::move(communicator)),
      placement_(std::move(placement)),
      log_(log) {
}

WorldState::~WorldState() {
  if (!communicator_->has_ended()) {
    log_.debug("leaves without World::shutdown()");
  }
}

World WorldState::split(int color, int key) const {
  auto members = std::make_shared<WorldMembers>(communicator_->members());
  auto child = communicator_->split_world(color, key, std::move(members));
  const auto hosts =
      child->exchange(placement_.host, "hosts of a world that was split");
  auto placement = place_among(hosts, child->rank());
  return World(
      World::FromState(),
      std::make_shared<WorldState>(
          std::move(child), std::move(placement), log_));
}

void WorldState::shutdown() {
  if (communicator_->has_ended()) {
    return;
  }
  log_.debug("shuts the world down");
  try {
    communicator_->barrier("shutdown of the world");
  } catch (...) {
    communicator_->members()->end();
    throw;
  }
  communicator_->members()->end();
}

Placement place_among(const std::vector<std::string>& hosts, int rank) {
  Placement placement;
  placement.host = hosts.at(static_cast<size_t>(rank));
  placement.local_size = 0;
  for (const auto other : c10::irange(hosts.size())) {
    if (hosts[other] == placement.host) {
      placement.local_rank += static_cast<int>(other) < rank ? 1 : 0;
      ++placement.local_size;
    }
  }
  return placement;
}

} // namespace fsdp::detail
