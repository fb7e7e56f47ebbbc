// Weights are never stale: evaluation between steps, edits by hand,
// conversions.

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace fresh {

namespace nn = torch::nn;
using at::Tensor;

const auto kUnits = Options().units(each<Block>());

ProgramSettings settings_with_blocks() {
  ProgramSettings settings;
  settings.options = kUnits;
  return settings;
}

template <class N>
void train_step(N& net, torch::optim::Optimizer& optimizer, Log& log) {
  auto loss = net(log.mine(wave({kRows, 3}))).pow(2).mean();
  loss.backward();
  log.loss(loss);
  optimizer.step();
  optimizer.zero_grad();
}

TEST(FreshWeights, EvaluationBetweenStepsSeesTheLastStep) {
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        torch::optim::SGD optimizer(net.parameters(), 0.1);
        const auto evaluate = [&] {
          const torch::NoGradGuard no_grad;
          net->eval();
          log.value("evaluation", net(wave({4, 3})));
          net->train();
        };
        for (int step = 0; step < 3; ++step) {
          evaluate();
          auto loss = net(log.mine(wave({kRows, 3}))).pow(2).mean();
          loss.backward();
          evaluate(); // between backward and step
          optimizer.step();
          evaluate();
          optimizer.zero_grad();
        }
        log.parameters(net);
      },
      settings_with_blocks());
}

TEST(FreshWeights, InferenceModeBeforeTrainingChangesNothing) {
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        torch::optim::SGD optimizer(net.parameters(), 0.1);
        {
          const c10::InferenceMode inference;
          log.value("inference", net(wave({4, 3})));
        }
        {
          const torch::NoGradGuard no_grad;
          log.value("no grad", net(wave({4, 3})));
        }
        train_step(net, optimizer, log);
        {
          const c10::InferenceMode inference;
          log.value("inference", net(wave({4, 3})));
        }
        train_step(net, optimizer, log);
        log.parameters(net);
      },
      settings_with_blocks());
}

TEST(FreshWeights, AForwardWithoutBackwardLeavesShards) {
  for (const auto strategy : {Strategy::kFullShard, Strategy::kShardGradOp}) {
    on_ranks(3, [&](const World& world) {
      auto options = kUnits;
      FullyShardedDataParallel net(
          seeded(make_network), world, options.strategy(strategy));
      net(wave({4, 3}));
      for (const auto& parameter : net.parameters()) {
        EXPECT_EQ(parameter.dim(), 1);
      }
      net.reshard();
      EXPECT_EQ(net.memory().gathered_bytes, 0);
    });
  }
}

TEST(FreshWeights, AStepBetweenForwardsIsSeen) {
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        torch::optim::SGD optimizer(net.parameters(), 0.1);
        net(log.mine(wave({kRows, 3}))).pow(2).mean().backward();
        // A forward whose backward never comes, with weights kept whole.
        log.value("forward", net(wave({4, 3})));
        optimizer.step();
        log.value("forward", net(wave({4, 3})));
        log.parameters(net);
      },
      settings_with_blocks());
}

/// Ways to change weights between steps.
template <class Edit>
void expect_edit_is_seen(const Edit& edit) {
  expect_same_program(
      make_network,
      [&](auto& net, Log& log) {
        torch::optim::SGD optimizer(net.parameters(), 0.1);
        train_step(net, optimizer, log);
        log.value("before", net(wave({4, 3})));
        edit(net);
        log.value("after", net(wave({4, 3})));
        train_step(net, optimizer, log);
        log.parameters(net);
      },
      settings_with_blocks());
}

TEST(FreshWeights, FillingShardsIsSeen) {
  expect_edit_is_seen([](auto& net) {
    const torch::NoGradGuard no_grad;
    for (auto& each : net->named_parameters()) {
      if (contains(each.key(), "up.weight")) {
        each.value().fill_(0.07);
      }
    }
  });
}

TEST(FreshWeights, EditingDataIsSeen) {
  expect_edit_is_seen([](auto& net) {
    for (auto& parameter : net->parameters()) {
      parameter.data().mul_(0.5);
    }
  });
}

TEST(FreshWeights, EditingInARegionIsSeen) {
  expect_edit_is_seen([](auto& net) {
    const auto region = net.region();
    const torch::NoGradGuard no_grad;
    net->head->weight.copy_(wave({2, 5}));
    net->layers[1]->template as<BlockImpl>()->up->weight.select(0, 7).fill_(1);
  });
}

