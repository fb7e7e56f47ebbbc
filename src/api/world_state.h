#pragma once

#include "api/world_communicator.h"
#include "launch/log.h"

#include <fsdp/world.h>

#include <memory>
#include <string>
#include <vector>

namespace fsdp::detail {

/// Where a rank runs.
struct Placement {
  std::string host; // the same for all ranks of a host
  int local_rank = 0;
  int local_size = 1;
};

/// What the handles of a world share.
class WorldState {
 public:
  static World make_world(
      std::shared_ptr<Communicator> communicator,
      Placement placement,
      Log log = {});
  static const std::shared_ptr<WorldState>& of(const World& world) {
    return world.state_;
  }

  WorldState(
      std::shared_ptr<WorldCommunicator> communicator,
      Placement placement,
      Log log);
  /// Never waits: peers learn that this rank has left.
  ~WorldState();
  WorldState(const WorldState&) = delete;
  WorldState& operator=(const WorldState&) = delete;

  WorldCommunicator& communicator() const { return *communicator_; }
  const Placement& placement() const { return placement_; }

  World split(int color, int key) const;
  void shutdown();

 private:
  std::shared_ptr<WorldCommunicator> communicator_;
  Placement placement_;
  Log log_;
};

/// The place of `rank` among the ranks with the same host, of which `hosts` has
/// one entry per rank.
Placement place_among(const std::vector<std::string>& hosts, int rank);

} // namespace fsdp::detail
