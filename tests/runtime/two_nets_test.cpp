// Several nets in one program: a backward pass opens those that it involves.

#include "harness/chain.h"

namespace fsdp::testing {
namespace {

using at::Tensor;

/// Two nets, sharded or plain.
struct Pair {
  explicit Pair(const World* world, Strategy strategy = Strategy::kFullShard)
      : first(build_chain(2)),
        second(build_chain(3)) {
    if (world != nullptr) {
      const auto options = Options().strategy(strategy);
      first_net =
          std::make_unique<ShardedTensors>(first->units(), *world, options);
      second_net =
          std::make_unique<ShardedTensors>(second->units(), *world, options);
    }
  }

  template <class F>
  static Tensor call(const std::unique_ptr<ShardedTensors>& net, F&& function) {
    return net ? net->call(function) : function();
  }
  template <class F>
  Tensor call_first(F&& function) {
    return call(first_net, std::forward<F>(function));
  }
  template <class F>
  Tensor call_second(F&& function) {
    return call(second_net, std::forward<F>(function));
  }

  /// Whole parameters of both.
  std::vector<Tensor> parameters() const {
    std::vector<Tensor> values;
    for (const auto* chain : {first.get(), second.get()}) {
      const auto& net = chain == first.get() ? first_net : second_net;
      if (net) {
        for (auto& [name, value] : whole_values(*net)) {
          values.push_back(value);
        }
      } else {
        for (const auto& value : chain->parameters()) {
          values.push_back(value.detach().clone());
        }
      }
    }
    return values;
  }

  std::shared_ptr<Chain> first;
  std::shared_ptr<Chain> second;
  std::unique_ptr<ShardedTensors> first_net;
  std::unique_ptr<ShardedTensors> second_net;
};

struct Outcome {
  std::vector<double> losses;
  std::vector<Tensor> parameters;
};
using Train = std::function<Outcome(Pair& pair)>;

/// All ranks take the same rows, so that losses that are no means agree too.
void expect_same_outcome(const Train& train) {
  Pair plain(nullptr);
  const auto expected = train(plain);
  for (const int world_size : {1, 2, 3, 4}) {
    for (const auto strategy :
         {Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kNoShard}) {
      SCOPED_TRACE("world size " + std::to_string(world_size));
      const auto rank_main = [&](const World& world) {
        Pair pair(&world, strategy);
        const auto actual = train(pair);
        for (size_t i = 0; i < expected.losses.size(); ++i) {
          EXPECT_NEAR(
              actual.losses[i],
              expected.losses[i],
              1e-6 * std::abs(expected.losses[i]));
        }
        for (size_t i = 0; i < expected.parameters.size(); ++i) {
          EXPECT_TRUE(all_close(
              actual.parameters[i], expected.parameters[i], 1e-6, 1e-8))
              << i;
        }
      };
      ASSERT_NO_THROW(run_as_threads(world_size, rank_main, kWaitLimit));
    }
  }
}

torch::optim::AdamW adam(const std::vector<Tensor>& parameters) {
  return torch::optim::AdamW(
      parameters, torch::optim::AdamWOptions(1e-2).eps(1e-4));
}

TEST(TwoNets, AdversariesTrainInNestedRegions) {
  expect_same_outcome([](Pair& pair) {
    auto& generator = *pair.first;
    auto& critic = *pair.second;
    auto of_generator = adam(generator.parameters());
    auto of_critic = adam(critic.parameters());
    Outcome outcome;
    for (int step = 0; step < 3; ++step) {
      const auto fake =
          pair.call_first([&] { return generator.forward(generator.x); });
      const auto critic_loss = pair.call_second([&] {
        return critic.forward(fake.detach()).pow(2).mean() +
            (critic.forward(critic.x) - 1).pow(2).mean();
      });
      critic_loss.backward();
      EXPECT_FALSE(generator.weight(0).grad().defined());
      of_critic.step();
      of_critic.zero_grad();
      const auto generator_loss = pair.call_first([&] {
        const auto image = generator.forward(generator.x);
        const auto verdict =
            pair.call_second([&] { return critic.forward(image); });
        return (verdict - 1).pow(2).mean() + 0.1 * image.abs().sum();
      });
      generator_loss.backward();
      EXPECT_TRUE(critic.weight(0).grad().defined());
      of_generator.step();
      of_generator.zero_grad();
      of_critic.zero_grad();
      outcome.losses.push_back(critic_loss.item<double>());
      outcome.losses.push_back(generator_loss.item<double>());
    }
    outcome.parameters = pair.parameters();
    return outcome;
  });
}

TEST(TwoNets, OneOperatorReadsWeightsOfBoth) {
  expect_same_outcome([](Pair& pair) {
    auto optimizer = adam([&] {
      auto parameters = pair.first->parameters();
      for (const auto& each : pair.second->parameters()) {
        parameters.push_back(each);
      }
      return parameters;
    }());
    Outcome outcome;
    for (int step = 0; step < 3; ++step) {
      auto& a = *pair.first;
      auto& b = *pair.second;
      const auto loss = pair.call_first([&] {
        return pair.call_second([&] {
          const auto joined =
              at::cat({b.weight(2), a.weight(0), a.bias(1).unsqueeze(0)});
          return joined.pow(2).sum() + a.weight(1).mm(b.weight(0)).sum() +
              torch::linear(a.x, b.weight(1), a.bias(0)).pow(2).sum();
        });
      });
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      outcome.losses.push_back(loss.item<double>());
    }
    outcome.parameters = pair.parameters();
    return outcome;
  });
}

TEST(TwoNets, OneLossOverTwoRootsAndOneOptimizer) {
  expect_same_outcome([](Pair& pair) {
    auto parameters = pair.first->parameters();
    for (const auto& each : pair.second->parameters()) {
      parameters.push_back(each);
    }
    auto optimizer = adam(parameters);
    Outcome outcome;
    for (int step = 0; step < 3; ++step) {
      const auto a =
          pair.call_first([&] { return pair.first->forward(pair.first->x); });
      const auto b = pair.call_second(
          [&] { return pair.second->forward(pair.second->x); });
      const auto loss = (a * b).sum() + a.pow(2).mean();
      loss.backward();
      optimizer.step();
      optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
      outcome.losses.push_back(loss.item<double>());
    }
    outcome.parameters = pair.parameters();
    return outcome;
  });
}

/// Whether a weight shows its shard.
bool is_sharded(const Tensor& weight) {
  return weight.dim() == 1;
}

TEST(TwoNets, UnrelatedBackwardOpensNoRegionAndWaitsForNobody) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        if (net.world().rank() != net.world().size() - 1) {
          return;
        }
        const auto gathers = net.gathers();
        bool sharded = false;
        auto z = torch::randn({3}).requires_grad_();
        auto y = z.pow(2);
        y.register_hook(
            [&](const Tensor&) { sharded = is_sharded(chain.weight(0)); });
        y.sum().backward();
        EXPECT_TRUE(sharded);
        EXPECT_TRUE(at::equal(z.grad(), 2 * z.detach()));
        EXPECT_EQ(net.gathers(), gathers);
        EXPECT_FALSE(chain.weight(0).grad().defined());
      },
      split_strategies());
}

