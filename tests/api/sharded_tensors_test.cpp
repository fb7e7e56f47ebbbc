// Tensors without a module, and modules without tensors.

#include "api/program.h"

#include <fsdp/fsdp.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

namespace fsdp::testing {
namespace tensors {

namespace nn = torch::nn;
using at::Tensor;

struct TwoWeights {
  Tensor first = torch::randn({3, 5}).requires_grad_();
  Tensor second = torch::randn({5, 2}).requires_grad_();
  Tensor forward(const Tensor& x) const {
    return torch::tanh(x.matmul(first)).matmul(second);
  }
  ShardedTensors::NamedUnits units() const {
    return {{"front", {{"first", first}}}, {"back", {{"second", second}}}};
  }
};

TEST(ShardedTensors, TrainAStructOfTensors) {
  auto plain = seeded([] { return TwoWeights(); });
  torch::optim::SGD reference({plain.first, plain.second}, 0.1);
  const auto x = wave({4, 3});
  for (int step = 0; step < 3; ++step) {
    reference.zero_grad();
    plain.forward(x).pow(2).mean().backward();
    reference.step();
  }
  on_ranks(3, [&](const World& world) {
    auto weights = seeded([] { return TwoWeights(); });
    ShardedTensors net(weights.units(), world);
    EXPECT_TRUE(net.parameters()[1].is_same(weights.second));
    EXPECT_EQ(net.named_parameters()[0].first, "first");
    EXPECT_EQ(net.describe().units[1].name, "back");
    torch::optim::SGD optimizer(net.parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      net.call([&] { return weights.forward(x); }).pow(2).mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    const auto whole = net.whole_parameters();
    EXPECT_TRUE(all_close(weights.first, plain.first, 1e-6, 1e-8));
    EXPECT_TRUE(all_close(weights.second, plain.second, 1e-6, 1e-8));
  });
}

TEST(ShardedTensors, UseOutsideOfACallIsRefusedByName) {
  on_ranks(2, [](const World& world) {
    auto weights = seeded([] { return TwoWeights(); });
    ShardedTensors net(weights.units(), world);
    const auto error = error_of([&] { weights.forward(wave({4, 3})); });
    EXPECT_TRUE(contains(error, "'first'")) << error;
    EXPECT_TRUE(contains(error, "net.region()")) << error;
  });
}

TEST(ShardedTensors, PoliciesAreForModules) {
  auto weights = seeded([] { return TwoWeights(); });
  for (const auto& options :
       {Options().units(named("front")), Options().ignore({"first"})}) {
    const auto error = error_of(
        [&] { ShardedTensors net(weights.units(), World(), options); });
    EXPECT_TRUE(contains(error, "ShardedTensors is given its units")) << error;
  }
  EXPECT_EQ(weights.first.dim(), 2);
}

TEST(ShardedTensors, OneNameForTwoTensorsIsRefused) {
  auto weights = seeded([] { return TwoWeights(); });
  const auto error = error_of([&] {
    ShardedTensors net(
        {{"unit", {{"w", weights.first}, {"w", weights.second}}}});
  });
  EXPECT_TRUE(contains(error, "'w'")) << error;
  const auto undefined = error_of([&] {
    ShardedTensors net({{"unit", {{"nothing", Tensor()}}}});
  });
  EXPECT_TRUE(contains(undefined, "'nothing'")) << undefined;
}

TEST(ShardedTensors, AModuleWithoutParametersIsANetToo) {
  on_ranks(3, [](const World& world) {
    FullyShardedDataParallel net(nn::ReLU(), world);
    const auto x = wave({4, 3}).requires_grad_();
    const auto y = net(x);
    EXPECT_TRUE(at::equal(y, torch::relu(x)));
    y.sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), (x > 0).to(x.scalar_type())));
    EXPECT_TRUE(net.parameters().empty());
    EXPECT_EQ(net.clip_grad_norm_(1.0), 0.0);
    EXPECT_EQ(net.memory().whole_model_bytes, 0);
    net.unshard();
    net.reshard();
    const auto module = unwrap(std::move(net));
    EXPECT_TRUE(at::equal(module->forward(x), torch::relu(x)));
  });
}

TEST(ShardedTensors, ANetWithIgnoredParametersOnlyWorks) {
  on_ranks(2, [](const World& world) {
    const auto make = [] { return nn::Linear(3, 2); };
    FullyShardedDataParallel net(
        seeded(make), world, Options().ignore({"weight", "bias"}));
    const auto x = wave({4, 3}, 0.5 + world.rank());
    net(x).sum().backward();
    net.average_ignored_gradients();
    EXPECT_TRUE(at::equal(net->bias.grad(), torch::full({2}, 4.0F)));
    const double norm = nn::utils::clip_grad_norm_(net->parameters(), 1e9);
    EXPECT_NEAR(net.clip_grad_norm_(1e9), norm, 1e-6 * norm);
  });
}

TEST(Worlds, ANullCommunicatorIsRefused) {
  const auto error = error_of([] { World world(nullptr); });
  EXPECT_TRUE(contains(error, "communicator is null")) << error;
  EXPECT_EQ(World().size(), 1);
  EXPECT_EQ(World().rank(), 0);
  EXPECT_EQ(thread_worlds(3)[2].rank(), 2);
}

} // namespace tensors
} // namespace fsdp::testing
