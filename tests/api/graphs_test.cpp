// Graphs beyond one forward and one backward.

#include "api/counting_communicator.h"
#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace graphs {

namespace nn = torch::nn;
using at::Tensor;

template <class M, class... A>
auto maker(A... arguments) {
  return [=] { return std::make_shared<M>(arguments...); };
}

ProgramSettings settings_with_blocks() {
  ProgramSettings settings;
  settings.options.units(each<Block>());
  return settings;
}

/// Repeats `backward(net, x)`, which leaves gradients, with steps in between.
template <class Make, class Backward>
void expect_same_gradients(
    const Make& make,
    const Backward& backward,
    const ProgramSettings& settings) {
  expect_same_program(
      make,
      [&](auto& net, Log& log) {
        torch::optim::SGD optimizer(
            net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        for (int step = 0; step < 3; ++step) {
          backward(net, log.mine(wave({kRows, 3}, 0.7 + step)), log);
          log.gradients(net);
          optimizer.step();
          optimizer.zero_grad();
          log.parameters(net);
          for (const auto& parameter : net.parameters()) {
            EXPECT_FALSE(parameter.grad().defined());
          }
        }
      },
      settings);
}

struct Recurrent : nn::Module {
  Recurrent()
      : input(register_module("input", nn::Linear(3, 2))),
        cell(register_module("cell", nn::Linear(2, 2))) {}
  Tensor forward(const Tensor& x) {
    auto y = input(x);
    for (int i = 0; i < 3; ++i) {
      y = torch::tanh(cell(y));
    }
    return y;
  }
  nn::Linear input, cell;
};

TEST(Graphs, AUnitUsedThreeTimesInOneForward) {
  ProgramSettings settings;
  settings.options.units(named("cell"));
  expect_same_gradients(
      maker<Recurrent>(),
      [](auto& net, const Tensor& x, Log& log) {
        auto loss = net(x).pow(2).mean();
        loss.backward();
        log.loss(loss);
      },
      settings);
}

TEST(Graphs, UnitsUsedInTurnABCABC) {
  ProgramSettings settings;
  settings.options.units(each<Block>()).slots(1);
  expect_same_gradients(
      maker<NetworkImpl>(3),
      [](auto& net, const Tensor& x, Log& log) {
        auto loss = net.call([&](NetworkImpl& module) {
          auto y = module.input(x);
          for (int round = 0; round < 2; ++round) {
            for (const auto& layer : *module.layers) {
              y = layer->as<BlockImpl>()->forward(y);
            }
          }
          return module.head(y).pow(2).mean();
        });
        loss.backward();
        log.loss(loss);
      },
      settings);
}

TEST(Graphs, ASiameseLoss) {
  expect_same_gradients(
      maker<NetworkImpl>(),
      [](auto& net, const Tensor& x, Log& log) {
        auto loss = (net(x) - net(x.flip(1) * 0.3)).pow(2).mean();
        loss.backward();
        log.loss(loss);
      },
      settings_with_blocks());
}

TEST(Graphs, OneReductionPerUnitAndBackward) {
  on_ranks(2, [](const World& world) {
    auto counter = std::make_shared<CountingCommunicator>(world);
    FullyShardedDataParallel net(
        seeded(maker<Recurrent>()),
        World(counter),
        Options().units(named("cell")));
    for (int step = 0; step < 3; ++step) {
      counter->notes().clear();
      net(wave({4, 3})).pow(2).mean().backward();
      EXPECT_EQ(counter->count("reduce_scatter of unit 'cell'"), 1) << step;
      EXPECT_EQ(counter->count("reduce_scatter of unit '(root)'"), 1) << step;
      net->zero_grad();
    }
  });
}

TEST(Graphs, TwoForwardsThenTwoBackwards) {
  for (const bool reverse : {false, true}) {
    expect_same_gradients(
        maker<NetworkImpl>(),
        [&](auto& net, const Tensor& x, Log& log) {
          auto first = net(x).pow(2).mean();
          auto second = net(x * 2).sin().mean();
          (reverse ? second : first).backward();
          log.gradients(net);
          (reverse ? first : second).backward();
          for (const auto& each : net.parameters()) {
            EXPECT_TRUE(each.grad().defined());
          }
          log.loss(first + second);
        },
        settings_with_blocks());
  }
}

TEST(Graphs, AllUnitsAreReleasedAfterTwoForwardsAndBackwards) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(
        seeded(make_network), world, Options().units(each<Block>()));
    auto first = net(wave({4, 3})).pow(2).mean();
    auto second = net(wave({4, 3})).pow(2).mean();
    first.backward();
    second.backward();
    EXPECT_EQ(net.memory().gathered_bytes, 0);
    for (const auto& parameter : net.parameters()) {
      EXPECT_EQ(parameter.dim(), 1);
    }
  });
}