TEST(FreshWeights, ReplacingDataByWholeTensorsIsSeen) {
  expect_edit_is_seen([](auto& net) {
    net->head->weight.set_data(wave({2, 5}));
  });
}

/// The same while copies of the weights are kept whole.
template <class Edit>
void expect_edit_is_seen_when_unsharded(const Edit& edit) {
  for (const auto strategy : kAllStrategies) {
    on_ranks(3, [&](const World& world) {
      auto options = kUnits;
      FullyShardedDataParallel net(
          seeded(make_network), world, options.strategy(strategy));
      const torch::NoGradGuard no_grad;
      net.unshard();
      net(wave({4, 3}));
      edit(*net.operator->());
      const auto y = net(wave({4, 3}));
      net.reshard();
      const auto plain = seeded(make_network);
      edit(*plain);
      EXPECT_TRUE(all_close(y, plain->forward(wave({4, 3})), 1e-6, 1e-8));
      EXPECT_TRUE(all_close(
          net(wave({4, 3})), plain->forward(wave({4, 3})), 1e-6, 1e-8));
    });
  }
}

TEST(FreshWeights, UnshardedCopiesFollowEditsOfShards) {
  expect_edit_is_seen_when_unsharded([](NetworkImpl& module) {
    for (auto& parameter : module.parameters()) {
      parameter.mul_(0.5);
    }
  });
}

TEST(FreshWeights, UnshardedCopiesFollowReplacedData) {
  expect_edit_is_seen_when_unsharded([](NetworkImpl& module) {
    module.head->weight.set_data(wave({2, 5}));
  });
}

TEST(FreshWeights, UnshardedCopiesFollowTheOptimizer) {
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        torch::optim::SGD optimizer(net.parameters(), 0.1);
        for (int step = 0; step < 3; ++step) {
          if constexpr (requires { net.unshard(); }) {
            net.unshard();
          }
          train_step(net, optimizer, log);
          log.value("after", net(wave({4, 3})));
        }
        if constexpr (requires { net.unshard(); }) {
          net.reshard();
        }
        log.parameters(net);
      },
      settings_with_blocks());
}

// Conversions after sharding.

TEST(FreshWeights, MovingToTheSameTypeAndDeviceIsHarmless) {
  expect_edit_is_seen([](auto& net) {
    const auto type = net.parameters()[0].scalar_type();
    net->to(type);
    net->to(torch::kCPU);
    net->to(torch::kCPU, type);
  });
}

TEST(FreshWeights, ConvertingAfterShardingIsRefusedByNameAndCanBeTakenBack) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(seeded(make_network), world, kUnits);
    const auto x = wave({4, 3});
    net->to(torch::kDouble);
    const auto error = error_of([&] { net(x); });
    EXPECT_TRUE(contains(error, "'input.weight'")) << error;
    EXPECT_TRUE(contains(error, "dtype")) << error;
    net->to(torch::kFloat);
    const auto plain = seeded(make_network);
    EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
  });
}

TEST(FreshWeights, ConvertingOnePartIsRefusedByNameAndCanBeTakenBack) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(seeded(make_network), world, kUnits);
    const auto x = wave({4, 3});
    net->head->to(torch::kDouble);
    const auto error = error_of([&] { net(x); });
    EXPECT_TRUE(contains(error, "'head.weight'")) << error;
    EXPECT_EQ(net->input->weight.dim(), 1); // all are shards, as before
    net->head->to(torch::kFloat);
    const auto plain = seeded(make_network);
    EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
  });
}

TEST(FreshWeights, AReplacementOfAnotherSizeIsRefusedByName) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(seeded(make_network), world, kUnits);
    const auto x = wave({4, 3});
    const auto shard = net->head->weight.data();
    net->head->weight.set_data(torch::zeros({1000}));
    const auto error = error_of([&] { net(x); });
    EXPECT_TRUE(contains(error, "'head.weight'")) << error;
    EXPECT_TRUE(contains(error, "1000")) << error;
    net->head->weight.set_data(wave({2, 5}));
    const auto plain = seeded(make_network);
    plain->head->weight.set_data(wave({2, 5}));
    EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
  });
}

} // namespace fresh
} // namespace fsdp::testing
