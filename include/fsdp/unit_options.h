#pragma once

#include <fsdp/export.h>

#include <c10/core/ScalarType.h>
#include <torch/arg.h>

#include <cstdint>
#include <optional>

namespace fsdp {

/// What a group of ranks holds once instead of once per rank.
enum class Strategy : uint8_t {
  /// Parameters, gradients and optimizer state (ZeRO-3). Whole weights exist
  /// only while they are used, in forward and again in backward.
  kFullShard,
  /// The same at rest, but weights stay whole from forward to backward
  /// (ZeRO-2): one gather per step instead of two, at the price of all weights
  /// in memory.
  kShardGradOp,
  /// Optimizer state (ZeRO-1): what a training pass has gathered stays whole
  /// until gradients are reduced, through any number of passes. (After that an
  /// optimizer may write to shards; passes without gradients, which may come
  /// before its step, gather for themselves.) Gradients are shards as soon as
  /// they are reduced.
  kShardOptimizer,
  /// Nothing: every rank holds all of it and gradients are averaged (data
  /// parallel).
  kNoShard,
  /// kFullShard inside groups of Options::shard_size() neighbouring ranks, and
  /// replicas over the groups: gathers stay inside a group, gradients are
  /// reduced inside it and then averaged over the groups.
  kHybridShard,
  /// kShardGradOp inside such groups.
  kHybridShardGradOp,
};

/// Which types weights have while they compute and while gradients are reduced.
/// What a rank holds at rest keeps the type that the model was built with.
struct MixedPrecision {
  /// Type of whole weights, of the gathers and of the computation; floating
  /// point parameters only. Nothing: the parameter's own type.
  std::optional<at::ScalarType> param_dtype = std::nullopt;
  /// Type in which gradients are accumulated and reduced. Nothing: the type in
  /// which they arrive (param_dtype). kFloat keeps small contributions when
  /// param_dtype has 16 bits.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  /// Type of the floating point buffers of the modules of a unit: they are cast
  /// once, when the model is sharded. Nothing: they stay as they are.
  std::optional<at::ScalarType> buffer_dtype = std::nullopt;
  /// Of Options only: the floating point tensors that net(...) and
  /// net.call(...) return are cast to it, also inside of tuples, vectors and
  /// the like. Nothing: they are returned as they were computed.
  std::optional<at::ScalarType> output_dtype = std::nullopt;
  /// Cast the other floating point inputs of an operator that reads a weight to
  /// the type of that weight, so that model code needs no change.
  bool cast_inputs = true;
};

/// Settings of one unit; what is not set comes from Options.
struct FSDP_API UnitOptions {
  TORCH_ARG(std::optional<Strategy>, strategy);
  /// False: this unit's weights stay whole from forward to backward, as with
  /// kShardGradOp.
  TORCH_ARG(std::optional<bool>, reshard_after_forward);
  /// Between forward and backward this unit's weights are sharded over groups
  /// of that many neighbouring ranks instead of all: the gather for backward
  /// stays inside of a group. Divides the number of ranks that share the unit.
  /// A strategy that keeps weights whole does so no more in this unit.
  TORCH_ARG(std::optional<int64_t>, reshard_after_forward_to);

 public:
  auto mixed_precision(const MixedPrecision& policy) -> UnitOptions& {
    mixed_precision_ = policy;
    return *this;
  }
  const std::optional<MixedPrecision>& mixed_precision() const {
    return mixed_precision_;
  }

 private:
  std::optional<MixedPrecision> mixed_precision_;
};

} // namespace fsdp