TEST(Graphs, TwoBackwardsOverARetainedGraph) {
  expect_same_gradients(
      maker<NetworkImpl>(),
      [](auto& net, const Tensor& x, Log& log) {
        auto loss = net(x).pow(2).mean();
        loss.backward({}, /*retain_graph=*/true);
        log.gradients(net);
        loss.backward();
        log.loss(loss);
      },
      settings_with_blocks());
}

TEST(Graphs, AGradientPenalty) {
  expect_same_gradients(
      maker<NetworkImpl>(),
      [](auto& net, const Tensor& batch, Log& log) {
        const auto x = batch.clone().requires_grad_();
        const auto y = net(x);
        const auto slope = torch::autograd::grad(
            {y.sum()},
            {x},
            {},
            /*retain_graph=*/true,
            /*create_graph=*/true)[0];
        auto loss = y.pow(2).mean() + (slope.norm(2, 1) - 1).pow(2).mean();
        loss.backward();
        log.loss(loss);
      },
      settings_with_blocks());
}

TEST(Graphs, SecondOrderGradientsOfAWeightInARegion) {
  expect_same_program(
      [] { return std::make_shared<nn::LinearImpl>(4, 4); },
      [](auto& net, Log& log) {
        const auto x = log.mine(wave({kRows, 4}));
        const auto region = net.region();
        const auto y = net(x);
        const auto g = torch::autograd::grad(
            {y.pow(3).mean()},
            {net->weight},
            {},
            /*retain_graph=*/true,
            /*create_graph=*/true)[0];
        const auto gg = torch::autograd::grad({g.sum()}, {net->weight})[0];
        EXPECT_EQ(gg.sizes(), at::IntArrayRef({4, 4}));
        log.loss((gg * wave({4, 4})).sum()); // a mean over rows, too
      });
}

TEST(Graphs, BackwardInsideARegion) {
  expect_same_gradients(
      maker<NetworkImpl>(),
      [](auto& net, const Tensor& x, Log& log) {
        auto region = net.region();
        auto loss = net(x).pow(2).mean();
        loss.backward();
        if constexpr (requires { region.close(); }) {
          region.close();
        }
        log.loss(loss);
      },
      settings_with_blocks());
}

struct Heads : nn::Module {
  Heads()
      : body(register_module("body", nn::Linear(3, 4))),
        left(register_module("left", nn::Linear(4, 2))),
        right(register_module("right", nn::Linear(4, 2))),
        never(register_module("never", nn::Linear(4, 2))) {}
  std::pair<Tensor, Tensor> forward(const Tensor& x) {
    const auto y = torch::tanh(body(x));
    return {left(y), right(y)};
  }
  Tensor same(const Tensor& x) { return x; }
  nn::Linear body, left, right, never;
};

void expect_unused_heads_have_no_gradient(const Options& options) {
  ProgramSettings settings;
  settings.options = options;
  expect_same_gradients(
      maker<Heads>(),
      [](auto& net, const Tensor& x, Log& log) {
        auto loss = net(x).first.pow(2).mean();
        loss.backward();
        log.loss(loss);
        EXPECT_FALSE(net->right->weight.grad().defined());
        EXPECT_FALSE(net->never->bias.grad().defined());
      },
      settings);
}

