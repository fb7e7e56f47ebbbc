// Optimizers that see whole parameters where they should see shards, or need
// more than a shard.

#include "harness/chain.h"

namespace fsdp::testing {
namespace {

using at::Tensor;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::LBFGS;
using torch::optim::LBFGSOptions;

void backward_of_chain(Chain& chain, ShardedTensors& net) {
  const auto rows = rows_of_rank(net.world());
  net.call([&] { return chain.loss(rows); }).backward();
}

void drop_gradients(Chain& chain) {
  for (auto& parameter : chain.parameters()) {
    parameter.mutable_grad().reset();
  }
}

TEST(Optimizers, StateFromBeforeShardingIsRefused) {
  for (const int world_size : {1, 2, 3, 4}) {
    run_ranks(
        world_size,
        [](const World& world) {
          const auto chain = build_chain();
          AdamW optimizer(chain->parameters(), AdamWOptions(1e-2));
          chain->loss(torch::arange(kRows)).backward();
          optimizer.step();
          optimizer.zero_grad();
          ShardedTensors net(chain->units(), world);
          backward_of_chain(*chain, net);
          EXPECT_TRUE(fails_with(
              [&] { optimizer.step(); },
              {"[15, 15]",
               "gradient shard",
               "before sharding",
               "'layer0.weight'"}));
        },
        kWaitLimit);
  }
}

TEST(Optimizers, StateFromBeforeServesReplicatedParameters) {
  const auto train = [](const World* world) {
    const auto chain = build_chain();
    AdamW optimizer(chain->parameters(), AdamWOptions(1e-2).eps(1e-4));
    const auto rows = torch::arange(kRows);
    const auto step = [&](const Tensor& loss) {
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    };
    step(chain->loss(rows));
    std::unique_ptr<ShardedTensors> net;
    if (world != nullptr) {
      net = std::make_unique<ShardedTensors>(
          chain->units(), *world, Options().strategy(Strategy::kNoShard));
    }
    for (int i = 0; i < 3; ++i) {
      step(
          net ? net->call([&] { return chain->loss(rows); })
              : chain->loss(rows));
    }
    return chain->weight(2).detach().clone();
  };
  const auto expected = train(nullptr);
  for (const int world_size : {1, 2, 3}) {
    run_ranks(
        world_size,
        [&](const World& world) {
          EXPECT_TRUE(all_close(train(&world), expected, 1e-6, 1e-8));
        },
        kWaitLimit);
  }
}

TEST(Optimizers, MadeBeforeShardingAndFirstUsedAfterwards) {
  const auto train = [](const World* world, Strategy strategy) {
    const auto chain = build_chain();
    AdamW optimizer(chain->parameters(), AdamWOptions(1e-2).eps(1e-4));
    const auto rows =
        world == nullptr ? torch::arange(kRows) : rows_of_rank(*world);
    std::unique_ptr<ShardedTensors> net;
    if (world != nullptr) {
      net = std::make_unique<ShardedTensors>(
          chain->units(), *world, Options().strategy(strategy));
    }
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad(/*set_to_none=*/step % 2 == 1);
      const auto loss = net ? net->call([&] { return chain->loss(rows); })
                            : chain->loss(rows);
      loss.backward();
      optimizer.step();
    }
    if (!net) {
      return chain->weight(2).detach().clone();
    }
    return whole_values(*net)[4].second;
  };
  const auto expected = train(nullptr, Strategy::kNoShard);
  for (const int world_size : {1, 2, 3, 4}) {
    for (const auto strategy : kAllStrategies) {
      run_ranks(
          world_size,
          [&](const World& world) {
            EXPECT_TRUE(
                all_close(train(&world, strategy), expected, 1e-6, 1e-8));
          },
          kWaitLimit);
    }
  }
}

TEST(Optimizers, FirstStepOfAdamInsideARegionIsRefused) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(
        world_size,
        [](const World& world) {
          const auto chain = build_chain();
          ShardedTensors net(chain->units(), world);
          AdamW optimizer(chain->parameters(), AdamWOptions(1e-2));
          backward_of_chain(*chain, net);
          EXPECT_TRUE(fails_with(
              [&] { net.call([&] { optimizer.step(); }); },
              {"gradient shard",
               "inside a region",
               "after the region has closed"}));
        },
        kWaitLimit);
  }
}

