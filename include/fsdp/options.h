#pragma once

#include <fsdp/export.h>
#include <fsdp/unit_options.h>
#include <fsdp/units.h>

#include <torch/arg.h>

#include <optional>
#include <string>
#include <vector>

namespace fsdp {

/// Settings of a net. All ranks pass the same; a difference is an error at
/// construction.
struct FSDP_API Options {
  /// Default: kFullShard.
  TORCH_ARG(Strategy, strategy) = Strategy::kFullShard;

  /// Ranks per group of the hybrid strategies, which need it; it divides the
  /// world size. Usually the number of ranks per host.
  TORCH_ARG(std::optional<int64_t>, shard_size);

  /// Which modules become units, the parts that are gathered, reduced and
  /// released together. Usually one unit per transformer block. What no policy
  /// takes forms the root unit. Default: the whole model is one unit, which
  /// saves optimizer state but holds all weights while computing.
  TORCH_ARG(UnitPolicy, units);

  /// Names of parameters, or of modules with all their parameters, to leave
  /// alone: not sharded, and their gradients are NOT reduced over the ranks, so
  /// they drift apart unless they are frozen or
  /// ShardedModule::average_ignored_gradients() runs before each step. To keep
  /// a module whole but reduced, make it a unit with strategy kNoShard instead.
  TORCH_ARG(std::vector<std::string>, ignore);

  /// Modules whose parameters and buffers, with all below them, keep their type
  /// whatever mixed_precision() says, in whichever unit they are: usually the
  /// normalisation layers. Other inputs of their operators are cast to that
  /// type, so model code needs no change. A rule's UnitOptions are not looked
  /// at.
  TORCH_ARG(UnitPolicy, full_precision);

  /// Broadcast parameters and buffers from rank 0 before sharding. Without it,
  /// ranks whose parameters differ are told so by an error.
  TORCH_ARG(bool, sync_module_states) = false;

  /// What summed gradients are divided by. Default: the number of ranks, which
  /// makes the mean. 1 keeps the sum.
  TORCH_ARG(std::optional<double>, gradient_divide_factor);

  /// How many units may be whole at once, beside those that one operator reads
  /// together. More slots save gathers when weights of several units are read
  /// in turn. Default: 2.
  TORCH_ARG(int64_t, slots) = 2;

 public:
  auto mixed_precision(const MixedPrecision& policy) -> Options& {
    mixed_precision_ = policy;
    return *this;
  }
  const MixedPrecision& mixed_precision() const { return mixed_precision_; }

 private:
  MixedPrecision mixed_precision_;
};

} // namespace fsdp
