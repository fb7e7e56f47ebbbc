#include "train/training.h"

#include <cmath>
#include <memory>
#include <numbers>

namespace fsdp::testing {
namespace warmup_cosine {

namespace optim = torch::optim;

std::unique_ptr<SGD> optimizer_with(const std::vector<double>& rates) {
  ParamGroups groups;
  for (const double rate : rates) {
    groups.emplace_back(
        std::vector<at::Tensor>{torch::ones({1})},
        std::make_unique<optim::SGDOptions>(rate));
  }
  return std::make_unique<SGD>(groups, optim::SGDOptions(1.0));
}

double rate_of(const optim::Optimizer& optimizer, size_t group = 0) {
  return optimizer.param_groups()[group].options().get_lr();
}

/// The rates with which steps are taken.
std::vector<double>
rates_of(int64_t warmup, int64_t total, double min_ratio, int count) {
  const auto optimizer = optimizer_with({2.0});
  WarmupCosine schedule(*optimizer, warmup, total, min_ratio);
  std::vector<double> rates;
  for (int step = 0; step < count; ++step) {
    rates.push_back(rate_of(*optimizer));
    schedule.step();
  }
  return rates;
}

TEST(WarmupCosineSchedule, RisesLinearlyAndFallsAlongACosine) {
  const auto rates = rates_of(3, 8, 0.1, 8);
  const auto cosine = [](double progress) {
    return 2.0 * (0.1 + 0.9 * (1 + std::cos(std::numbers::pi * progress)) / 2);
  };
  const std::vector<double> expected = {
      0.5, 1.0, 1.5, 2.0, cosine(0.25), cosine(0.5), cosine(0.75), 0.2};
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_DOUBLE_EQ(rates[i], expected[i]) << i;
  }
}

TEST(WarmupCosineSchedule, StaysAtTheMinimumAfterTheEnd) {
  for (const double min_ratio : {0.0, 0.25}) {
    const auto rates = rates_of(2, 5, min_ratio, 9);
    EXPECT_GT(rates[3], 2.0 * min_ratio);
    for (size_t i = 4; i < rates.size(); ++i) {
      EXPECT_EQ(rates[i], 2.0 * min_ratio) << i;
    }
  }
}

TEST(WarmupCosineSchedule, BeginsAtThePeakWithoutWarmUp) {
  const auto rates = rates_of(0, 3, 0.0, 3);
  EXPECT_EQ(rates[0], 2.0);
  EXPECT_DOUBLE_EQ(rates[1], 1.0);
  EXPECT_EQ(rates[2], 0.0);
  EXPECT_EQ(rates_of(0, 1, 0.5, 1)[0], 1.0);
}

TEST(WarmupCosineSchedule, ScalesEachParamGroupByItsOwnRate) {
  const auto optimizer = optimizer_with({2.0, 0.4});
  WarmupCosine schedule(*optimizer, 1, 4);
  for (int step = 0; step < 5; ++step) {
    EXPECT_DOUBLE_EQ(rate_of(*optimizer, 0), 5.0 * rate_of(*optimizer, 1));
    schedule.step();
  }
}

TEST(WarmupCosineSchedule, GoesOnFromAStep) {
  const auto expected = rates_of(3, 8, 0.1, 8);
  const auto optimizer = optimizer_with({2.0});
  WarmupCosine schedule(*optimizer, 3, 8, 0.1);
  schedule.resume_at(4);
  for (size_t i = 4; i < 8; ++i) {
    EXPECT_EQ(rate_of(*optimizer), expected[i]) << i;
    schedule.step();
  }
}

TEST(WarmupCosineSchedule, RefusesWhatIsNoSchedule) {
  const auto optimizer = optimizer_with({2.0});
  const auto refused = [&](int64_t warmup, int64_t total, double min_ratio) {
    return error_of(
        [&] { WarmupCosine(*optimizer, warmup, total, min_ratio); });
  };
  EXPECT_TRUE(contains(refused(-1, 5, 0.0), "warmup_steps -1"));
  EXPECT_TRUE(contains(refused(5, 5, 0.0), "total_steps 5"));
  EXPECT_TRUE(contains(refused(0, 0, 0.0), "total_steps 0"));
  EXPECT_TRUE(contains(refused(1, 5, 1.5), "min_ratio <= 1, but got 1.5"));
  EXPECT_TRUE(contains(refused(1, 5, -0.5), "min_ratio"));
  EXPECT_EQ(rate_of(*optimizer), 2.0);
  WarmupCosine schedule(*optimizer, 1, 5);
  EXPECT_TRUE(
      contains(error_of([&] { schedule.resume_at(-1); }), "at least 0"));
}

} // namespace warmup_cosine
} // namespace fsdp::testing