TEST(TwoNets, BackwardOpensOnlyTheNetThatItReaches) {
  run_as_threads(
      2,
      [](const World& world) {
        Pair pair(&world);
        const auto fake =
            pair.call_first([&] { return pair.first->forward(pair.first->x); });
        const auto loss = pair.call_second([&] {
          auto y = pair.second->forward(fake.detach());
          y.register_hook([&](const Tensor&) {
            EXPECT_TRUE(is_sharded(pair.first->weight(0)));
            EXPECT_FALSE(is_sharded(pair.second->weight(0)));
          });
          return y.pow(2).mean();
        });
        const auto gathers = pair.first_net->gathers();
        loss.backward();
        EXPECT_EQ(pair.first_net->gathers(), gathers);
        EXPECT_FALSE(pair.first->weight(0).grad().defined());
        EXPECT_TRUE(pair.second->weight(0).grad().defined());
      },
      kWaitLimit);
}

TEST(TwoNets, BackwardInAHookMayInvolveAnotherNet) {
  expect_same_outcome([](Pair& pair) {
    const auto loss = pair.call_first([&] {
      auto y = pair.first->forward(pair.first->x);
      y.register_hook([&pair](const Tensor&) {
        const torch::AutoGradMode grad(true);
        pair.call_second(
                [&] { return pair.second->loss(torch::arange(kRows)); })
            .backward();
      });
      return y.pow(2).mean();
    });
    loss.backward();
    auto optimizer_a = adam(pair.first->parameters());
    auto optimizer_b = adam(pair.second->parameters());
    optimizer_a.step();
    optimizer_b.step();
    Outcome outcome{{loss.item<double>()}, pair.parameters()};
    return outcome;
  });
}

TEST(TwoNets, RanksMayUseDifferentNets) {
  // Rank 0 trains the first with one group of ranks, rank 1 the second with
  // another: nobody waits for a net that it has no part in.
  run_as_threads(
      4,
      [](const World& world) {
        const auto half = world.split(world.rank() % 2, world.rank());
        const auto chain = build_chain(world.rank() % 2 == 0 ? 2 : 3);
        const auto plain = build_chain(world.rank() % 2 == 0 ? 2 : 3);
        ShardedTensors net(chain->units(), half);
        const auto rows = torch::arange(kRows);
        auto optimizer = adam(chain->parameters());
        auto expected = adam(plain->parameters());
        for (int step = 0; step < 3; ++step) {
          net.call([&] { return chain->loss(rows); }).backward();
          plain->loss(rows).backward();
          optimizer.step();
          expected.step();
          optimizer.zero_grad();
          expected.zero_grad();
        }
        const auto values = whole_values(net);
        for (size_t i = 0; i < values.size(); ++i) {
          EXPECT_TRUE(all_close(
              values[i].second, plain->parameters()[i].detach(), 1e-6, 1e-8));
        }
      },
      kWaitLimit);
}

} // namespace
} // namespace fsdp::testing
