// Models drawn at random train sharded as they train unsharded.
//
//   test_random_models --replay "SPEC"    runs one model
//   FSDP_RANDOM_REPLAY="SPEC"             the same
//   FSDP_RANDOM_SEED=N                    other models

#include "harness/job.h"
#include "random/campaign.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <exception>
#include <iostream>
#include <string_view>

namespace fsdp::random_models {
namespace {

constexpr int kModelsEach = 10;
constexpr int64_t kFirstSeed = 20'000;

class RandomModels : public ::testing::TestWithParam<int> {};

TEST_P(RandomModels, TrainAsUnsharded) {
  Campaign campaign;
  campaign.first_seed = static_cast<uint64_t>(
      from_environment("FSDP_RANDOM_SEED", kFirstSeed) +
      GetParam() * kModelsEach);
  campaign.count = kModelsEach;
  std::cout << "seeds from " << campaign.first_seed << std::endl;
  EXPECT_EQ(run(campaign), 0) << "models failed; each is described above";
}

INSTANTIATE_TEST_SUITE_P(Tens, RandomModels, ::testing::Range(0, 5));

int replay_text(const char* text) {
  try {
    auto spec = parse(text);
    normalize(spec);
    const auto failure = replay(spec);
    std::cout << (failure.empty() ? "passed" : failure) << std::endl;
    return failure.empty() ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 2;
  }
}

} // namespace
} // namespace fsdp::random_models

int main(int argc, char** argv) {
  using fsdp::random_models::replay_text;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::string_view(argv[i]) == "--replay") {
      return replay_text(argv[i + 1]);
    }
  }
  if (const char* text = std::getenv("FSDP_RANDOM_REPLAY")) {
    return replay_text(text);
  }
  return fsdp::testing::run_all_tests(argc, argv);
}
