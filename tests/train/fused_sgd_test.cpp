// SGD on shards against libtorch's on whole parameters.

#include "train/training.h"

namespace fsdp::testing {
namespace fused_sgd {

namespace optim = torch::optim;
using at::Tensor;

TEST(FusedSgd, IsLibtorchs) {
  expect_same_steps<optim::SGD, SGD>(optim::SGDOptions(0.1));
}

TEST(FusedSgd, IsLibtorchsInFloat32) {
  expect_same_steps<optim::SGD, SGD>(
      optim::SGDOptions(0.1).momentum(0.9), torch::kFloat);
}

TEST(FusedSgd, WithDecayIsLibtorchs) {
  expect_same_steps<optim::SGD, SGD>(optim::SGDOptions(0.1).weight_decay(0.1));
}

TEST(FusedSgd, WithMomentumAndDampeningIsLibtorchs) {
  expect_same_steps<optim::SGD, SGD>(
      optim::SGDOptions(0.1).momentum(0.9).dampening(0.3));
}

TEST(FusedSgd, WithNesterovMomentumAndDecayIsLibtorchs) {
  expect_same_steps<optim::SGD, SGD>(
      optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01));
}

TEST(FusedSgd, KeepsNoStateWithoutMomentum) {
  FullyShardedDataParallel net(seeded(make_network));
  SGD optimizer(net.parameters(), 0.1);
  net(wave({4, 3})).sum().backward();
  optimizer.step();
  EXPECT_TRUE(optimizer.state().empty());
}

TEST(FusedSgd, AParameterThatComesLaterBeginsWithItsGradient) {
  // Dampening shows whether it is the first step of a parameter.
  const auto options = optim::SGDOptions(0.1).momentum(0.9).dampening(0.5);
  ProgramSettings settings;
  settings.options.units(each<Block>());
  expect_same_program(
      make_network,
      [&](auto& net, Log& log) {
        const auto optimizer =
            optimizer_for<optim::SGD, SGD>(net, net.parameters(), options);
        for (int step = 0; step < 4; ++step) {
          net->head->weight.requires_grad_(step >= 2);
          train_step(net, log, step);
          optimizer->step();
          optimizer->zero_grad();
          log.parameters(net);
        }
      },
      settings);
}

/// The fused kernel of some versions leaves 16-bit parameters as they are. (At
/// the end of a tensor that is no whole vector, libtorch's operators round
/// factors to 16 bits, too.)
TEST(FusedSgd, SixteenBitParametersHaveLibtorchsBits) {
  for (const auto type : {torch::kBFloat16, torch::kHalf}) {
    for (const double momentum : {0.0, 0.9}) {
      const auto options = optim::SGDOptions(0.1)
                               .momentum(momentum)
                               .nesterov(momentum > 0)
                               .weight_decay(0.01);
      Tensors plain({{8, 16}, {320}, {64}}, type);
      optim::SGD expected(plain.values, options);
      for (int step = 0; step < 3; ++step) {
        plain.assign_gradients();
        expected.step();
      }
      for (const int size : {1, 2, 4}) {
        on_ranks(size, [&](const World& world) {
          Tensors tensors({{8, 16}, {320}, {64}}, type);
          ShardedTensors net(tensors.units(), world);
          SGD optimizer(net.parameters(), options);
          for (int step = 0; step < 3; ++step) {
            net.call([&] { return tensors.loss(); }).backward();
            optimizer.step();
            optimizer.zero_grad();
          }
          const auto values = whole_values(net);
          for (size_t i = 0; i < values.size(); ++i) {
            EXPECT_TRUE(at::equal(values[i].second, plain.values[i])) << i;
          }
        });
      }
    }
  }
}

} // namespace fused_sgd
} // namespace fsdp::testing
