// Two nets that train together, in one graph or by turns.

#include "net_pair.h"

namespace fsdp::testing {
namespace {

using at::Tensor;

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
    for (const auto strategy : kAllStrategies) {
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
      ASSERT_NO_THROW(run_ranks(world_size, rank_main, kWaitLimit));
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

} // namespace
} // namespace fsdp::testing
