// Thousands of models: FSDP_RANDOM_COUNT of them from FSDP_RANDOM_SEED on.

#include "random/campaign.h"

#include <gtest/gtest.h>

namespace fsdp::random_models {
namespace {

TEST(RandomModelsLong, TrainAsUnsharded) {
  Campaign campaign;
  campaign.first_seed =
      static_cast<uint64_t>(from_environment("FSDP_RANDOM_SEED", 100'000));
  campaign.count =
      static_cast<int>(from_environment("FSDP_RANDOM_COUNT", 5'000));
  campaign.progress = 100;
  campaign.max_failures =
      static_cast<int>(from_environment("FSDP_RANDOM_FAILURES", 5));
  EXPECT_EQ(run(campaign), 0) << "models failed; each is described above";
}

} // namespace
} // namespace fsdp::random_models
