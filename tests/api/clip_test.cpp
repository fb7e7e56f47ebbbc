// Clipping of gradients that lie on several ranks.

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>

namespace fsdp::testing {
namespace clip {

namespace nn = torch::nn;
using at::Tensor;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr Strategy kStrategies[] = {
    Strategy::kFullShard,
    Strategy::kShardGradOp,
    Strategy::kShardOptimizer,
    Strategy::kNoShard};

ProgramSettings clip_settings(const Options& options = {}) {
  ProgramSettings settings;
  settings.options = options;
  settings.same_bits = false; // a norm is a sum in another order
  return settings;
}

/// Trains with clipping to `share` of the norm that the first gradient has.
template <class Make>
void expect_same_clipping(
    const Make& make,
    double norm_type,
    double max_norm,
    const Options& options) {
  SCOPED_TRACE("norm type " + std::to_string(norm_type));
  expect_same_program(
      make,
      [&](auto& net, Log& log) {
        torch::optim::SGD optimizer(
            net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        for (int step = 0; step < 3; ++step) {
          auto loss = net(log.mine(wave({kRows, 3}, 0.7 + step))).pow(2).mean();
          loss.backward();
          net.average_ignored_gradients();
          log.value("norm", net.clip_grad_norm_(max_norm, norm_type));
          log.gradients(net);
          optimizer.step();
          optimizer.zero_grad();
        }
        log.parameters(net);
      },
      clip_settings(options));
}

TEST(Clip, EveryNormIsThatOfTheWholeModel) {
  for (const double norm_type : {0.5, 1.0, 2.0, 3.0, kInf}) {
    expect_same_clipping(
        make_network, norm_type, 0.05, Options().units(each<Block>()));
  }
}

TEST(Clip, ALargeLimitChangesNothing) {
  expect_same_clipping(make_network, 2.0, 1e6, Options().units(each<Block>()));
}

TEST(Clip, ALimitOfZeroRemovesAllGradients) {
  expect_same_clipping(make_network, 2.0, 0.0, Options().units(each<Block>()));
}

TEST(Clip, AMostlyEmptyRank) {
  expect_same_clipping(
      [] { return std::make_shared<nn::LinearImpl>(3, 5); }, 2.0, 0.05, {});
}

TEST(Clip, ReplicatedParametersCountOnce) {
  for (const double norm_type : {1.0, 2.0, 3.0, kInf}) {
    auto settings = Options().units(
        named("layers.0", UnitOptions().strategy(Strategy::kNoShard)) |
        each<Block>());
    expect_same_clipping(make_network, norm_type, 0.05, settings);
  }
}

TEST(Clip, IgnoredParametersCountOnce) {
  // They are not in the log of gradients, but in the norm.
  for (const int size : {1, 2, 3}) {
    for (const double norm_type : {1.0, 2.0, 3.0, kInf}) {
      on_ranks(size, [&](const World& world) {
        const auto x = wave({4, 3});
        FullyShardedDataParallel net(
            seeded(make_network),
            world,
            Options().units(each<Block>()).ignore({"head", "layers.1.up"}));
        net(x).pow(2).mean().backward();
        const double norm = net.clip_grad_norm_(0.05, norm_type);
        const auto plain = seeded(make_network);
        plain->forward(x).pow(2).mean().backward();
        const double expected =
            nn::utils::clip_grad_norm_(plain->parameters(), 0.05, norm_type);
        EXPECT_NEAR(norm, expected, 1e-6 * expected);
        for (const auto* name : {"head.weight", "layers.1.up.bias"}) {
          EXPECT_TRUE(all_close(
              net->named_parameters()[name].grad(),
              plain->named_parameters()[name].grad(),
              1e-6,
              1e-8));
        }
      });
    }
  }
}

TEST(Clip, TheReturnedNormIsWholeAndTheSameBitsEverywhere) {
  for (const auto strategy : kStrategies) {
    std::vector<double> norms(4);
    on_ranks(4, [&](const World& world) {
      FullyShardedDataParallel net(
          seeded(make_network),
          world,
          Options().strategy(strategy).units(each<Block>()));
      net(wave({4, 3}, 0.5 + world.rank())).pow(2).mean().backward();
      norms[static_cast<size_t>(world.rank())] = net.clip_grad_norm_(0.1);
    });
    share_results(norms);
    EXPECT_GT(norms[0], 0.1);
    EXPECT_EQ(norms, std::vector<double>(4, norms[0]));
  }
}

TEST(Clip, OnesOnAFourByFourWeightHaveTheNormFour) {
  on_ranks(4, [](const World& world) {
    FullyShardedDataParallel net(
        seeded([] { return nn::Linear(nn::LinearOptions(4, 4).bias(false)); }),
        world);
    net.call([](auto& linear) { return linear.weight.sum(); }).backward();
    EXPECT_EQ(net.clip_grad_norm_(100.0), 4.0);
  });
}

struct Crumbs : nn::Module {
  Crumbs() {
    for (int i = 0; i < 1024; ++i) {
      crumbs.push_back(register_parameter(
          "crumb" + std::to_string(i), torch::ones({1}, torch::kBFloat16)));
    }
  }
  std::vector<Tensor> crumbs;
};

TEST(Clip, NormsOf16BitGradientsAreSummedInFloat32) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(std::make_shared<Crumbs>(), world);
    net.call([](Crumbs& module) {
         return torch::cat(module.crumbs).to(torch::kFloat).sum();
       })
        .backward();
    // A bfloat16 sum of squares would stall at 256, which is a norm of 16.
    EXPECT_EQ(net.clip_grad_norm_(1e6), 32.0);
    EXPECT_EQ(net.parameters()[0].grad().scalar_type(), torch::kBFloat16);
  });
}

