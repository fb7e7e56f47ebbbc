#pragma once

#include <fsdp/unit_options.h>

#include <array>
#include <string>
#include <utility>

namespace fsdp::detail {

/// The names of LIBFSDP_STRATEGY and of messages.
inline constexpr std::array<std::pair<Strategy, const char*>, 6>
    kStrategyNames = {{
        {Strategy::kFullShard, "full_shard"},
        {Strategy::kShardGradOp, "shard_grad_op"},
        {Strategy::kShardOptimizer, "shard_optimizer"},
        {Strategy::kNoShard, "no_shard"},
        {Strategy::kHybridShard, "hybrid_shard"},
        {Strategy::kHybridShardGradOp, "hybrid_shard_grad_op"},
    }};

inline std::string strategy_name(Strategy strategy) {
  std::string found;
  for (const auto& [each, name] : kStrategyNames) {
    found = each == strategy ? name : found;
  }
  return found;
}

} // namespace fsdp::detail
