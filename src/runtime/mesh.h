#pragma once

#include "comm/shared_weights.h"

#include <fsdp/communicator.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>

namespace fsdp::detail {

/// The ranks that share some units, as one of them sees it.
///
/// [Note: Meshes] A unit is sharded over `shards` ranks. These are all ranks of
/// the net, or with a hybrid strategy groups of neighbours; the ranks at the
/// same position of all groups hold replicas of one shard. Each sequence of
/// calls has a communicator of its own, since each rank makes the calls of one
/// sequence in the same order, but does not always interleave the sequences in
/// the same way.
struct Mesh {
  /// One group of all ranks of `world`, or groups of `shards` neighbours.
  /// Collective over `world`.
  static std::unique_ptr<Mesh> of_world(Communicator& world);
  static std::unique_ptr<Mesh> of_groups(Communicator& world, int shards);

  int shards = 1;
  int position = 0; // of this rank among those that share a unit
  std::shared_ptr<Communicator> gather;
  std::shared_ptr<Communicator> reduce;
  std::shared_ptr<Communicator> replicas; // null: there are none
  /// By their number: the groups of fewer neighbours over which weights are
  /// sharded between forward and backward (reshard_after_forward_to).
  std::map<int64_t, std::shared_ptr<Communicator>> parts;
  std::unique_ptr<SharedWeights> shared; // null: weights are not shared

  /// Makes the groups of `ranks` neighbours. They are no part of `gather`: a
  /// failure there would end their epochs, too. Collective over `world`.
  void add_part(Communicator& world, int64_t ranks);

  /// Lets the weights lie in memory that all see, where the ranks have such;
  /// `slice_bytes` by flat group. Collective.
  void share_weights(std::span<const int64_t> slice_bytes);

  void each_communicator(const std::function<void(Communicator&)>& visit) const;
};

} // namespace fsdp::detail
