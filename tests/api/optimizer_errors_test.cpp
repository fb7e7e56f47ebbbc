// Steps of an optimizer that cannot be right.

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

namespace fsdp::testing {
namespace optimizer_errors {

namespace nn = torch::nn;
namespace optim = torch::optim;
using at::Tensor;

TEST(OptimizerErrors, OneThatStepsBeforeShardingIsTold) {
  for (const int size : {1, 2}) {
    on_ranks(size, [](const World& world) {
      const auto module = seeded(make_network);
      optim::Adam optimizer(module->parameters(), 0.01);
      module->forward(wave({4, 3})).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
      FullyShardedDataParallel net(module, world);
      net(wave({4, 3})).sum().backward();
      const auto error = error_of([&] { optimizer.step(); });
      EXPECT_TRUE(contains(error, "before sharding")) << error;
      EXPECT_TRUE(contains(error, "gradient shard")) << error;
    });
  }
}

TEST(OptimizerErrors, AStepInsideARegionIsRefused) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_network), world, Options().units(each<Block>()));
    optim::SGD optimizer(net.parameters(), 0.1);
    const auto x = wave({4, 3});
    net(x).pow(2).mean().backward();
    {
      const auto region = net.region();
      const auto error = error_of([&] { optimizer.step(); });
      EXPECT_TRUE(contains(error, "inside a region")) << error;
      EXPECT_TRUE(contains(error, "optimizer.step()")) << error;
    }
    const auto plain = seeded(make_network);
    EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
    optimizer.step();
    optim::SGD reference(plain->parameters(), 0.1);
    plain->forward(x).pow(2).mean().backward();
    reference.step();
    for (const auto& [name, value] : whole_values(net)) {
      EXPECT_TRUE(all_close(value, plain->named_parameters()[name], 1e-6, 1e-8))
          << name;
    }
  });
}

TEST(OptimizerErrors, LbfgsIsRefused) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_network), world, Options().units(each<Block>()));
    optim::LBFGS optimizer(net.parameters(), optim::LBFGSOptions(0.1));
    const auto x = wave({4, 3});
    const auto error = error_of([&] {
      optimizer.step([&] {
        optimizer.zero_grad();
        auto loss = net(x).pow(2).mean();
        loss.backward();
        return loss;
      });
    });
    EXPECT_TRUE(contains(error, "LBFGS")) << error;
    const auto plain = seeded(make_network);
    EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
  });
}

TEST(OptimizerErrors, LbfgsWorksInAWorldOfOne) {
  const auto run = [](auto& net) {
    optim::LBFGS optimizer(net.parameters(), optim::LBFGSOptions(0.1));
    double last = 0;
    for (int step = 0; step < 3; ++step) {
      last = optimizer
                 .step([&] {
                   const at::AutoGradMode grad(true);
                   optimizer.zero_grad();
                   auto loss = net(wave({4, 3})).pow(2).mean();
                   loss.backward();
                   return loss;
                 })
                 .template item<double>();
    }
    return last;
  };
  FullyShardedDataParallel net(seeded(make_network));
  Plain plain(seeded(make_network));
  const double expected = run(plain);
  EXPECT_NEAR(run(net), expected, 1e-5 * expected);
}

TEST(OptimizerErrors, ClippingByLibtorchWarnsOfThePartialNorm) {
  struct Collect : c10::WarningHandler {
    void process(const c10::Warning& warning) override {
      text += warning.msg();
    }
    std::string text;
  };
  on_ranks(2, [&](const World& world) {
    FullyShardedDataParallel net(seeded(make_network), world);
    net(wave({4, 3})).sum().backward();
    Collect collect;
    const c10::WarningUtils::WarningHandlerGuard guard(&collect);
    const c10::WarningUtils::WarnAlways always;
    nn::utils::clip_grad_norm_(net->parameters(), 1e9);
    if (world.rank() == 0) {
      EXPECT_TRUE(contains(collect.text, "net.clip_grad_norm_()"))
          << collect.text;
    }
  });
}

TEST(OptimizerErrors, ClippingByLibtorchIsRightInAWorldOfOne) {
  FullyShardedDataParallel net(seeded(make_network));
  net(wave({4, 3})).sum().backward();
  const double norm = nn::utils::clip_grad_norm_(net->parameters(), 1e9);
  EXPECT_GT(norm, 0.1);
  EXPECT_NEAR(norm, net.clip_grad_norm_(1e9), 1e-6 * norm);
}

} // namespace optimizer_errors
} // namespace fsdp::testing
