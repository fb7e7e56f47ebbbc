// libtorch's optimizers on shards, built before or after sharding.

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>

namespace fsdp::testing {
namespace optimizers {

namespace nn = torch::nn;
namespace optim = torch::optim;
using at::Tensor;
using MakeOptimizer =
    std::function<std::unique_ptr<optim::Optimizer>(const NetworkImpl&)>;

template <class N>
void train(N& net, optim::Optimizer& optimizer, Log& log) {
  for (int step = 0; step < 4; ++step) {
    auto loss = net(log.mine(wave({kRows, 3}, 0.7 + step))).pow(2).mean();
    loss.backward();
    log.loss(loss);
    optimizer.step();
    optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
    log.parameters(net);
  }
}

enum class Built : uint8_t { kBefore, kAfter };

void expect_same_steps(
    const MakeOptimizer& make,
    const std::vector<Built>& times = {Built::kBefore, Built::kAfter}) {
  const DefaultType type(torch::kDouble);
  Log expected{World()};
  {
    const auto module = seeded(make_network);
    Plain plain(module);
    const auto optimizer = make(*module);
    train(plain, *optimizer, expected);
  }
  for (const auto built : times) {
    for (const auto strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
      for (const int size : {1, 2, 3, 4}) {
        SCOPED_TRACE(
            std::string(built == Built::kBefore ? "before" : "after") +
            ", strategy " + std::to_string(static_cast<int>(strategy)));
        on_ranks(size, [&](const World& world) {
          const auto module = seeded(make_network);
          std::unique_ptr<optim::Optimizer> optimizer;
          if (built == Built::kBefore) {
            optimizer = make(*module);
          }
          FullyShardedDataParallel net(
              module, world, Options().strategy(strategy).units(each<Block>()));
          if (built == Built::kAfter) {
            optimizer = make(*net.operator->());
          }
          Log log(world);
          train(net, *optimizer, log);
          expect_same_log(expected, log, {});
        });
        if (::testing::Test::HasFailure()) {
          return;
        }
      }
    }
  }
}

template <class T, class O>
MakeOptimizer over_all(const O& options) {
  return [options](const NetworkImpl& module) {
    return std::make_unique<T>(module.parameters(), options);
  };
}

TEST(Optimizers, Sgd) {
  expect_same_steps(over_all<optim::SGD>(optim::SGDOptions(0.1)));
}

TEST(Optimizers, SgdWithNesterovMomentumAndDecay) {
  expect_same_steps(over_all<optim::SGD>(
      optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01)));
}

TEST(Optimizers, Adam) {
  expect_same_steps(over_all<optim::Adam>(optim::AdamOptions(0.01).eps(1e-4)));
}

TEST(Optimizers, AdamWithAmsgradAndDecay) {
  expect_same_steps(over_all<optim::Adam>(
      optim::AdamOptions(0.01).eps(1e-4).amsgrad(true).weight_decay(0.1)));
}

TEST(Optimizers, AdamW) {
  expect_same_steps(over_all<optim::AdamW>(
      optim::AdamWOptions(0.01).eps(1e-4).weight_decay(0.1)));
}

TEST(Optimizers, RmsProp) {
  expect_same_steps(
      over_all<optim::RMSprop>(optim::RMSpropOptions(0.01).eps(1e-4)));
}

TEST(Optimizers, CenteredRmsPropWithMomentum) {
  expect_same_steps(over_all<optim::RMSprop>(
      optim::RMSpropOptions(0.01).eps(1e-2).centered(true).momentum(0.5)));
}

TEST(Optimizers, Adagrad) {
  expect_same_steps(
      over_all<optim::Adagrad>(
          optim::AdagradOptions(0.01).eps(1e-4).initial_accumulator_value(0.1)),
      {Built::kAfter});
}

TEST(Optimizers, AdagradBuiltBeforeShardingIsTold) {
  // Unlike the others it makes its state, of whole shapes, when it is built.
  on_ranks(3, [](const World& world) {
    const auto module = seeded(make_network);
    optim::Adagrad optimizer(module->parameters(), 0.01);
    FullyShardedDataParallel net(module, world);
    net(wave({4, 3})).sum().backward();
    const auto error = error_of([&] { optimizer.step(); });
    EXPECT_TRUE(contains(error, "before sharding")) << error;
    EXPECT_TRUE(contains(error, "make the optimizer")) << error;
  });
}

std::vector<Tensor> chosen(
    const NetworkImpl& module,
    const std::function<bool(const std::string& name)>& wanted) {
  std::vector<Tensor> tensors;
  for (const auto& each : module.named_parameters()) {
    if (wanted(each.key())) {
      tensors.push_back(each.value());
    }
  }
  return tensors;
}

std::vector<optim::OptimizerParamGroup> decay_groups(
    const NetworkImpl& module) {
  const auto decays = [](const std::string& name) {
    return contains(name, "weight") && !contains(name, "norm");
  };
  std::vector<optim::OptimizerParamGroup> groups;
  groups.emplace_back(
      chosen(module, decays),
      std::make_unique<optim::AdamWOptions>(
          optim::AdamWOptions(0.01).eps(1e-4).weight_decay(0.3)));
  groups.emplace_back(
      chosen(module, [&](const auto& name) { return !decays(name); }),
      std::make_unique<optim::AdamWOptions>(
          optim::AdamWOptions(0.003).eps(1e-4).weight_decay(0.0)));
  return groups;
}

TEST(Optimizers, SeveralParameterGroups) {
  expect_same_steps([](const NetworkImpl& module) {
    return std::make_unique<optim::AdamW>(decay_groups(module));
  });
}

TEST(Optimizers, AGroupThatIsAddedLater) {
  expect_same_steps([](const NetworkImpl& module) {
    auto groups = decay_groups(module);
    auto optimizer = std::make_unique<optim::AdamW>(
        std::vector<optim::OptimizerParamGroup>{groups[1]});
    optimizer->add_param_group(groups[0]);
    return optimizer;
  });
}

TEST(Optimizers, AGroupWhoseShardIsEmptyOnSomeRank) {
  expect_same_steps([](const NetworkImpl& module) {
    std::vector<optim::OptimizerParamGroup> groups;
    const std::vector<std::string> names = {"input", "head.bias", "layers"};
    for (size_t i = 0; i < names.size(); ++i) {
      groups.emplace_back(
          chosen(
              module,
              [&](const auto& name) { return name.starts_with(names[i]); }),
          std::make_unique<optim::SGDOptions>(
              0.1 * static_cast<double>(i + 1)));
    }
    return std::make_unique<optim::SGD>(groups, optim::SGDOptions(0));
  });
}

TEST(Optimizers, OneOverTheHeadOnly) {
  expect_same_steps([](const NetworkImpl& module) {
    return std::make_unique<optim::Adam>(
        module.head->parameters(), optim::AdamOptions(0.01).eps(1e-4));
  });
}

TEST(Optimizers, ALearningRateSchedule) {
  ProgramSettings settings;
  settings.options.units(each<Block>());
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        optim::SGD optimizer(net.parameters(), 0.2);
        optim::StepLR schedule(optimizer, 2, 0.5);
        for (int step = 0; step < 5; ++step) {
          net(log.mine(wave({kRows, 3}))).pow(2).mean().backward();
          optimizer.step();
          optimizer.zero_grad();
          schedule.step();
        }
        log.value("rate", optimizer.param_groups()[0].options().get_lr());
        log.parameters(net);
      },
      settings);
}

