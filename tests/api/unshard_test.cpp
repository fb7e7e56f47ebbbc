// Weights that stay whole between regions: unshard and reshard.

#include "api/counting_communicator.h"
#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

namespace fsdp::testing {
namespace unshard {

namespace nn = torch::nn;
using at::Tensor;
using Net = FullyShardedDataParallel<NetworkImpl>;

constexpr Strategy kStrategies[] = {
    Strategy::kFullShard,
    Strategy::kShardGradOp,
    Strategy::kShardOptimizer,
    Strategy::kNoShard};

/// Runs `body` in worlds of 1 to 4 ranks and with all strategies.
void with_nets(const std::function<void(Net& net, NetworkImpl& plain)>& body) {
  for (const auto strategy : kStrategies) {
    for (const int size : {1, 2, 3, 4}) {
      SCOPED_TRACE("strategy " + std::to_string(static_cast<int>(strategy)));
      on_ranks(size, [&](const World& world) {
        Net net(
            seeded(make_network),
            world,
            Options().strategy(strategy).units(each<Block>()));
        body(net, *seeded(make_network));
      });
    }
  }
}

void expect_parameters(Net& net, const NetworkImpl& plain) {
  const auto expected = plain.named_parameters();
  for (const auto& [name, value] : whole_values(net)) {
    EXPECT_TRUE(all_close(value, expected[name], 1e-6, 1e-8)) << name;
  }
}

void edit(NetworkImpl& module) {
  const torch::NoGradGuard no_grad;
  module.head->weight.fill_(0.25);
  module.layers[0]->as<BlockImpl>()->up->weight.select(1, 3).neg_();
  module.norm->bias.data_ptr<float>()[4] = 9.0F; // without an operator
}

TEST(Unshard, OneGatherServesManyForwards) {
  on_ranks(2, [](const World& world) {
    auto counter = std::make_shared<CountingCommunicator>(world);
    Net net(
        seeded(make_network), World(counter), Options().units(each<Block>()));
    const auto plain = seeded(make_network);
    const auto x = wave({4, 3});
    counter->notes().clear();
    net.unshard();
    EXPECT_EQ(counter->count("all_gather"), 3);
    EXPECT_GT(net.memory().gathered_bytes, 0);
    const torch::NoGradGuard no_grad;
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
    }
    EXPECT_EQ(counter->count("all_gather"), 3);
    net.reshard();
    EXPECT_EQ(net.memory().gathered_bytes, 0);
    EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
    EXPECT_GE(counter->count("all_gather"), 6);
  });
}

TEST(Unshard, ParametersAreShardsOutsideAllTheSame) {
  on_ranks(2, [](const World& world) {
    Net net(seeded(make_network), world);
    net.unshard();
    EXPECT_EQ(net->head->weight.dim(), 1);
    net.unshard(); // again: nothing happens
    net.reshard();
    net.reshard();
    EXPECT_EQ(net->head->weight.dim(), 1);
    expect_parameters(net, *seeded(make_network));
  });
}

TEST(Unshard, TrainingInBetweenIsTheSame) {
  ProgramSettings settings;
  settings.options.units(each<Block>());
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        torch::optim::SGD optimizer(net.parameters(), 0.1);
        for (int step = 0; step < 4; ++step) {
          if constexpr (requires { net.unshard(); }) {
            step % 2 == 0 ? net.unshard() : net.reshard();
          }
          auto loss = net(log.mine(wave({kRows, 3}))).pow(2).mean();
          loss.backward();
          log.loss(loss);
          log.gradients(net);
          optimizer.step();
          optimizer.zero_grad();
        }
        log.parameters(net);
      },
      settings);
}

TEST(Unshard, WritesInARegionReachTheShards) {
  with_nets([](Net& net, NetworkImpl& plain) {
    net.unshard();
    net.call([](NetworkImpl& module) {
      const torch::NoGradGuard no_grad;
      module.head->weight.fill_(0.25);
    });
    net.reshard();
    {
      const torch::NoGradGuard no_grad;
      plain.head->weight.fill_(0.25);
    }
    expect_parameters(net, plain);
  });
}

TEST(Unshard, ParametersThatARegionReplacesAreSeen) {
  with_nets([](Net& net, NetworkImpl& plain) {
    net.unshard();
    net.call([](NetworkImpl& module) {
      module.head->weight.set_data(wave({2, 5}));
    });
    plain.head->weight.set_data(wave({2, 5}));
    const auto x = wave({4, 3});
    EXPECT_TRUE(all_close(net(x), plain.forward(x), 1e-6, 1e-8));
    net.reshard();
    expect_parameters(net, plain);
  });
}

TEST(Unshard, WorksInsideARegion) {
  on_ranks(2, [](const World& world) {
    Net net(seeded(make_network), world, Options().units(each<Block>()));
    const auto plain = seeded(make_network);
    const auto x = wave({4, 3});
    {
      const auto region = net.region();
      net.unshard();
      EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
      net.reshard();
      EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
    }
    EXPECT_EQ(net.memory().gathered_bytes, 0);
    expect_parameters(net, *plain);
  });
}

TEST(Unshard, WholeParametersMayBeTakenMeanwhile) {
  with_nets([](Net& net, NetworkImpl& plain) {
    net.unshard();
    expect_parameters(net, plain);
    {
      const auto whole = net.whole_parameters({.write_back = true});
      edit(*net.operator->());
    }
    edit(plain);
    const auto x = wave({4, 3});
    EXPECT_TRUE(all_close(net(x), plain.forward(x), 1e-6, 1e-8));
    net.reshard();
    expect_parameters(net, plain);
  });
}

} // namespace unshard
} // namespace fsdp::testing
