#include "train/training.h"

#include <cmath>
#include <limits>

namespace fsdp::testing {
namespace mean_of_ranks {

/// Sums of these in another order or precision have other bits.
double number_of(int rank) {
  return std::pow(-10.0, rank * 5) / 3.0;
}

TEST(MeanOverRanks, IsSummedInRankOrderInFloat64) {
  for (const int size : {1, 2, 3, 4}) {
    on_ranks(size, [](const World& world) {
      FullyShardedDataParallel net(seeded(make_network), world);
      double sum = 0.0;
      for (int rank = 0; rank < world.size(); ++rank) {
        sum += number_of(rank);
      }
      EXPECT_EQ(
          net.mean_over_ranks(number_of(world.rank())), sum / world.size());
    });
  }
}

TEST(MeanOverRanks, TakesTensorsOfOneElement) {
  on_ranks(2, [](const World& world) {
    FullyShardedDataParallel net(seeded(make_network), world);
    const auto loss =
        net(torch::full({1, 3}, static_cast<float>(world.rank()))).sum();
    double sum = 0.0;
    for (const float rank : {0.0F, 1.0F}) {
      sum += seeded(make_network)
                 ->forward(torch::full({1, 3}, rank))
                 .sum()
                 .item<double>();
    }
    EXPECT_NEAR(net.mean_over_ranks(loss), sum / 2, 1e-6);
    EXPECT_EQ(net.mean_over_ranks(torch::tensor({world.rank()})), 0.5);
    EXPECT_EQ(
        net.mean_over_ranks(torch::tensor(world.rank(), torch::kBFloat16)),
        0.5);
  });
}

TEST(MeanOverRanks, PassesNanAndInfinityThrough) {
  on_ranks(3, [](const World& world) {
    FullyShardedDataParallel net(seeded(make_network), world);
    const auto special = [&](double value) {
      return net.mean_over_ranks(world.rank() == 1 ? value : 1.0);
    };
    EXPECT_TRUE(std::isnan(special(std::nan(""))));
    EXPECT_EQ(
        special(std::numeric_limits<double>::infinity()),
        std::numeric_limits<double>::infinity());
  });
}

TEST(MeanOverRanks, RefusesOtherTensors) {
  FullyShardedDataParallel net(seeded(make_network));
  const auto error = error_of([&] { net.mean_over_ranks(torch::ones({2})); });
  EXPECT_TRUE(contains(error, "one element")) << error;
  EXPECT_TRUE(contains(error, "[2]")) << error;
  EXPECT_TRUE(contains(
      error_of([&] { net.mean_over_ranks(at::Tensor()); }), "undefined"));
}

} // namespace mean_of_ranks
} // namespace fsdp::testing
