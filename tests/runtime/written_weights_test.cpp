// Writes to whole weights inside of regions reach the shards, once.

#include "harness/chain.h"

namespace fsdp::testing {
namespace {

using at::Tensor;

/// Trains a chain that writes to weights before each forward pass. One slot:
/// each unit is let go and gathered again under way.
void expect_writes_train(const std::function<void(Chain&)>& write) {
  for (const int slots : {1, 4}) {
    ChainTraining training;
    training.settings.options.slots(slots);
    training.loss = [write](Chain& chain, const Tensor& rows) {
      write(chain);
      return chain.loss(rows);
    };
    expect_same_training(training);
  }
}

TEST(WrittenWeights, ThroughViews) {
  expect_writes_train([](Chain& chain) {
    const torch::NoGradGuard no_grad;
    chain.weight(0).t().select(0, 3).zero_();
    chain.weight(1).view({-1}).narrow(0, 60, 70).fill_(0.125);
    chain.weight(2).diagonal().copy_(torch::ones({15}));
    chain.weight(3).index_put_({torch::tensor({0, 14})}, torch::zeros({2, 15}));
    chain.bias(3).unsqueeze(0).mul_(0.5);
  });
}

TEST(WrittenWeights, OfOneUnitFromAnother) {
  expect_writes_train([](Chain& chain) {
    const torch::NoGradGuard no_grad;
    chain.weight(0).copy_(chain.weight(3).t());
    chain.weight(1).lerp_(chain.weight(2), 0.25);
    chain.bias(0).add_(chain.bias(1)).add_(chain.bias(0));
  });
}

TEST(WrittenWeights, AreWrittenOnce) {
  expect_writes_train([](Chain& chain) {
    const torch::NoGradGuard no_grad;
    chain.weight(0).add_(0.01);
    for (int i = 0; i < 3; ++i) { // gathered and let go several times
      for (auto& layer : chain.layers) {
        layer->weight.sum();
      }
    }
    chain.weight(0).add_(0.01);
  });
}

TEST(WrittenWeights, BetweenForwardAndBackwardInOneRegion) {
  // After its last use: the graph does not need the old value.
  ChainTraining training;
  training.settings.options.slots(1);
  training.loss = [](Chain& chain, const Tensor& rows) {
    const auto loss = chain.loss(rows);
    const torch::NoGradGuard no_grad;
    chain.bias(2).mul_(0.5);
    return loss;
  };
  expect_same_training(training);
}

TEST(WrittenWeights, WriteThatTheGraphDoesNotExpectIsRefused) {
  expect_undisturbed([](Chain& chain, ShardedTensors& net) {
    const auto old = whole_values(net)[4].second;
    const auto rows = rows_of_rank(net.world());
    const auto loss = net.call([&] {
      auto result = chain.loss(rows);
      const torch::NoGradGuard no_grad;
      chain.weight(2).mul_(0.5);
      return result;
    });
    EXPECT_TRUE(fails_with(
        [&] { loss.backward(); }, {"modified by an inplace operation"}));
    net.call([&] {
      const torch::NoGradGuard no_grad;
      chain.weight(2).copy_(old);
    });
  });
}

TEST(WrittenWeights, ReachUnitsThatStayWhole) {
  ChainTraining training;
  training.before_step = [](int step, Chain& chain, ShardedTensors* net) {
    if (step == 1 && net != nullptr) {
      net->unshard();
    }
    if (step == 2) {
      const auto write = [&] {
        const torch::NoGradGuard no_grad;
        chain.weight(1).mul_(0.5);
      };
      if (net != nullptr) {
        net->call(write);
      } else {
        write();
      }
    }
  };
  expect_same_training(training);
}

} // namespace
} // namespace fsdp::testing
