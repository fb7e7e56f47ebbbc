#pragma once

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace hybrid {

inline const std::vector<Strategy> kHybrid = {
    Strategy::kHybridShard,
    Strategy::kHybridShardGradOp};

/// In groups of every size that divides the world.
inline ProgramSettings only_hybrid(
    const std::vector<int>& world_sizes = {1, 2, 3, 4}) {
  ProgramSettings settings;
  settings.world_sizes = world_sizes;
  settings.strategies = {};
  settings.hybrid_strategies = kHybrid;
  settings.shard_sizes = all_shard_sizes;
  settings.options.units(each<Block>());
  return settings;
}

inline Options options_of(Strategy strategy, int64_t shard_size) {
  return Options().strategy(strategy).shard_size(shard_size);
}

/// On the ranks of each world, with each strategy and group size.
inline void on_groups(
    const std::vector<int>& world_sizes,
    const std::function<void(const World&, const Options&)>& body) {
  for (const int size : world_sizes) {
    for (const auto shard_size : all_shard_sizes(size)) {
      for (const auto strategy : kHybrid) {
        SCOPED_TRACE(
            "shard size " + std::to_string(shard_size) + " of " +
            std::to_string(size));
        on_ranks(size, [&](const World& world) {
          body(world, options_of(strategy, shard_size));
        });
        if (::testing::Test::HasFailure()) {
          return;
        }
      }
    }
  }
}

/// All ranks at one position of the groups hold the same bits, and gradients.
inline void expect_equal_replicas(ShardedModule& net, int64_t shard_size) {
  for (const auto& [name, tensor] : net.named_parameters()) {
    for (const auto& each : {tensor, tensor.grad()}) {
      std::string bytes;
      if (each.defined()) {
        const auto flat = each.detach().contiguous();
        bytes.assign(
            static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
      }
      const auto all = net.world().communicator().exchange(bytes, "replicas");
      for (size_t rank = 0; rank < all.size(); ++rank) {
        const auto position = rank % static_cast<size_t>(shard_size);
        EXPECT_EQ(all[rank], all[position]) << name << ", rank " << rank;
      }
    }
  }
}

} // namespace hybrid
} // namespace fsdp::testing
