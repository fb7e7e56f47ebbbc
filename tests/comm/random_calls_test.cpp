#include "random_program.h"
#include "thread_world.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace fsdp::detail {
namespace {

class RandomCalls : public testing::TestWithParam<int> {};

TEST_P(RandomCalls, GiveTheResultsOfThePlainReference) {
  const auto seeds = static_cast<uint64_t>(affordable(3));
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    run_ranks(GetParam(), [&](Communicator& comm) {
      RandomProgram(comm, seed).run(500);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ranks,
    RandomCalls,
    testing::Range(1, 6),
    testing::PrintToStringParamName());

} // namespace
} // namespace fsdp::detail
