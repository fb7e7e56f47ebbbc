#pragma once

#include "harness/parity.h"

#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::testing {

/// The longest wait for another rank or thread.
inline constexpr std::chrono::seconds kWaitLimit(20);

/// Linear layers in a row, one unit each. 15 wide by default: no slice is even,
/// and with four ranks one of them owns nothing of a layer.
struct Chain {
  explicit Chain(int count = 4, int64_t width = 15);

  NamedUnits units() const;
  std::vector<at::Tensor> parameters() const;
  at::Tensor& weight(size_t layer) { return layers.at(layer)->weight; }
  at::Tensor& bias(size_t layer) { return layers.at(layer)->bias; }

  at::Tensor forward(at::Tensor y);
  at::Tensor loss(const at::Tensor& rows);

  std::vector<torch::nn::Linear> layers;
  at::Tensor x;    // (kRows, width)
  at::Tensor kept; // whatever a test keeps from step to step
};

/// A chain, built under the lock and with the seed of build().
std::shared_ptr<Chain> build_chain(int count = 4, int64_t width = 15);

using ChainLoss = std::function<at::Tensor(Chain&, const at::Tensor& rows)>;

MakeModel chain_with(ChainLoss loss);

/// Runs before each step of a training; `net` is null in the unsharded one.
/// Step -1 comes before the model is sharded.
using BeforeStep =
    std::function<void(int step, Chain& chain, ShardedTensors* net)>;

struct ChainTraining {
  BeforeStep before_step = [](int, Chain&, ShardedTensors*) {};
  ChainLoss loss = [](Chain& chain, const at::Tensor& rows) {
    return chain.loss(rows);
  };
  ParitySettings settings;
};

/// Like expect_same_training, for chains: the unsharded training and the
/// sharded ones run the same steps.
void expect_same_training(const ChainTraining& training);

/// Trains chains on 1 to 4 ranks, runs `event` on every rank after the first
/// step, and expects that training goes on as if nothing had happened.
void expect_undisturbed(
    const std::function<void(Chain& chain, ShardedTensors& net)>& event,
    const ParitySettings& settings = {});

/// For what only matters where parameters are split.
ParitySettings split_strategies();

/// Whether `call` throws, and the text has all `parts`.
::testing::AssertionResult fails_with(
    const std::function<void()>& call,
    const std::vector<std::string>& parts);

} // namespace fsdp::testing
