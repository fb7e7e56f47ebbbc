#pragma once

#include "harness/ranks.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {

using NamedUnits = ShardedTensors::NamedUnits;

/// A model that a test trains: its tensors in units, and its loss.
struct TestModel {
  NamedUnits units;
  /// The mean loss over the rows of the global batch that `rows` names. A model
  /// whose loss is not a mean over rows ignores them.
  std::function<at::Tensor(const at::Tensor& rows)> loss;
  /// Whatever must live as long as the tensors.
  std::shared_ptr<void> owner;
};
using MakeModel = std::function<TestModel()>;

/// Whether ranks share the rows of the batch, or all take all of them (for
/// losses that are no mean over rows).
enum class Batch : uint8_t { kSplit, kSame };
enum class Optimizer : uint8_t { kAdamW, kSgd };

/// Of the global batch.
inline constexpr int64_t kRows = 12;

inline const std::vector<Strategy> kAllStrategies = {
    Strategy::kFullShard,
    Strategy::kShardGradOp,
    Strategy::kShardOptimizer,
    Strategy::kNoShard};

/// Whether weights stay whole between regions.
inline bool keeps_whole_weights(const ShardedModule& net) {
  for (const auto& unit : net.describe().units) {
    if (unit.strategy == Strategy::kShardOptimizer) {
      return true;
    }
  }
  return false;
}

struct Training {
  std::vector<double> losses;                                 // mean over ranks
  std::vector<std::pair<std::string, at::Tensor>> parameters; // whole
};

struct ParitySettings {
  int steps = 4;
  Batch batch = Batch::kSplit;
  Optimizer optimizer = Optimizer::kAdamW;
  double learning_rate = 1e-2;
  double loss_tolerance = 1e-6;      // relative
  double parameter_tolerance = 1e-6; // of the tensor's largest value, + 1e-8
  std::vector<int> world_sizes = tested_world_sizes();
  std::vector<Strategy> strategies = kAllStrategies;
  /// Also as two groups of ranks, where sums have another order.
  bool hybrid = true;
  std::vector<std::string> skip = {}; // parameters that are not compared
  Options options = {};
};

/// Builds a model with a fixed seed, one thread at a time (the default
/// generator is shared by all threads).
TestModel build(const MakeModel& make);

Training train_unsharded(const MakeModel& make, const ParitySettings& settings);
/// What the ranks see that run in this process, by rank.
std::map<int, Training> train_sharded(
    const MakeModel& make,
    const ParitySettings& settings,
    int world_size,
    Strategy strategy);

/// The rows of the global batch that this rank takes: all where they can not be
/// shared evenly.
at::Tensor rows_of_rank(const World& world, Batch batch = Batch::kSplit);

/// The tensors of all units, each once, by name.
std::vector<std::pair<std::string, at::Tensor>> tensors_of(
    const NamedUnits& units);

/// For those of `parameters` that require a gradient.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const std::vector<at::Tensor>& parameters,
    const ParitySettings& settings);

/// Trains unsharded, and sharded in every world and strategy of `settings`, and
/// expects the same losses and parameters; in one world the strategies must
/// agree bit for bit.
void expect_same_training(
    const MakeModel& make,
    const ParitySettings& settings = {});

/// The same, of sharded training alone.
void expect_same_training_as(
    const Training& expected,
    const MakeModel& make,
    const ParitySettings& settings);

/// The same bits.
void expect_identical(const Training& expected, const Training& actual);

void expect_same(
    const Training& expected,
    const Training& actual,
    const ParitySettings& settings);

/// |actual - expected| <= relative * max|expected| + absolute for all elements,
/// and the same shape and dtype. (The order of summation differs between
/// worlds, so an element may be off by the rounding of larger ones.)
::testing::AssertionResult all_close(
    const at::Tensor& actual,
    const at::Tensor& expected,
    double relative,
    double absolute);

/// The text of the exception that `call` throws; empty when it throws none.
std::string error_of(const std::function<void()>& call);

/// Whole values of all parameters by name, as whole_parameters() shows them.
/// Collective.
std::vector<std::pair<std::string, at::Tensor>> whole_values(
    ShardedModule& net);

/// The same, joined from the shards of the ranks. Collective.
std::vector<std::pair<std::string, at::Tensor>> values_at_rest(
    ShardedModule& net);

/// The mean of a scalar over the ranks. Collective.
double mean_over_ranks(const World& world, double value);

} // namespace fsdp::testing
