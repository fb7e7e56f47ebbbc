// Shards inside of groups of ranks, replicas over the groups.

#include "api/hybrid.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace hybrid {

namespace nn = torch::nn;
using at::Tensor;
using Net = FullyShardedDataParallel<NetworkImpl>;

template <class N>
void train(N& net, Log& log, torch::optim::Optimizer& optimizer) {
  for (int step = 0; step < 4; ++step) {
    auto loss = net(log.mine(wave({kRows, 3}, 0.7 + step))).pow(2).mean();
    loss.backward();
    log.loss(loss);
    log.gradients(net);
    optimizer.step();
    optimizer.zero_grad();
  }
  log.parameters(net);
}

TEST(Hybrid, TrainingWithMomentumIsThatOfTheModelOnOneRank) {
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        torch::optim::SGD optimizer(
            net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        train(net, log, optimizer);
      },
      only_hybrid());
}

TEST(Hybrid, TrainingWithAdamWIsThatOfTheModelOnOneRank) {
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        torch::optim::AdamW optimizer(
            net.parameters(), torch::optim::AdamWOptions(1e-2).eps(1e-4));
        train(net, log, optimizer);
      },
      only_hybrid());
}

TEST(Hybrid, AGroupOfAllRanksGivesTheBitsOfFullShard) {
  for (const int size : {1, 2, 3, 4}) {
    on_ranks(size, [](const World& world) {
      const auto values_with = [&](Strategy strategy) {
        Net net(
            seeded(make_network),
            world,
            options_of(strategy, world.size()).units(each<Block>()));
        Log log(world);
        torch::optim::SGD optimizer(net.parameters(), 0.1);
        train(net, log, optimizer);
        return log.values();
      };
      expect_same_bits(
          values_with(Strategy::kFullShard),
          values_with(Strategy::kHybridShard));
    });
  }
}

TEST(Hybrid, ReplicasStayEqualInBits) {
  on_groups({2, 4}, [](const World& world, Options options) {
    Net net(seeded(make_network), world, options.units(each<Block>()));
    torch::optim::AdamW optimizer(net.parameters(), 1e-2);
    const auto rows = rows_of_rank(world);
    for (int step = 0; step < 5; ++step) {
      const auto x = wave({kRows, 3}, 0.7 + step).index_select(0, rows);
      net(x).pow(2).mean().backward();
      net.clip_grad_norm_(0.1);
      expect_equal_replicas(net, *options.shard_size());
      optimizer.step();
      optimizer.zero_grad();
      expect_equal_replicas(net, *options.shard_size());
      EXPECT_NO_THROW(net.check_replicas());
    }
  });
}

// Whole weights.

TEST(Hybrid, WholeParametersAreWrittenBackToAllReplicas) {
  on_groups({2, 4}, [](const World& world, Options options) {
    Net net(seeded(make_network), world, options.units(each<Block>()));
    const auto plain = seeded(make_network);
    const auto edit = [](NetworkImpl& module) {
      const torch::NoGradGuard no_grad;
      module.head->weight.copy_(wave({2, 5}));
      module.layers[1]->as<BlockImpl>()->up->weight.select(0, 7).fill_(1);
    };
    {
      const auto whole = net.whole_parameters({.write_back = true});
      edit(*net.operator->());
    }
    edit(*plain);
    expect_equal_replicas(net, *options.shard_size());
    for (const auto& [name, value] : whole_values(net)) {
      EXPECT_TRUE(at::equal(value, plain->named_parameters()[name])) << name;
    }
    const torch::NoGradGuard no_grad;
    const auto x = wave({4, 3});
    EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
  });
}

TEST(Hybrid, UnshardKeepsWholeWeightsUntilReshard) {
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        torch::optim::SGD optimizer(net.parameters(), 0.1);
        for (int step = 0; step < 4; ++step) {
          if constexpr (requires { net.unshard(); }) {
            step % 2 == 0 ? net.unshard() : net.reshard();
          }
          net(log.mine(wave({kRows, 3}))).pow(2).mean().backward();
          log.gradients(net);
          optimizer.step();
          optimizer.zero_grad();
          log.value("after", net(wave({4, 3})));
        }
        log.parameters(net);
      },
      only_hybrid());
}

TEST(Hybrid, ARankHoldsItsShareOfAGroup) {
  on_groups({4}, [](const World& world, const Options& options) {
    const FullyShardedDataParallel net(
        seeded([] { return std::make_shared<nn::LinearImpl>(64, 64); }),
        world,
        options);
    const auto bytes = 64 * 65 * 4;
    EXPECT_NEAR(
        net.memory().shard_bytes, bytes / *options.shard_size(), 2 * 64 * 4);
    EXPECT_EQ(net.describe().units[0].strategy, options.strategy());
  });
}