TEST(Clip, WithoutGradientsTheNormIsZero) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(seeded(make_network), world);
    EXPECT_EQ(net.clip_grad_norm_(1.0), 0.0);
    EXPECT_EQ(net.clip_grad_norm_(1.0, kInf), 0.0);
    net.clip_grad_value_(1.0);
    for (const auto& parameter : net.parameters()) {
      EXPECT_FALSE(parameter.grad().defined());
    }
  });
}

TEST(Clip, ANormTypeThatIsNotPositiveIsRefused) {
  FullyShardedDataParallel net(seeded(make_network));
  for (const double norm_type : {0.0, -1.0, -kInf, kNan}) {
    const auto error = error_of([&] { net.clip_grad_norm_(1.0, norm_type); });
    EXPECT_TRUE(contains(error, "norm_type must be positive")) << error;
  }
  const auto error = error_of([&] { net.clip_grad_value_(-0.5); });
  EXPECT_TRUE(contains(error, "must not be negative")) << error;
  EXPECT_TRUE(contains(error, "-0.5")) << error;
}

/// A net whose gradients are `value` in one element, and one elsewhere. The
/// element lies on one rank.
auto net_with_gradient(const World& world, Strategy strategy, float value) {
  auto net = std::make_unique<FullyShardedDataParallel<nn::LinearImpl>>(
      seeded([] { return nn::Linear(5, 3); }),
      world,
      Options().strategy(strategy));
  auto factor = torch::ones({3, 5});
  factor[1][2] = value;
  net->call([&](nn::LinearImpl& linear) {
       return (linear.weight * factor).sum() + linear.bias.sum();
     })
      .backward();
  return net;
}

TEST(Clip, NanAndInfinityReachEveryRank) {
  for (const auto strategy : kStrategies) {
    on_ranks(3, [&](const World& world) {
      for (const double norm_type : {1.0, 2.0, kInf}) {
        auto net = net_with_gradient(world, strategy, kNan);
        EXPECT_TRUE(std::isnan(net->clip_grad_norm_(1.0, norm_type)));
        // As in libtorch, where NaN * 1 makes all gradients NaN.
        for (const auto& [name, gradient] : whole_gradients(*net)) {
          EXPECT_TRUE(gradient.isnan().all().item<bool>()) << name;
        }
        net = net_with_gradient(world, strategy, kInf);
        EXPECT_EQ(net->clip_grad_norm_(1.0, norm_type), kInf);
        for (const auto& [name, gradient] : whole_gradients(*net)) {
          const auto nans = gradient.isnan().sum().item<int64_t>();
          EXPECT_EQ(nans, name == "weight" ? 1 : 0); // inf * 0
          EXPECT_EQ(gradient.nan_to_num().abs().max().item<float>(), 0.0F);
        }
      }
    });
  }
}

TEST(Clip, ANonFiniteNormIsAnErrorOnRequestAndChangesNothing) {
  for (const auto strategy : kStrategies) {
    on_ranks(3, [&](const World& world) {
      for (const double norm_type : {2.0, kInf}) {
        for (const float value :
             {std::numeric_limits<float>::infinity(), std::nanf("")}) {
          auto net = net_with_gradient(world, strategy, value);
          const auto error = error_of([&] {
            net->clip_grad_norm_(1.0, norm_type, /*error_if_nonfinite=*/true);
          });
          EXPECT_TRUE(contains(error, "norm of the gradients")) << error;
          EXPECT_TRUE(contains(error, std::isnan(value) ? "nan" : "inf"))
              << error;
          for (const auto& [name, gradient] : whole_gradients(*net)) {
            const auto rest = gradient.masked_select(gradient.isfinite());
            EXPECT_EQ(rest.numel(), name == "weight" ? 14 : 3);
            EXPECT_TRUE(at::equal(rest, torch::ones_like(rest)));
          }
        }
      }
      auto net = net_with_gradient(world, strategy, 1.0F);
      EXPECT_NEAR(
          net->clip_grad_norm_(1.0, 2.0, /*error_if_nonfinite=*/true),
          std::sqrt(18.0),
          1e-6);
    });
  }
}

TEST(Clip, ValuesAreClampedWhereTheyAre) {
  expect_same_program(make_network, [](auto& net, Log& log) {
    torch::optim::SGD optimizer(net.parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      auto loss = net(log.mine(wave({kRows, 3}))).pow(2).mean();
      loss.backward();
      net.clip_grad_value_(0.01);
      log.gradients(net);
      optimizer.step();
      optimizer.zero_grad();
    }
    log.parameters(net);
  });
}

TEST(Clip, ClampingNeedsNoOtherRank) {
  on_ranks(4, [](const World& world) {
    FullyShardedDataParallel net(
        seeded([] { return nn::Linear(5, 3); }), world);
    net.call([](auto& linear) {
         return (linear.weight - 0.5 * linear.bias.sum()).sum();
       })
        .backward();
    if (world.rank() != 0) {
      net.clip_grad_value_(0.1);
    }
    for (const auto& [name, gradient] : whole_gradients(net)) {
      if (name == "bias") { // on rank 1
        EXPECT_TRUE(all_close(gradient, torch::full({3}, -0.1), 1e-6, 0));
      } else { // on rank 0
        EXPECT_TRUE(at::equal(gradient, torch::ones({3, 5})));
      }
    }
  });
}

} // namespace clip
} // namespace fsdp::testing
