// Several nets and several worlds in one program.

#include "api/models.h"
#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {
namespace worlds {

namespace nn = torch::nn;
using at::Tensor;
using Net = FullyShardedDataParallel<NetworkImpl>;

/// The parameters of a network that trained for `steps` on `x`.
NamedValues trained(uint64_t seed, const Tensor& x, int steps) {
  const auto network = seeded(make_network, seed);
  torch::optim::SGD optimizer(
      network->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < steps; ++step) {
    network->forward(x).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return distinct_parameters(*network);
}

void expect_parameters(ShardedModule& net, const NamedValues& expected) {
  for (const auto& [name, value] : whole_values(net)) {
    for (const auto& [each, tensor] : expected) {
      if (each == name) {
        EXPECT_TRUE(all_close(value, tensor, 1e-6, 1e-8)) << name;
      }
    }
  }
}

struct Trainer {
  Trainer(const World& world, uint64_t seed)
      : net(seeded(make_network, seed), world, Options().units(each<Block>())),
        optimizer(
            net.parameters(),
            torch::optim::SGDOptions(0.1).momentum(0.9)) {}
  void step(const Tensor& x) {
    net(x).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  Net net;
  torch::optim::SGD optimizer;
};

TEST(Worlds, NetsOnDisjointRanksTrainApart) {
  const auto x = wave({4, 3});
  on_ranks(5, [&](const World& world) {
    const int color = world.rank() < 3 ? 0 : 1;
    const auto part = world.split(color, world.rank());
    EXPECT_EQ(part.size(), color == 0 ? 3 : 2);
    EXPECT_EQ(part.rank(), color == 0 ? world.rank() : world.rank() - 3);
    Trainer trainer(part, static_cast<uint64_t>(color + 1));
    EXPECT_EQ(trainer.net.describe().world_size, part.size());
    // Not the same number of steps: the groups do not wait for one another.
    const int steps = color == 0 ? 3 : 5;
    for (int step = 0; step < steps; ++step) {
      trainer.step(x);
    }
    expect_parameters(
        trainer.net, trained(static_cast<uint64_t>(color + 1), x, steps));
  });
}

TEST(Worlds, KeysOrderTheRanksOfASplit) {
  on_ranks(4, [](const World& world) {
    const auto reversed = world.split(0, -world.rank());
    EXPECT_EQ(reversed.rank(), 3 - world.rank());
    const auto alone = world.split(world.rank());
    EXPECT_EQ(alone.size(), 1);
    EXPECT_EQ(alone.rank(), 0);
    const auto x = wave({4, 3});
    Trainer trainer(reversed, 1);
    trainer.step(x);
    trainer.step(x);
    expect_parameters(trainer.net, trained(1, x, 2));
  });
}

TEST(Worlds, ARankMayBeInSeveralWorlds) {
  const auto x = wave({4, 3});
  on_ranks(4, [&](const World& world) {
    Trainer all(world, 1);
    Trainer pair(world.split(world.rank() / 2), 2);
    Trainer alone(World(), 3);
    for (int step = 0; step < 3; ++step) {
      all.step(x);
      pair.step(x);
      alone.step(x);
    }
    expect_parameters(all.net, trained(1, x, 3));
    expect_parameters(pair.net, trained(2, x, 3));
    expect_parameters(alone.net, trained(3, x, 3));
  });
}

TEST(Worlds, NetsOfOneWorldDoNotDisturbEachOther) {
  const auto x = wave({4, 3});
  on_ranks(3, [&](const World& world) {
    Trainer first(world, 1);
    Trainer second(world, 2);
    for (int step = 0; step < 3; ++step) {
      auto a = first.net(x).pow(2).mean();
      auto b = second.net(x).pow(2).mean();
      b.backward();
      a.backward();
      first.optimizer.step();
      second.optimizer.step();
      first.optimizer.zero_grad();
      second.optimizer.zero_grad();
    }
    expect_parameters(first.net, trained(1, x, 3));
    expect_parameters(second.net, trained(2, x, 3));
  });
}

TEST(Worlds, OneLossMayInvolveTwoNets) {
  const auto x = wave({4, 3});
  on_ranks(3, [&](const World& world) {
    Trainer first(world, 1);
    Trainer second(world, 2);
    const auto plain_first = seeded(make_network, 1);
    const auto plain_second = seeded(make_network, 2);
    for (int step = 0; step < 2; ++step) {
      (first.net(x) * second.net(x)).mean().backward();
      (plain_first->forward(x) * plain_second->forward(x)).mean().backward();
      for (auto& [net, plain] :
           {std::make_pair(&first.net, plain_first),
            std::make_pair(&second.net, plain_second)}) {
        for (const auto& [name, gradient] : whole_gradients(*net)) {
          EXPECT_TRUE(all_close(
              gradient, plain->named_parameters()[name].grad(), 1e-6, 1e-8))
              << name;
        }
      }
    }
  });
}

TEST(Worlds, AnUnrelatedBackwardOnOneRankWaitsForNobody) {
  on_ranks(3, [](const World& world) {
    Trainer trainer(world, 1);
    if (world.rank() == 1) {
      const auto w = torch::ones({3}, torch::requires_grad());
      (w * 2).sum().backward();
      EXPECT_TRUE(at::equal(w.grad(), torch::full({3}, 2.0)));
      const auto plain = seeded(make_network);
      plain->forward(wave({4, 3})).sum().backward();
      EXPECT_TRUE(plain->head->bias.grad().defined());
    }
    trainer.step(wave({4, 3}));
    expect_parameters(trainer.net, trained(1, wave({4, 3}), 1));
  });
}

struct Generator : nn::Module {
  Generator()
      : first(register_module("first", nn::Linear(2, 6))),
        second(register_module("second", nn::Linear(6, 3))) {}
  Tensor forward(const Tensor& z) { return second(torch::tanh(first(z))); }
  nn::Linear first, second;
};

void freeze(nn::Module& module, bool frozen) {
  for (auto& parameter : module.parameters()) {
    parameter.requires_grad_(!frozen);
  }
}

/// Four steps of adversarial training; nets are called like functions.
template <class G, class D>
std::vector<double>
adversarial(G& generator, D& discriminator, const World& world) {
  torch::optim::SGD of_generator(generator.parameters(), 0.1);
  torch::optim::SGD of_discriminator(discriminator.parameters(), 0.1);
  const Log share(world);
  std::vector<double> losses;
  for (int step = 0; step < 4; ++step) {
    const auto real = share.mine(wave({kRows, 3}, 0.7 + step));
    const auto z = share.mine(wave({kRows, 2}, 1.3 + step));
    freeze(*generator.operator->(), true);
    freeze(*discriminator.operator->(), false);
    auto d_loss = discriminator(generator(z)).pow(2).mean() -
        discriminator(real).sin().mean();
    d_loss.backward();
    EXPECT_FALSE(generator->first->weight.grad().defined());
    of_discriminator.step();
    of_discriminator.zero_grad();
    freeze(*generator.operator->(), false);
    freeze(*discriminator.operator->(), true);
    auto g_loss = -discriminator(generator(z)).pow(2).mean();
    g_loss.backward(); // through the frozen discriminator
    EXPECT_FALSE(discriminator->head->weight.grad().defined());
    of_generator.step();
    of_generator.zero_grad();
    losses.push_back(mean_over_ranks(world, d_loss.template item<double>()));
    losses.push_back(mean_over_ranks(world, g_loss.template item<double>()));
  }
  return losses;
}

TEST(Worlds, TwoNetsAreTrainedInTurn) {
  const auto make_generator = [] { return std::make_shared<Generator>(); };
  const auto g = seeded(make_generator);
  const auto d = seeded(make_network, 2);
  Plain plain_g(g);
  Plain plain_d(d);
  const auto expected = adversarial(plain_g, plain_d, World());
  for (const int size : {1, 2, 3}) {
    on_ranks(size, [&](const World& world) {
      FullyShardedDataParallel generator(
          seeded(make_generator), world, Options().units(each<nn::Linear>()));
      FullyShardedDataParallel discriminator(
          seeded(make_network, 2), world, Options().units(each<Block>()));
      const auto losses = adversarial(generator, discriminator, world);
      ASSERT_EQ(losses.size(), expected.size());
      for (size_t i = 0; i < losses.size(); ++i) {
        EXPECT_NEAR(losses[i], expected[i], 1e-6 * std::abs(expected[i]));
      }
      freeze(*generator.operator->(), false);
      freeze(*discriminator.operator->(), false);
      expect_parameters(generator, distinct_parameters(*g));
      expect_parameters(discriminator, distinct_parameters(*d));
      EXPECT_EQ(generator.memory().gathered_bytes, 0);
      EXPECT_EQ(discriminator.memory().gathered_bytes, 0);
    });
  }
}

} // namespace worlds
} // namespace fsdp::testing
