// Parameters that are left out, and those that every rank holds whole.

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

namespace fsdp::testing {
namespace ignored {

namespace nn = torch::nn;
using at::Tensor;

struct Scaled : nn::Module {
  Scaled()
      : scale(register_parameter("scale", torch::ones({3}))),
        body(register_module("body", nn::Linear(3, 4))),
        head(register_module("head", nn::Linear(4, 2))) {}
  Tensor forward(const Tensor& x) { return head(torch::tanh(body(x * scale))); }
  Tensor scale;
  nn::Linear body, head;
};

auto make_scaled() {
  return std::make_shared<Scaled>();
}

TEST(Ignored, AParameterIsLeftAsItIs) {
  on_ranks(3, [](const World& world) {
    auto module = seeded(make_scaled);
    const auto* data = module->scale.data_ptr();
    FullyShardedDataParallel net(module, world, Options().ignore({"scale"}));
    EXPECT_EQ(module->scale.sizes(), at::IntArrayRef({3}));
    EXPECT_EQ(module->scale.data_ptr(), data);
    const auto named = net.named_parameters();
    ASSERT_EQ(named.size(), module->named_parameters().size());
    for (size_t i = 0; i < named.size(); ++i) {
      EXPECT_EQ(named[i].first, module->named_parameters()[i].key());
      EXPECT_TRUE(named[i].second.is_same(module->parameters()[i]));
    }
    for (const auto& unit : net.describe().units) {
      for (const auto& parameter : unit.parameters) {
        EXPECT_NE(parameter.names[0], "scale");
      }
    }
    // It can be used anywhere, also outside of regions.
    EXPECT_EQ(module->scale.sum().item<float>(), 3.0F);
    const auto plain = seeded(make_scaled);
    const auto x = wave({4, 3});
    EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
  });
}

TEST(Ignored, AModuleIsIgnoredWithAllItsParameters) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_network),
        world,
        Options().units(each<Block>()).ignore({"layers.1", "input.bias"}));
    std::vector<std::string> sharded;
    for (const auto& unit : net.describe().units) {
      for (const auto& parameter : unit.parameters) {
        sharded.push_back(parameter.names[0]);
      }
    }
    EXPECT_EQ(net.describe().units.size(), 2U); // the root and layers.0
    for (const auto& each : net->named_parameters()) {
      const bool left_out =
          contains(each.key(), "layers.1") || each.key() == "input.bias";
      const bool found =
          std::find(sharded.begin(), sharded.end(), each.key()) !=
          sharded.end();
      EXPECT_NE(left_out, found) << each.key();
      if (left_out) {
        EXPECT_EQ(each.value().sizes().vec(), net.full_sizes(each.key()));
      } else {
        EXPECT_EQ(each.value().dim(), 1);
      }
    }
    const auto plain = seeded(make_network);
    const auto x = wave({4, 3});
    EXPECT_TRUE(all_close(net(x), plain->forward(x), 1e-6, 1e-8));
  });
}

TEST(Ignored, NamesMatchWholeParts) {
  // "head" is not a prefix of "header".
  struct Two : nn::Module {
    Two()
        : head(register_module("head", nn::Linear(2, 2))),
          header(register_module("header", nn::Linear(2, 2))) {}
    nn::Linear head, header;
  };
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(
        seeded([] { return std::make_shared<Two>(); }),
        world,
        Options().ignore({"head"}));
    EXPECT_EQ(net->head->weight.dim(), 2);
    EXPECT_EQ(net->header->weight.dim(), 1);
  });
}

TEST(Ignored, GradientsAreOfTheRankAndCanBeAveraged) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_scaled), world, Options().ignore({"scale"}));
    net(wave({4, 3}, 0.5 + world.rank())).pow(2).mean().backward();
    const auto plain = seeded(make_scaled);
    Tensor mean;
    for (int rank = 0; rank < 2; ++rank) {
      plain->zero_grad();
      plain->forward(wave({4, 3}, 0.5 + rank)).pow(2).mean().backward();
      const auto grad = plain->scale.grad().clone();
      mean = mean.defined() ? (mean + grad) / 2 : grad;
      if (rank == world.rank()) {
        EXPECT_TRUE(all_close(net->scale.grad(), grad, 1e-6, 1e-8));
      }
    }
    net.average_ignored_gradients();
    EXPECT_TRUE(all_close(net->scale.grad(), mean, 1e-6, 1e-8));
  });
}

