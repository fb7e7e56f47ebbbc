#pragma once

#include "random/spec.h"

#include <fsdp/world.h>

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace fsdp::random_models {

/// How all units, or in kPerLayer each layer by itself, are cut.
enum class Cut : uint8_t {
  kFullShard,
  kShardGradOp,
  kShardOptimizer,
  kNoShard,
  kPerLayer,
  kHybrid, // in groups of half the ranks, or of one; layers in all ways
};

/// By name of the parameter. A gradient may be undefined.
using Values = std::map<std::string, at::Tensor>;

/// What a training showed.
struct Training {
  std::vector<double> losses;      // each micro-batch, mean over ranks
  std::vector<double> evaluations; // mean over ranks
  std::vector<double> norms;       // what clipping returned
  std::vector<Values> gradients;   // whole, at the end of each step
  Values parameters;               // whole, at the end
  std::string complaint;           // about whole_parameters(); usually empty
};

using WrapWorld = std::function<World(const World&)>;

struct RunSettings {
  std::chrono::milliseconds timeout = std::chrono::seconds(20);
  WrapWorld wrap; // empty: the world as it is
};

/// Both throw what the training throws.
Training train_unsharded(const Spec& spec);
Training train_sharded(const Spec& spec, Cut cut, const RunSettings& settings);

/// Trains the model of `spec` unsharded and sharded in all ways, and says where
/// results differ; empty when they agree.
std::string failure_of(const Spec& spec, const RunSettings& settings = {});

/// A failure whose text begins so is a fault of the test: the unsharded
/// training threw.
inline constexpr const char* kUnsharded = "unsharded: ";

} // namespace fsdp::random_models
