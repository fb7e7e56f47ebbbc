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
    for (const auto strategy : kAllStrategies) {
      SCOPED_TRACE(
          "strategy " + std::to_string(static_cast<int>(strategy)) +
          ", world size " + std::to_string(world_size));
      ASSERT_NO_THROW(run_ranks(
          world_size,
          [&](const World& world) { rank_main(world, strategy); },
          kWaitLimit));
    }
  }
}

Tensor all_rows() {
  return torch::arange(kRows);
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

TEST(UnusualBackward, LossOnGradOfABackwardThatBuiltAGraphIsRefused) {
  expect_undisturbed(
      [](Chain& chain, ShardedTensors& net) {
        const auto rows = rows_of_rank(net.world());
        const auto loss = net.call([&] { return chain.loss(rows); });
        loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
        const auto& gradient = chain.weight(1).grad();
        EXPECT_TRUE(fails_with(
            [&] { gradient.pow(2).sum(); },
            {"aten::pow", "'layer1", "create_graph", "autograd::grad"}));
        EXPECT_TRUE(
            fails_with([&] { gradient * 2; }, {"aten::mul", "create_graph"}));
        const torch::NoGradGuard no_grad;
        EXPECT_TRUE(std::isfinite(gradient.pow(2).sum().item<double>()));
        for (auto& parameter : chain.parameters()) {
          parameter.mutable_grad().reset();
        }
      },
      split_strategies());
}

TEST(UnusualBackward, LossOnGradOfOtherTensorsIsNot) {
  // No parameter of a net takes part: nothing to refuse.
  const auto chain = build_chain();
  const ShardedTensors net(chain->units());
  auto z = torch::randn({3}).requires_grad_();
  z.pow(3).sum().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  const auto gradient = std::exchange(z.mutable_grad(), Tensor());
  gradient.sum().backward();
  EXPECT_TRUE(at::allclose(z.grad(), 6 * z.detach()));
}

} // namespace
} // namespace fsdp::testing
