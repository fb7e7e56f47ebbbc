// Steps that cannot be right are refused before anything is changed.

#include "train/training.h"

namespace fsdp::testing {
namespace fused_errors {

namespace optim = torch::optim;
using at::Tensor;

template <class F>
void expect_refused(
    ShardedModule& net,
    F&& step,
    const std::vector<std::string>& parts) {
  const auto before = values_at_rest(net);
  const auto error = error_of(step);
  for (const auto& part : parts) {
    EXPECT_TRUE(contains(error, part)) << error;
  }
  expect_same_bits(before, values_at_rest(net));
}

TEST(FusedOptimizerErrors, AStepInsideARegion) {
  for (const int size : {1, 2}) {
    on_ranks(size, [](const World& world) {
      FullyShardedDataParallel net(
          seeded(make_network), world, Options().units(each<Block>()));
      AdamW optimizer(net.parameters(), 0.1);
      net(wave({4, 3})).sum().backward();
      expect_refused(
          net,
          [&] {
            const auto region = net.region();
            optimizer.step();
          },
          {"AdamW",
           "inside a region",
           "'input.weight'",
           net.world().size() == 1 ? "rank 0/1" : "/2",
           "Call optimizer.step() after the region has closed"});
    });
  }
}

TEST(FusedOptimizerErrors, AStepWhileWholeParametersAreOpen) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(seeded(make_network), world);
    SGD optimizer(net.parameters(), 0.1);
    net(wave({4, 3})).sum().backward();
    const auto whole = net.whole_parameters({.write_back = true});
    const auto error = error_of([&] { optimizer.step(); });
    EXPECT_TRUE(contains(error, "differ in shape")) << error;
    EXPECT_TRUE(contains(error, "whole_parameters()")) << error;
  });
}

TEST(FusedOptimizerErrors, StateFromBeforeSharding) {
  for (const int size : {1, 2, 4}) {
    on_ranks(size, [](const World& world) {
      const auto module = seeded(make_network);
      Adam optimizer(module->parameters(), 0.1);
      module->forward(wave({4, 3})).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
      FullyShardedDataParallel net(module, world);
      net(wave({4, 3})).sum().backward();
      expect_refused(
          net,
          [&] { optimizer.step(); },
          {"Adam",
           "'exp_avg' of parameter 'input.weight'",
           "got [5, 3]",
           "before sharding",
           "net.adopt(optimizer)"});
    });
  }
}

TEST(FusedOptimizerErrors, SparseGradients) {
  torch::nn::Embedding embedding(
      torch::nn::EmbeddingOptions(6, 2).sparse(true));
  AdamW optimizer(embedding->parameters(), 0.1);
  const auto before = embedding->weight.detach().clone();
  embedding(torch::tensor({1, 4})).sum().backward();
  const auto error = error_of([&] { optimizer.step(); });
  EXPECT_TRUE(contains(error, "AdamW")) << error;
  EXPECT_TRUE(contains(error, "sparse")) << error;
  EXPECT_TRUE(contains(error, "[6, 2]")) << error;
  EXPECT_TRUE(at::equal(embedding->weight, before));
}

TEST(FusedOptimizerErrors, SparseGradientsOfAShardedParameterAreDense) {
  on_ranks(2, [](const World& world) {
    const auto make = [] {
      return std::make_shared<torch::nn::EmbeddingImpl>(
          torch::nn::EmbeddingOptions(6, 2).sparse(true));
    };
    const auto plain = seeded(make);
    SGD expected(plain->parameters(), 0.1);
    const auto rows = torch::tensor({1, 4});
    plain->forward(rows).sum().backward();
    plain->weight.mutable_grad() = plain->weight.grad().to_dense();
    expected.step();
    FullyShardedDataParallel net(seeded(make), world);
    SGD optimizer(net.parameters(), 0.1);
    net(rows).sum().backward();
    optimizer.step();
    EXPECT_TRUE(at::equal(whole_values(net)[0].second, plain->weight));
  });
}

TEST(FusedOptimizerErrors, StateOfAnotherType) {
  auto value = wave({5}).requires_grad_();
  SGD optimizer({value}, optim::SGDOptions(0.1).momentum(0.9));
  value.mutable_grad() = wave({5});
  optimizer.step();
  value.set_data(value.to(torch::kDouble));
  value.mutable_grad() = wave({5}).to(torch::kDouble);
  const auto error = error_of([&] { optimizer.step(); });
  EXPECT_TRUE(contains(error, "'momentum_buffer'")) << error;
  EXPECT_TRUE(contains(error, "expected Double, but got Float")) << error;
}

TEST(FusedOptimizerErrors, OptionsThatLibtorchRefuses) {
  EXPECT_TRUE(contains(
      error_of([] { AdamW({torch::ones({1})}, optim::AdamWOptions(-1)); }),
      "Invalid learning rate"));
  EXPECT_TRUE(contains(
      error_of(
          [] { SGD({torch::ones({1})}, optim::SGDOptions(1).nesterov(true)); }),
      "Nesterov"));
}

template <class Optimizer>
void expect_stale_graph_is_refused(Strategy strategy) {
  for (const int size : {1, 2, 3}) {
    on_ranks(size, [&](const World& world) {
      FullyShardedDataParallel net(
          seeded(make_network), world, Options().strategy(strategy));
      Optimizer optimizer(net.parameters(), 0.1);
      const auto loss = net(wave({4, 3})).pow(2).sum();
      loss.backward({}, /*retain_graph=*/true);
      optimizer.step();
      optimizer.zero_grad();
      const auto error = error_of([&] { loss.backward(); });
      EXPECT_TRUE(contains(error, "modified by an inplace operation")) << error;
      net(wave({4, 3})).pow(2).sum().backward();
      EXPECT_TRUE(net.parameters()[0].grad().defined());
    });
  }
}

TEST(FusedOptimizerErrors, AGraphThatIsKeptOverAStep) {
  for (const auto strategy : kAllStrategies) {
    expect_stale_graph_is_refused<AdamW>(strategy);
    expect_stale_graph_is_refused<Adam>(strategy);
    expect_stale_graph_is_refused<SGD>(strategy);
  }
}

TEST(FusedOptimizerErrors, UnitsThatWereKeptWholeAreStaleAfterAStep) {
  on_ranks(3, [](const World& world) {
    const auto plain = seeded(make_network);
    optim::SGD expected(plain->parameters(), 0.1);
    FullyShardedDataParallel net(
        seeded(make_network), world, Options().units(each<Block>()));
    SGD optimizer(net.parameters(), 0.1);
    const auto x = wave({4, 3});
    for (int step = 0; step < 2; ++step) {
      plain->forward(x).pow(2).sum().backward();
      expected.step();
      expected.zero_grad();
      net.unshard();
      net(x).pow(2).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-5, 1e-7));
      net.reshard();
    }
  });
}

} // namespace fused_errors
} // namespace fsdp::testing