/// Losses and parameters of three steps of LBFGS.
std::vector<Tensor> train_lbfgs(
    Chain& chain,
    const std::function<Tensor(const std::function<Tensor()>&)>& call) {
  LBFGS optimizer(chain.parameters(), LBFGSOptions(0.5).max_iter(4));
  std::vector<Tensor> results;
  for (int step = 0; step < 3; ++step) {
    results.push_back(optimizer
                          .step([&] {
                            optimizer.zero_grad();
                            auto loss = call([&] {
                              return chain.loss(torch::arange(kRows));
                            });
                            loss.backward();
                            return loss;
                          })
                          .detach());
  }
  return results;
}

std::vector<Tensor> train_lbfgs_plain() {
  const auto chain = build_chain();
  auto results = train_lbfgs(*chain, [](const auto& loss) { return loss(); });
  for (const auto& parameter : chain->parameters()) {
    results.push_back(parameter.detach());
  }
  return results;
}

void expect_lbfgs_works(const World& world, Strategy strategy) {
  const auto expected = train_lbfgs_plain();
  const auto chain = build_chain();
  ShardedTensors net(chain->units(), world, Options().strategy(strategy));
  auto results =
      train_lbfgs(*chain, [&](const auto& loss) { return net.call(loss); });
  for (auto& [name, value] : whole_values(net)) {
    results.push_back(value);
  }
  ASSERT_EQ(results.size(), expected.size());
  for (size_t i = 0; i < results.size(); ++i) {
    EXPECT_TRUE(at::equal(results[i], expected[i])) << i;
  }
}

TEST(Optimizers, LbfgsWorksOnOneRank) {
  for (const auto strategy : kAllStrategies) {
    expect_lbfgs_works(World(), strategy);
  }
}

TEST(Optimizers, LbfgsWorksOnReplicatedParameters) {
  for (const int world_size : {2, 4}) { // the mean of equal numbers is exact
    run_ranks(
        world_size,
        [](const World& world) {
          expect_lbfgs_works(world, Strategy::kNoShard);
        },
        kWaitLimit);
  }
}

TEST(Optimizers, LbfgsOnShardsIsRefused) {
  auto settings = split_strategies();
  settings.world_sizes = {2, 3, 4};
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        EXPECT_TRUE(fails_with(
            [&] {
              train_lbfgs(
                  chain, [&](const auto& loss) { return net.call(loss); });
            },
            {"joins gradient shards",
             "LBFGS",
             "rank " + std::to_string(net.world().rank()),
             "element-wise optimizer"}));
        drop_gradients(chain);
      },
      settings);
}

/// Keeps the warnings of this thread.
struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    texts.push_back(warning.msg());
  }
  std::vector<std::string> texts;
};

TEST(Optimizers, ClippingByTheFunctionOfLibtorchWarns) {
  c10::WarningUtils::WarnAlways always;
  run_ranks(
      2,
      [](const World& world) {
        const auto chain = build_chain();
        ShardedTensors net(chain->units(), world);
        backward_of_chain(*chain, net);
        Warnings warnings;
        const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
        torch::nn::utils::clip_grad_norm_(chain->parameters(), 1.0);
        if (world.rank() == 0) {
          ASSERT_FALSE(warnings.texts.empty());
          EXPECT_NE(
              warnings.texts[0].find("net.clip_grad_norm_()"),
              std::string::npos)
              << warnings.texts[0];
        } else {
          EXPECT_TRUE(warnings.texts.empty());
        }
      },
      kWaitLimit);
}

TEST(Optimizers, GraphKeptOverAStepIsRefused) {
  auto settings = split_strategies();
  settings.strategies.push_back(Strategy::kNoShard);
  for (const int world_size : {1, 2, 3, 4}) {
    for (const auto strategy : settings.strategies) {
      run_ranks(
          world_size,
          [&](const World& world) {
            const auto chain = build_chain();
            ShardedTensors net(
                chain->units(), world, Options().strategy(strategy));
            AdamW optimizer(chain->parameters(), AdamWOptions(1e-2));
            const auto rows = rows_of_rank(world);
            const auto loss = net.call([&] { return chain->loss(rows); });
            loss.backward({}, /*retain_graph=*/true);
            optimizer.step();
            optimizer.zero_grad();
            EXPECT_TRUE(fails_with(
                [&] { loss.backward(); },
                {"modified by an inplace operation"}));
            for (const auto& parameter : chain->parameters()) {
              EXPECT_FALSE(parameter.grad().defined());
            }
            backward_of_chain(*chain, net);
            EXPECT_TRUE(chain->weight(0).grad().defined());
          },
          kWaitLimit);
    }
  }
}

} // namespace
} // namespace fsdp::testing
