// What is left when a net is gone: graphs, views and parameters of it.

#include "harness/chain.h"

namespace fsdp::testing {
namespace {

using at::Tensor;

void each_split_world(const std::function<void(const World&, Strategy)>& test) {
  for (const int world_size : {1, 2, 4}) {
    for (const auto strategy : {Strategy::kFullShard, Strategy::kShardGradOp}) {
      SCOPED_TRACE("world size " + std::to_string(world_size));
      ASSERT_NO_THROW(run_ranks(
          world_size,
          [&](const World& world) { test(world, strategy); },
          kWaitLimit));
    }
  }
}

std::unique_ptr<ShardedTensors>
shard(Chain& chain, const World& world, Strategy strategy) {
  return std::make_unique<ShardedTensors>(
      chain.units(), world, Options().strategy(strategy));
}

TEST(Lifetime, BackwardAfterTheNetIsGoneIsAnError) {
  each_split_world([](const World& world, Strategy strategy) {
    const auto chain = build_chain();
    auto net = shard(*chain, world, strategy);
    const auto loss =
        net->call([&] { return chain->loss(rows_of_rank(world)); });
    net.reset();
    EXPECT_TRUE(
        fails_with([&] { loss.backward(); }, {"a net that was destroyed"}));
  });
}

TEST(Lifetime, ViewAfterTheNetIsGoneIsAnError) {
  each_split_world([](const World& world, Strategy strategy) {
    const auto chain = build_chain();
    auto net = shard(*chain, world, strategy);
    const auto view = net->call([&] { return chain->weight(1).t(); });
    net.reset();
    EXPECT_EQ(view.sizes(), at::IntArrayRef({15, 15}));
    EXPECT_TRUE(fails_with(
        [&] { view.sum(); }, {"aten::sum", "a net that was destroyed"}));
  });
}

TEST(Lifetime, ActivationsAndCopiesOutliveTheNet) {
  each_split_world([](const World& world, Strategy strategy) {
    const auto chain = build_chain();
    const auto plain = build_chain();
    auto net = shard(*chain, world, strategy);
    const auto [y, copy] = net->call([&] {
      return std::make_pair(
          chain->forward(chain->x), chain->weight(1).detach().clone());
    });
    net.reset();
    EXPECT_TRUE(at::equal(y, plain->forward(plain->x)));
    EXPECT_TRUE(at::equal(copy, plain->weight(1)));
  });
}

TEST(Lifetime, ParametersOfANetThatIsGoneAreOrdinaryShards) {
  each_split_world([](const World& world, Strategy strategy) {
    const auto chain = build_chain();
    auto net = shard(*chain, world, strategy);
    const auto local = net->describe().units[1].parameters[0].local_numel;
    net.reset();
    auto& weight = chain->weight(1);
    EXPECT_EQ(weight.sizes(), at::IntArrayRef({local}));
    auto loss = (weight * 3).sum(); // with autograd, like any tensor
    loss.backward();
    EXPECT_TRUE(at::equal(weight.grad(), torch::full({local}, 3.0F)));
  });
}

TEST(Lifetime, GradientsOutliveTheNet) {
  each_split_world([](const World& world, Strategy strategy) {
    const auto chain = build_chain();
    auto net = shard(*chain, world, strategy);
    net->call([&] { return chain->loss(rows_of_rank(world)); }).backward();
    const auto before = chain->weight(1).grad().clone();
    net.reset();
    EXPECT_TRUE(at::equal(chain->weight(1).grad(), before));
    torch::optim::SGD optimizer(chain->parameters(), 0.1);
    const auto expected = chain->weight(1).detach() - 0.1 * before;
    optimizer.step();
    EXPECT_TRUE(at::allclose(chain->weight(1).detach(), expected));
  });
}

TEST(Lifetime, NetMayGoWhileATouchOfItLives) {
  const auto chain = build_chain();
  const auto expected = chain->weight(1).detach().clone();
  auto net = shard(*chain, World(), Strategy::kFullShard);
  {
    auto region = net->region();
    const auto touch = fsdp::touch(chain->weight(1));
    net.reset(); // the region and the touch hold what they need
    const auto read =
        torch::from_blob(chain->weight(1).data_ptr(), {15, 15}).clone();
    EXPECT_TRUE(at::equal(read, expected));
  }
  EXPECT_EQ(chain->weight(1).dim(), 1);
}

TEST(Lifetime, ParametersOutliveAndTrainAgainInAnotherNet) {
  each_split_world([](const World& world, Strategy strategy) {
    const auto chain = build_chain();
    const auto plain = build_chain();
    auto net = shard(*chain, world, strategy);
    net->call([&] { return chain->loss(rows_of_rank(world)); }).backward();
    plain->loss(torch::arange(kRows)).backward();
    for (auto& parameter : chain->parameters()) {
      parameter.mutable_grad().reset();
    }
    // Whole values into fresh tensors, then a second net of other units.
    std::vector<Tensor> values;
    for (auto& [name, value] : whole_values(*net)) {
      values.push_back(value);
    }
    net.reset();
    for (size_t i = 0; i < values.size(); ++i) {
      auto parameter = chain->parameters()[i];
      parameter.set_data(values[i]);
    }
    values.clear();
    ShardedTensors again(chain->units(), world, Options().strategy(strategy));
    again.call([&] { return chain->loss(rows_of_rank(world)); }).backward();
    const auto reference = plain->weight(2).grad();
    const auto units = again.describe().units;
    EXPECT_EQ(
        chain->weight(2).grad().numel(), units[2].parameters[0].local_numel);
    if (world.size() == 1) {
      EXPECT_TRUE(all_close(
          chain->weight(2).grad().view({15, 15}), reference, 1e-6, 1e-8));
    }
  });
}

} // namespace
} // namespace fsdp::testing