TEST(Graphs, AnUnusedHeadOfTheSameUnitKeepsNoGradient) {
  expect_unused_heads_have_no_gradient(Options());
}

TEST(Graphs, AnUnusedHeadInAUnitOfItsOwnKeepsNoGradient) {
  expect_unused_heads_have_no_gradient(Options().units(each<nn::Linear>()));
}

TEST(Graphs, AForwardThatReturnsItsInput) {
  expect_same_gradients(
      maker<Heads>(),
      [](auto& net, const Tensor& x, Log& log) {
        const auto y = net.call(&Heads::same, x);
        EXPECT_TRUE(y.is_same(x));
        auto loss = net(y).second.pow(2).mean();
        loss.backward();
        log.loss(loss);
      },
      {});
}

TEST(Graphs, HeadsUsedInTurn) {
  ProgramSettings settings;
  settings.options.units(each<nn::Linear>());
  expect_same_program(
      maker<Heads>(),
      [](auto& net, Log& log) {
        torch::optim::AdamW optimizer(
            net.parameters(), torch::optim::AdamWOptions(0.01).eps(1e-4));
        for (int step = 0; step < 5; ++step) {
          const auto [left, right] = net(log.mine(wave({kRows, 3})));
          auto loss = (step % 2 == 0 ? left : right).pow(2).mean();
          loss.backward();
          log.gradients(net);
          optimizer.step();
          optimizer.zero_grad();
        }
        log.parameters(net);
      },
      settings);
}

TEST(Graphs, AParameterThatNobodyUsesDoesNotDecay) {
  for (const auto strategy : {Strategy::kFullShard, Strategy::kNoShard}) {
    on_ranks(3, [&](const World& world) {
      FullyShardedDataParallel net(
          seeded(maker<Heads>()), world, Options().strategy(strategy));
      torch::optim::AdamW optimizer(
          net.parameters(), torch::optim::AdamWOptions(0.1).weight_decay(0.5));
      const auto before = seeded(maker<Heads>());
      for (int step = 0; step < 3; ++step) {
        net(wave({4, 3})).first.sum().backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      for (const auto& [name, value] : whole_values(net)) {
        const auto old = before->named_parameters()[name];
        EXPECT_EQ(
            at::equal(value, old),
            contains(name, "right") || contains(name, "never"))
            << name;
      }
    });
  }
}

TEST(Graphs, AParameterThatSomeRankUsesGetsTheMeanEverywhere) {
  for (const auto strategy : kAllStrategies) {
    for (const auto& units : {UnitPolicy(), each<nn::Linear>()}) {
      if (strategy == Strategy::kFullShard && !units.rules().empty()) {
        continue; // gathers of backward would come in another order on rank 1
      }
      on_ranks(3, [&](const World& world) {
        FullyShardedDataParallel net(
            seeded(maker<Heads>()),
            world,
            Options().strategy(strategy).units(units));
        for (int step = 0; step < 3; ++step) {
          // Rank 1 alone has something for the right head.
          const auto [left, right] = net(wave({4, 3}));
          auto loss = left.sum();
          if (world.rank() == 1) {
            loss = loss + right.sum();
          }
          loss.backward();
          for (const auto& [name, gradient] : whole_gradients(net)) {
            EXPECT_EQ(gradient.defined(), !contains(name, "never")) << name;
            if (name == "left.bias") {
              EXPECT_TRUE(all_close(gradient, torch::full({2}, 4.0F), 1e-6, 0));
            } else if (name == "right.bias") {
              EXPECT_TRUE(
                  all_close(gradient, torch::full({2}, 4.0F / 3), 1e-6, 0));
            }
          }
          net->zero_grad();
        }
      });
    }
  }
}

} // namespace graphs
} // namespace fsdp::testing
