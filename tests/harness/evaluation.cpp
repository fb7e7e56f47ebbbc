#include "harness/evaluation.h"

#include "harness/mixed_precision.h"

namespace fsdp::testing {

namespace {

void expect_value(
    const at::Tensor& expected,
    const MakeModel& make,
    const ParitySettings& settings) {
  for (const int world_size : settings.world_sizes) {
    for (const auto strategy : settings.strategies) {
      SCOPED_TRACE(
          "strategy " + std::to_string(static_cast<int>(strategy)) +
          ", world size " + std::to_string(world_size));
      const auto rank_main = [&](const World& world) {
        const auto model = build(make);
        auto options = settings.options;
        options.strategy(strategy);
        ShardedTensors net(model.units, world, options);
        const torch::NoGradGuard no_grad;
        for (int i = 0; i < 2; ++i) {
          const auto value =
              net.call([&] { return model.loss(torch::arange(kRows)); });
          EXPECT_EQ(value.scalar_type(), expected.scalar_type());
          EXPECT_TRUE(at::equal(value, expected))
              << "rank " << world.rank() << ", call " << i << ": "
              << all_close(value, expected, 0, 0).message();
        }
      };
      ASSERT_NO_THROW(
          run_ranks(world_size, rank_main, std::chrono::seconds(20)));
    }
  }
}

} // namespace

void expect_same_value(const MakeModel& make, const ParitySettings& settings) {
  const torch::NoGradGuard no_grad;
  expect_value(build(make).loss(torch::arange(kRows)), make, settings);
}

void expect_same_value_in_bfloat16(
    const MakeModel& make,
    ParitySettings settings) {
  const torch::NoGradGuard no_grad;
  const auto model = build(make);
  MasterWeights weights(tensors_of(model.units), [](const std::string&) {
    return at::kBFloat16;
  });
  weights.hand_out();
  settings.options.mixed_precision({.param_dtype = at::kBFloat16});
  expect_value(model.loss(torch::arange(kRows)), make, settings);
}

} // namespace fsdp::testing