TEST(Ignored, TrainingWithAveragedGradientsIsThatOfOneProcess) {
  ProgramSettings settings;
  settings.options.ignore({"scale", "head.bias"});
  expect_same_program(
      make_scaled,
      [](auto& net, Log& log) {
        torch::optim::AdamW optimizer(
            net->parameters(), torch::optim::AdamWOptions(0.01).eps(1e-4));
        for (int step = 0; step < 5; ++step) {
          auto loss = net(log.mine(wave({kRows, 3}, 0.7 + step))).pow(2).mean();
          loss.backward();
          net.average_ignored_gradients();
          log.loss(loss);
          log.value("gradient", net->scale.grad());
          optimizer.step();
          optimizer.zero_grad();
          log.value("scale", net->scale);
          log.value("bias", net->head->bias);
        }
      },
      settings);
}

TEST(Ignored, AveragingCountsARankWithoutAGradientAsZero) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_scaled), world, Options().ignore({"scale", "head"}));
    if (world.rank() == 0) {
      net->scale.sum().backward();
    }
    net.average_ignored_gradients();
    EXPECT_TRUE(at::equal(net->scale.grad(), torch::full({3}, 0.5)));
    EXPECT_FALSE(net->head->weight.grad().defined());
  });
}

TEST(Ignored, FrozenOnesAreNotAveraged) {
  on_ranks(2, [](const World& world) {
    auto module = seeded(make_scaled);
    module->scale.requires_grad_(false);
    FullyShardedDataParallel net(module, world, Options().ignore({"scale"}));
    net(wave({4, 3})).sum().backward();
    net.average_ignored_gradients();
    EXPECT_FALSE(net->scale.grad().defined());
  });
}

TEST(Ignored, DriftIsFoundByNameOnEveryRank) {
  std::vector<std::string> errors(3);
  on_ranks(3, [&](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_scaled), world, Options().ignore({"scale", "head.bias"}));
    torch::optim::SGD optimizer(net.parameters(), 0.1);
    net.check_replicas();                  // nothing has drifted
    for (int step = 0; step < 2; ++step) { // a forgotten average
      net(wave({4, 3}, 0.5 + world.rank())).pow(2).mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    errors[static_cast<size_t>(world.rank())] =
        error_of([&] { net.check_replicas(); });
  });
  share_results(errors);
  EXPECT_TRUE(contains(errors[0], "'scale'")) << errors[0];
  EXPECT_TRUE(contains(errors[0], "rank 0/3")) << errors[0];
  EXPECT_TRUE(contains(errors[0], "drifted apart")) << errors[0];
  EXPECT_EQ(errors, std::vector<std::string>(3, errors[0]));
}

TEST(Ignored, ReplicatedUnitsNeverDrift) {
  on_ranks(3, [](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_scaled),
        world,
        Options().units(
            named("body", UnitOptions().strategy(Strategy::kNoShard))));
    torch::optim::AdamW optimizer(net.parameters(), 0.01);
    for (int step = 0; step < 4; ++step) {
      net(wave({4, 3}, 0.5 + world.rank())).pow(2).mean().backward();
      net.clip_grad_norm_(0.1);
      optimizer.step();
      optimizer.zero_grad();
      net.check_replicas();
    }
    {
      const torch::NoGradGuard no_grad;
      net->body->bias[1] += 1e-3 * world.rank(); // by hand
    }
    const auto error = error_of([&] { net.check_replicas(); });
    EXPECT_TRUE(contains(error, "'body.bias'")) << error;
  });
}

TEST(Ignored, TheListIsPartOfTheAgreement) {
  std::vector<std::string> errors(2);
  on_ranks(2, [&](const World& world) {
    errors[static_cast<size_t>(world.rank())] = error_of([&] {
      FullyShardedDataParallel net(
          seeded(make_scaled),
          world,
          world.rank() == 0 ? Options() : Options().ignore({"scale"}));
    });
  });
  share_results(errors);
  EXPECT_TRUE(contains(errors[0], "'scale'")) << errors[0];
  EXPECT_EQ(errors[0], errors[1]);
}

} // namespace ignored
} // namespace fsdp::testing