TEST(Optimizers, AClosureMayRunTheNet) {
  ProgramSettings settings;
  settings.options.units(each<Block>());
  expect_same_program(
      make_network,
      [](auto& net, Log& log) {
        optim::SGD optimizer(net.parameters(), 0.1);
        for (int step = 0; step < 3; ++step) {
          auto loss = optimizer.step([&] {
            const at::AutoGradMode grad(true);
            optimizer.zero_grad();
            auto value = net(log.mine(wave({kRows, 3}))).pow(2).mean();
            value.backward();
            return value;
          });
          log.loss(loss);
        }
        log.parameters(net);
      },
      settings);
}

TEST(Optimizers, StateLivesOnShards) {
  on_ranks(4, [](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_network), world, Options().units(each<Block>()));
    optim::Adam optimizer(net.parameters(), 0.01);
    net(wave({4, 3})).pow(2).mean().backward();
    optimizer.step();
    for (const auto& parameter : net.parameters()) {
      const auto& state = static_cast<const optim::AdamParamState&>(
          *optimizer.state().at(parameter.unsafeGetTensorImpl()));
      EXPECT_EQ(state.exp_avg().sizes(), parameter.sizes());
      EXPECT_EQ(state.exp_avg_sq().numel(), parameter.numel());
      EXPECT_EQ(state.step(), 1);
    }
  });
}

} // namespace optimizers
} // namespace fsdp::testing
