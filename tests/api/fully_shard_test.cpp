// Units that are marked module by module.

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <type_traits>

namespace fsdp::testing {
namespace marks {

namespace nn = torch::nn;
using at::Tensor;

std::vector<std::string> unit_names(const ShardedModule& net) {
  std::vector<std::string> names;
  for (const auto& unit : net.describe().units) {
    names.push_back(unit.name);
  }
  return names;
}

void mark_blocks(NetworkImpl& network, const UnitOptions& options = {}) {
  for (const auto& layer : *network.layers) {
    fully_shard(layer, options);
  }
}

TEST(FullyShard, MarkedModulesAreTheUnits) {
  on_ranks(3, [](const World& world) {
    auto network = seeded(make_network);
    mark_blocks(*network);
    EXPECT_EQ(network->layers[0]->parameters()[0].dim(), 1);
    EXPECT_EQ(network->head->weight.dim(), 2); // nothing is sharded yet
    auto net = fully_shard(network, world);
    static_assert(
        std::is_same_v<decltype(net), FullyShardedDataParallel<NetworkImpl>>);
    EXPECT_EQ(
        unit_names(net),
        (std::vector<std::string>{"(root)", "layers.0", "layers.1"}));
    EXPECT_EQ(network->head->weight.dim(), 1);
    const auto plain = seeded(make_network);
    const auto x = wave({4, 3});
    EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
  });
}

TEST(FullyShard, TrainsLikeAPolicy) {
  const auto make = [] {
    auto network = make_network();
    mark_blocks(*network);
    return network;
  };
  expect_same_program(make, [](auto& net, Log& log) {
    torch::optim::SGD optimizer(net.parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      auto loss = net(log.mine(wave({kRows, 3}))).pow(2).mean();
      loss.backward();
      log.loss(loss);
      optimizer.step();
      optimizer.zero_grad();
    }
    log.parameters(net);
  });
}

TEST(FullyShard, TakesHoldersAndReturnsTheNetOfTheRoot) {
  on_ranks(2, [](const World& world) {
    auto network = seeded([] { return Network(); });
    fully_shard(network->head);
    auto net =
        fully_shard(network, world, Options().strategy(Strategy::kShardGradOp));
    static_assert(
        std::is_same_v<decltype(net), FullyShardedDataParallel<NetworkImpl>>);
    EXPECT_EQ(unit_names(net), (std::vector<std::string>{"(root)", "head"}));
    EXPECT_EQ(net.describe().units[1].strategy, Strategy::kShardGradOp);
  });
}

TEST(FullyShard, UsesTheOptionsOfEachCall) {
  auto network = seeded(make_network);
  fully_shard(
      network->layers->ptr(0), UnitOptions().strategy(Strategy::kNoShard));
  fully_shard(
      network->layers->ptr(1), UnitOptions().reshard_after_forward(false));
  const auto net = fully_shard(network, World());
  const auto units = net.describe().units;
  EXPECT_EQ(units[0].strategy, Strategy::kFullShard);
  EXPECT_EQ(units[1].strategy, Strategy::kNoShard);
  EXPECT_EQ(units[2].strategy, Strategy::kShardGradOp);
}

TEST(FullyShard, MarksAndPoliciesGoTogether) {
  auto network = seeded(make_network);
  fully_shard(
      network->layers->ptr(1), UnitOptions().strategy(Strategy::kNoShard));
  const auto net = fully_shard(
      network, World(), Options().units(each<Block>() | named("head")));
  EXPECT_EQ(
      unit_names(net),
      (std::vector<std::string>{"(root)", "layers.0", "layers.1", "head"}));
  EXPECT_EQ(net.describe().units[2].strategy, Strategy::kNoShard);
}

TEST(FullyShard, TheOrderOfMarksDoesNotMatter) {
  auto network = seeded(make_network);
  fully_shard(network->layers->ptr(1));
  fully_shard(network->layers->ptr(0));
  fully_shard(network->layers->ptr(0)->as<BlockImpl>()->up);
  const auto net = fully_shard(network, World());
  EXPECT_EQ(
      unit_names(net),
      (std::vector<std::string>{
          "(root)", "layers.0", "layers.0.up", "layers.1"}));
}

TEST(FullyShard, MarkingTwiceIsAnError) {
  auto network = seeded(make_network);
  fully_shard(network->head);
  const auto error = error_of([&] { fully_shard(network->head); });
  EXPECT_TRUE(contains(error, "torch::nn::LinearImpl")) << error;
  EXPECT_TRUE(contains(error, "already")) << error;
  EXPECT_NE(error_of([] { fully_shard(std::shared_ptr<BlockImpl>()); }), "");
}

TEST(FullyShard, ShardingTwiceIsAnError) {
  on_ranks(2, [](const World& world) {
    auto network = seeded(make_network);
    mark_blocks(*network);
    auto net = fully_shard(network, world);
    const auto error =
        error_of([&] { const auto again = fully_shard(network, world); });
    EXPECT_TRUE(contains(error, "sharded already")) << error;
    const auto plain = seeded(make_network);
    const auto x = wave({4, 3});
    EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
  });
}

TEST(FullyShard, AMarkIsUsedOnceAndGoesWithItsModule) {
  for (int i = 0; i < 50; ++i) { // addresses recur
    auto network = seeded(make_network);
    mark_blocks(*network);
  }
  const auto unmarked = fully_shard(seeded(make_network), World());
  EXPECT_EQ(unmarked.describe().units.size(), 1U);
  auto network = seeded(make_network);
  mark_blocks(*network);
  {
    auto net = fully_shard(network, World());
    EXPECT_EQ(net.describe().units.size(), 3U);
    network = unwrap(std::move(net));
  }
  const auto again = fully_shard(network, World());
  EXPECT_EQ(again.describe().units.size(), 1U);
}

TEST(FullyShard, MarksSurviveACallThatFails) {
  on_ranks(2, [](const World& world) {
    auto network = seeded(make_network);
    mark_blocks(*network);
    EXPECT_NE(
        error_of([&] {
          const auto net = fully_shard(network, world, Options().slots(0));
        }),
        "");
    const auto net = fully_shard(network, world);
    EXPECT_EQ(net.describe().units.size(), 3U);
  });
}

} // namespace marks
} // namespace fsdp::testing
