#pragma once

#include "harness/parity.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {

/// One run of a program, sharded or not, as the program sees it. What it
/// records is compared between the runs.
class Trial {
 public:
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

  Trial(const NamedUnits& units, at::Tensor rows, ShardedTensors* net);

  /// This rank's rows of the batch.
  const at::Tensor& rows() const { return rows_; }
  /// All parameters, in the order of the units.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  /// Null in the unsharded run.
  ShardedTensors* net() const { return net_; }
  bool sharded() const { return net_ != nullptr; }

  /// Runs `call`, in a region when sharded.
  template <class F>
  decltype(auto) forward(F&& call) {
    return net_ != nullptr ? net_->call(std::forward<F>(call))
                           : std::forward<F>(call)();
  }

  /// A value that is the same on all ranks, and without shards.
  void record(const std::string& what, const at::Tensor& value);
  void record(const std::string& what, double value);
  /// A value of which the mean over the ranks is that of the unsharded run.
  void record_mean(const std::string& what, const at::Tensor& value);
  /// Whole gradients, and which there are. Collective.
  void record_gradients(const std::string& when);
  /// Whole parameters. Collective.
  void record_parameters(const std::string& when);

  /// Takes one step of SGD on what record_gradients() shows, and forgets them.
  void step(double learning_rate = 0.1);

  Training& records() { return records_; }

 private:
  at::Tensor whole_gradient(const at::Tensor& parameter, size_t index);

  NamedTensors named_;
  std::vector<at::Tensor> parameters_;
  std::vector<std::vector<int64_t>> sizes_; // whole
  at::Tensor rows_;
  ShardedTensors* net_;
  Training records_;
};

struct TestProgram {
  NamedUnits units;
  std::function<void(Trial&)> body;
  /// Whatever must live as long as the tensors.
  std::shared_ptr<void> owner;
};
using MakeProgram = std::function<TestProgram()>;

/// Runs a program unsharded, and sharded in every world and strategy of
/// `settings`, and expects the same records; in one world the strategies must
/// agree bit for bit.
void expect_same_program(
    const MakeProgram& make,
    const ParitySettings& settings = {});

inline const std::vector<Strategy> kSharded = {
    Strategy::kFullShard,
    Strategy::kShardGradOp};

/// Calls `body` on every rank of every world.
void in_worlds(
    const std::vector<int>& world_sizes,
    const std::vector<Strategy>& strategies,
    const std::function<void(const World&, Strategy)>& body);

/// The whole tensor of which each rank holds one part, in order. Collective.
at::Tensor join_shards(
    const World& world,
    const at::Tensor& shard,
    at::IntArrayRef whole_sizes);

} // namespace fsdp::testing
