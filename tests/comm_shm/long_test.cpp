// Thousands of random collectives and of steps, as threads and as processes.

#include "comm/random_program.h"
#include "rank_processes.h"
#include "sharded_training.h"
#include "shm_world.h"

#include <gtest/gtest.h>

#include <random>

namespace fsdp::detail {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;

constexpr int kCalls = 5000;
constexpr int kSteps = 3000;
constexpr int kKills = 30;

class LongShm : public testing::TestWithParam<int> {};

TEST_P(LongShm, ThreadsCallAtRandom) {
  run_ranks(
      GetParam(),
      [](Communicator& comm) {
        RandomProgram(comm, 21, {.large = 2 << 20, .one_in = 200}).run(kCalls);
      },
      minutes(2));
}

TEST_P(LongShm, ProcessesCallAtRandom) {
  RankProcesses ranks(
      GetParam(), {.what = "random", .seed = 22, .count = kCalls});
  ranks.expect_done(minutes(5));
}

TEST_P(LongShm, ThreadsTrain) {
  run_ranks(
      GetParam(),
      [](Communicator& comm) {
        ShardedTraining(comm, {.seed = 23, .steps = kSteps}).run();
      },
      minutes(2));
}

TEST_P(LongShm, ProcessesTrain) {
  RankProcesses ranks(
      GetParam(), {.what = "training", .seed = 24, .count = kSteps});
  ranks.expect_done(minutes(5));
}

INSTANTIATE_TEST_SUITE_P(
    Ranks,
    LongShm,
    testing::Range(1, 9),
    testing::PrintToStringParamName());

TEST(LongShmDeaths, AreToldByAllSurvivors) {
  std::mt19937 random(25);
  for (int i = 0; i < kKills && !testing::Test::HasFailure(); ++i) {
    const int size = 2 + i % 7;
    const int dead = static_cast<int>(random() % static_cast<unsigned>(size));
    RankProcesses ranks(
        size, {.what = i % 2 == 0 ? "calls" : "training", .count = 1'000'000});
    std::this_thread::sleep_for(milliseconds(random() % 60));
    ranks[dead].kill(SIGKILL);
    const std::string part = "aborted: rank " + std::to_string(dead) + "/" +
        std::to_string(size) + " (pid " + std::to_string(ranks[dead].pid()) +
        ", dead) died; rank ";
    for (int rank = 0; rank < size; ++rank) {
      if (rank != dead) {
        const auto text = ranks[rank].answer(seconds(10));
        EXPECT_TRUE(contains(text, part)) << text;
      }
    }
  }
}

} // namespace
} // namespace fsdp::detail