// Failures.

struct Breakable : NetworkImpl {
  std::string place; // where this rank fails
  Tensor forward(const Tensor& x) {
    auto y = layers[0]->as<BlockImpl>()->forward(input(x));
    if (place == "forward") {
      throw std::runtime_error("bad luck in forward");
    }
    if (place == "backward") {
      y.register_hook([](const Tensor& gradient) {
        TORCH_CHECK(false, "bad luck in backward");
        return gradient;
      });
    }
    return head(norm(layers[1]->as<BlockImpl>()->forward(y)));
  }
};

TEST(Hybrid, ARankThatFailsFailsTheStepOnAllAndTheNextOneWorks) {
  const auto make = [] { return std::make_shared<Breakable>(); };
  on_groups({2, 4}, [&](const World& world, Options options) {
    FullyShardedDataParallel net(
        seeded(make), world, options.units(each<Block>()));
    torch::optim::SGD optimizer(net.parameters(), 0.1);
    const auto plain = seeded(make);
    torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
    const auto x = wave({4, 3});
    const auto step = [&](auto& model, torch::optim::Optimizer& update) {
      model.forward(x).pow(2).mean().backward();
      update.step();
      update.zero_grad();
    };
    for (const auto* place : {"forward", "backward", "forward"}) {
      for (int rank = 0; rank < world.size(); ++rank) {
        net->place = world.rank() == rank ? place : "";
        const auto error = error_of([&] { net(x).pow(2).mean().backward(); });
        EXPECT_TRUE(contains(error, std::string("bad luck in ") + place))
            << error;
        net->place = "";
        net(x).pow(2).mean().backward();
        optimizer.step();
        optimizer.zero_grad();
        step(*plain, plain_optimizer);
      }
    }
    for (const auto& [name, value] : whole_values(net)) {
      EXPECT_TRUE(all_close(value, plain->named_parameters()[name], 1e-5, 1e-7))
          << name;
    }
    expect_equal_replicas(net, *options.shard_size());
  });
}

TEST(Hybrid, ReplicasThatDriftedAreNamed) {
  std::vector<std::string> errors(4);
  on_ranks(4, [&](const World& world) {
    auto options = options_of(Strategy::kHybridShard, 2);
    Net net(seeded(make_network), world, options.units(each<Block>()));
    EXPECT_NO_THROW(net.check_replicas());
    if (world.rank() == 3) {
      const torch::NoGradGuard no_grad;
      net->layers[0]->as<BlockImpl>()->down->weight.add_(1e-3);
    }
    errors[static_cast<size_t>(world.rank())] =
        error_of([&] { net.check_replicas(); });
  });
  share_results(errors);
  for (const auto& error : errors) {
    EXPECT_TRUE(contains(error, "'layers.0.down.weight'")) << error;
    EXPECT_TRUE(contains(error, "rank 1/4")) << error;
    EXPECT_TRUE(contains(error, "rank 3/4")) << error;
  }
}

TEST(Hybrid, AShardSizeThatDoesNotDivideIsRefused) {
  for (const std::optional<int64_t> size :
       {std::optional<int64_t>(), {0}, {-2}, {3}, {8}}) {
    on_ranks(4, [&](const World& world) {
      for (const auto& options :
           {Options().strategy(Strategy::kHybridShard).shard_size(size),
            Options()
                .units(named(
                    "head",
                    UnitOptions().strategy(Strategy::kHybridShardGradOp)))
                .shard_size(size)}) {
        const auto error =
            error_of([&] { Net(seeded(make_network), world, options); });
        EXPECT_TRUE(contains(error, "Options::shard_size")) << error;
        EXPECT_TRUE(contains(error, "world size 4")) << error;
        EXPECT_TRUE(contains(error, size ? std::to_string(*size) : "not set"))
            << error;
      }
    });
  }
}

TEST(Hybrid, RanksWithAnotherShardSizeAreTold) {
  on_ranks(4, [&](const World& world) {
    const auto options =
        options_of(Strategy::kHybridShard, world.rank() == 2 ? 1 : 2);
    const auto error =
        error_of([&] { Net(seeded(make_network), world, options); });
    EXPECT_TRUE(contains(error, "shard_size 1")) << error;
    EXPECT_TRUE(contains(error, "rank 2/4")) << error;
  });
}

} // namespace hybrid
} // namespace fsdp::testing
