#pragma once

#include <fsdp/communicator.h>
#include <fsdp/export.h>

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

namespace fsdp {

namespace detail {
class WorldState;
} // namespace detail

/// A group of ranks that train together. A value: copies refer to one group,
/// which lives as long as any of them, or a net made from one.
///
/// Worlds, nets, models and optimizers may be destroyed in any order, also as
/// statics, and do not wait for a peer then (over Gloo up to two seconds, where
/// calls were given up). Where the last handle of a world of processes goes
/// before shutdown(), the rank has left: a peer that waits for it gets an error
/// that says so.
class FSDP_API World {
 public:
  /// A world of this process alone.
  World();
  /// A world over a communicator whose ranks are all on this host.
  explicit World(std::shared_ptr<Communicator> communicator);

  int rank() const;
  int size() const;

  /// This rank's number among those of its host, and how many they are.
  int local_rank() const;
  int local_size() const;

  /// Throws c10::DistBackendError after shutdown(). Its calls throw
  /// CommunicationError, then as well.
  Communicator& communicator() const;

  /// Waits until all ranks are here. Collective.
  void barrier() const;

  /// The world of the ranks that pass the same `color`, ordered by (`key`,
  /// rank). Collective.
  World split(int color, int key = 0) const;

  /// Waits until all ranks are here, then ends this world and those split from
  /// it: but for rank(), size() and their local forms, every later call on
  /// them, or on nets made from them, throws. Throws c10::DistBackendError when
  /// a rank does not come; the world has ended then too. The second call does
  /// nothing. Collective.
  void shutdown() const;

 private:
  friend class detail::WorldState;
  struct FromState {};
  World(FromState from, std::shared_ptr<detail::WorldState> state);
  std::shared_ptr<detail::WorldState> state_;
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
