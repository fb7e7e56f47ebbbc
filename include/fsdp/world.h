#pragma once

#include <fsdp/communicator.h>
#include <fsdp/export.h>

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

namespace fsdp {

/// A group of ranks that train together. A value: copies refer to one group,
/// which lives as long as any of them, or a net made from one.
class FSDP_API World {
 public:
  /// A world of this process alone.
  World();
  explicit World(std::shared_ptr<Communicator> communicator);

  int rank() const;
  int size() const;
  Communicator& communicator() const;

  /// The world of the ranks that pass the same `color`, ordered by (`key`,
  /// rank). Collective.
  World split(int color, int key = 0) const;

 private:
  std::shared_ptr<Communicator> communicator_;
};

/// Worlds of `size` ranks that are threads of this process, by rank; give each
/// thread its own. The longest wait for a peer is `timeout`.
FSDP_API std::vector<World> thread_worlds(
    int size,
    std::chrono::milliseconds timeout = std::chrono::minutes(10));

/// Runs `rank_main` on `size` ranks, each a thread of this process, and waits
/// for all of them. A rank that throws fails its peers in their next wait, in
/// all groups that they share, and a rank that has ended fails who still waits
/// for it. The first exception is thrown that is not the news of another
/// rank's.
FSDP_API void run_as_threads(
    int size,
    const std::function<void(World)>& rank_main,
    std::chrono::milliseconds timeout = std::chrono::minutes(10));

} // namespace fsdp
