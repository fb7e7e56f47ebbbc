// Backward passes beside the usual loss.backward(): inside open regions, in
// part, twice, into other places than .grad.

#include "harness/chain.h"

namespace fsdp::testing {
namespace {

using at::Tensor;

/// Compares the gradients that `run` leaves with those of the unsharded chain.
/// `call` opens a region when there is a net.
using Call = std::function<Tensor(const std::function<Tensor()>&)>;
using Run = std::function<
    std::vector<Tensor>(Chain&, ShardedTensors* net, const Call& call)>;

void expect_same_gradients(const Run& run) {
  const auto plain = build_chain();
  const auto plain_results =
      run(*plain, nullptr, [](const auto& loss) { return loss(); });
  const auto rank_main = [&](const World& world, Strategy strategy) {
    const auto chain = build_chain();
    ShardedTensors net(chain->units(), world, Options().strategy(strategy));
    const auto results =
        run(*chain, &net, [&](const auto& loss) { return net.call(loss); });
    for (size_t i = 0; i < plain_results.size(); ++i) {
      EXPECT_TRUE(all_close(results[i], plain_results[i], 1e-6, 1e-8)) << i;
    }
    // A step of size 1 makes gradients comparable by whole parameters.
    torch::optim::SGD optimizer(chain->parameters(), 1.0);
    optimizer.step();
    torch::NoGradGuard no_grad;
    const auto values = whole_values(net);
    for (size_t i = 0; i < values.size(); ++i) {
      const auto parameter = plain->parameters()[i];
      const auto& gradient = parameter.grad();
      EXPECT_EQ(gradient.defined(), chain->parameters()[i].grad().defined())
          << values[i].first;
      const auto expected =
          gradient.defined() ? parameter - gradient : parameter.detach();
      EXPECT_TRUE(all_close(values[i].second, expected.detach(), 1e-6, 1e-8))
          << values[i].first;
    }
  };
  for (const int world_size : {1, 2, 3, 4}) {
    for (const auto strategy :
         {Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kNoShard}) {
      SCOPED_TRACE(
          "strategy " + std::to_string(static_cast<int>(strategy)) +
          ", world size " + std::to_string(world_size));
      ASSERT_NO_THROW(run_as_threads(
          world_size,
          [&](const World& world) { rank_main(world, strategy); },
          kWaitLimit));
    }
  }
}

Tensor all_rows() {
  return torch::arange(kRows);
}

TEST(UnusualBackward, InsideAnOpenRegionGradientsAppearAtItsEnd) {
  expect_same_gradients(
      [](Chain& chain, ShardedTensors* net, const Call& call) {
        const bool split = net != nullptr &&
            net->describe().units[0].strategy != Strategy::kNoShard;
        call([&] {
          chain.loss(all_rows()).backward();
          if (split) {
            EXPECT_FALSE(chain.weight(1).grad().defined());
          }
          return Tensor();
        });
        EXPECT_TRUE(chain.weight(1).grad().defined());
        return std::vector<Tensor>{};
      });
}

TEST(UnusualBackward, SeveralInsideOneRegionAddUp) {
  expect_same_gradients([](Chain& chain, ShardedTensors*, const Call& call) {
    call([&] {
      chain.loss(all_rows()).backward();
      chain.layers[2]->forward(chain.x).pow(2).mean().backward();
      chain.loss(all_rows().slice(0, 0, 6)).backward();
      return Tensor();
    });
    return std::vector<Tensor>{};
  });
}

TEST(UnusualBackward, ForwardInNestedRegionsOfOneNet) {
  expect_same_gradients([](Chain& chain, ShardedTensors*, const Call& call) {
    const auto loss = call([&] {
      const auto y = call([&] { return chain.layers[0]->forward(chain.x); });
      EXPECT_EQ(chain.weight(0).dim(), 2); // the outer one is still open
      return call([&] { return chain.forward(y).pow(2).mean(); });
    });
    loss.backward();
    return std::vector<Tensor>{};
  });
}

TEST(UnusualBackward, GradientsOfBeforeAreAddedTo) {
  expect_same_gradients([](Chain& chain, ShardedTensors*, const Call& call) {
    for (int i = 0; i < 3; ++i) {
      call([&] { return chain.loss(all_rows()); }).backward();
    }
    return std::vector<Tensor>{};
  });
}

TEST(UnusualBackward, GradientsOfBeforeAreVisibleInARegion) {
  expect_same_gradients([](Chain& chain, ShardedTensors*, const Call& call) {
    call([&] { return chain.loss(all_rows()); }).backward();
    const auto numel = chain.weight(1).grad().numel();
    const auto loss = call([&] {
      EXPECT_EQ(chain.weight(1).grad().numel(), numel);
      chain.weight(1).mutable_grad().mul_(2);
      chain.weight(2).mutable_grad().reset();
      return chain.loss(all_rows());
    });
    loss.backward();
    return std::vector<Tensor>{};
  });
}

TEST(UnusualBackward, ZeroGradInARegionBeforeBackward) {
  expect_same_gradients([](Chain& chain, ShardedTensors*, const Call& call) {
    torch::optim::SGD optimizer(chain.parameters(), 0.1);
    call([&] { return chain.loss(all_rows()); }).backward();
    call([&] {
      optimizer.zero_grad(/*set_to_none=*/false);
      chain.loss(all_rows()).backward();
      return Tensor();
    });
    call([&] {
      optimizer.zero_grad(/*set_to_none=*/true);
      chain.loss(all_rows().slice(0, 0, 6)).backward();
      return Tensor();
    });
    return std::vector<Tensor>{};
  });
}

TEST(UnusualBackward, SecondPassOverAnotherPartOfAKeptGraph) {
  expect_same_gradients([](Chain& chain, ShardedTensors*, const Call& call) {
    Tensor middle;
    const auto loss = call([&] {
      auto y = torch::tanh(chain.layers[0]->forward(chain.x));
      middle = torch::tanh(chain.layers[1]->forward(y));
      y = torch::tanh(chain.layers[2]->forward(middle));
      return chain.layers[3]->forward(y).pow(2).mean();
    });
    middle.pow(2).sum().backward({}, /*retain_graph=*/true);
    auto gradients =
        torch::autograd::grad({loss}, {middle}, {}, /*retain_graph=*/true);
    loss.backward({}, /*retain_graph=*/true);
    (loss * 2).backward({}, /*retain_graph=*/true);
    middle.sum().backward();
    return gradients;
  });
}

TEST(UnusualBackward, IntoChosenInputsOnly) {
  expect_same_gradients([](Chain& chain, ShardedTensors*, const Call& call) {
    const auto loss = call([&] { return chain.loss(all_rows()); });
    loss.backward(
        {}, std::nullopt, false, std::vector<Tensor>{chain.weight(2)});
    EXPECT_FALSE(chain.weight(1).grad().defined());
    return std::vector<Tensor>{};
  });
}

TEST(UnusualBackward, GradReturnsWholeAndLocalGradients) {
  expect_same_gradients([](Chain& chain, ShardedTensors*, const Call& call) {
    const auto loss = call([&] { return chain.loss(all_rows()); });
    auto gradients = torch::autograd::grad(
        {loss}, {chain.weight(1), chain.bias(3), chain.weight(2)});
    EXPECT_EQ(gradients[0].sizes(), at::IntArrayRef({15, 15}));
    EXPECT_FALSE(chain.weight(1).grad().defined());
    return gradients;
  });
}

TEST(UnusualBackward, GradReturnsTheGradientOfThisRanksRows) {
  run_as_threads(
      3,
      [](const World& world) {
        const auto chain = build_chain();
        const auto plain = build_chain();
        ShardedTensors net(chain->units(), world);
        const auto rows = rows_of_rank(world);
        const auto loss = net.call([&] { return chain->loss(rows); });
        const auto gradient =
            torch::autograd::grad({loss}, {chain->weight(1)})[0];
        const auto expected =
            torch::autograd::grad({plain->loss(rows)}, {plain->weight(1)})[0];
        EXPECT_TRUE(all_close(gradient, expected, 1e-6, 1e-8));
      },
      kWaitLimit);
}

TEST(UnusualBackward, PenaltyOnGradOfParametersInARegion) {
  expect_same_gradients([](Chain& chain, ShardedTensors*, const Call& call) {
    const auto loss = call([&] {
      const auto inner = chain.loss(all_rows());
      const auto gradients = torch::autograd::grad(
          {inner},
          {chain.weight(1), chain.weight(3)},
          {},
          /*retain_graph=*/true,
          /*create_graph=*/true);
      return inner + gradients[0].pow(2).sum() + gradients[1].pow(2).sum();
    });
    loss.backward();
    return std::vector<Tensor>{};
  });
}

TEST(UnusualBackward, GraphOfGradientsInGradIsRefused) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        const auto rows = rows_of_rank(net.world());
        const auto loss = net.call([&] { return chain.loss(rows); });
        EXPECT_TRUE(fails_with(
            [&] {
              loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
            },
            {"create_graph", "autograd::grad", "in a region"}));
        for (const auto& parameter : chain.parameters()) {
          EXPECT_FALSE(parameter.grad().defined());
        }
      },
      split_strategies());
}

TEST(UnusualBackward, GraphOfGradientsOfOtherTensorsIsNot) {
  // No parameter of a net takes part: nothing to refuse.
  const auto chain = build_chain();
  const ShardedTensors net(chain->units());
  auto z = torch::randn({3}).requires_grad_();
  z.pow(3).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  const auto gradient = std::exchange(z.mutable_grad(), Tensor());
  gradient.sum().backward();
  EXPECT_TRUE(at::allclose(z.grad(), 6 * z.detach()));
}

TEST(UnusualBackward, SparseGradientsBecomeDense) {
  ParitySettings settings;
  settings.optimizer = Optimizer::kSgd;
  const auto make = [] {
    const auto weight = torch::randn({10, 16}).requires_grad_();
    return TestModel{
        {{"embedding", {{"embedding.weight", weight}}}},
        [weight](const Tensor& rows) {
          // The reference is dense: libtorch's SGD has no sparse momentum.
          const bool sparse =
              weight.key_set().has(c10::DispatchKey::DeferredInit);
          const auto y = at::embedding(weight, rows % 10, -1, false, sparse);
          return y.pow(2).mean() + 0.01 * y.mean();
        },
        {}};
  };
  expect_same_training(make, settings);
}

} // namespace
} // namespace fsdp::testing
