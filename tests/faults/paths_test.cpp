// Ranks that take different paths through a model, or through its batches.

#include "faults/job.h"

#include <gtest/gtest.h>

#include <string>

namespace fsdp::testing {
namespace {

const std::string kAgrees = "agrees with unsharded training";
const std::string kNotHere = "not arrived: ranks? [0-9]|gone without this call";

TEST(IdleRank, NeedsNoCallOverSharedMemory) {
  expect_job(
      {.backend = "shm", .arguments = {"idle", "idle=skip"}}, 0, kAgrees);
}

TEST(IdleRank, IsAnErrorThatNamesUnitAndRankOverGloo) {
  expect_job(
      {.backend = "gloo",
       .timeout = std::chrono::seconds(5),
       .arguments = {"idle", "idle=skip"}},
      kStatusOfFailed,
      "rank 1/2 calls all_gather of unit '\\(root\\)'.*"
      "rank 0/2 calls all_gather of unit 'encoder'");
}

TEST(IdleRank, TakesPartWithAnEmptyBatchOverGloo) {
  expect_job(
      {.backend = "gloo", .arguments = {"idle", "idle=empty batch"}},
      0,
      kAgrees);
}

TEST(ParallelBranches, RunInOneOrderWhateverTheirAddresses) {
  expect_job(
      {.backend = "gloo",
       .arguments = {"branches"},
       .variables = {{"LIBFSDP_DEBUG", "1"}}}, // compares all calls
      0,
      kAgrees);
}

TEST(UnequalBatches, AreAnErrorOnAllRanks) {
  expect_job(
      {.backend = "shm",
       .timeout = std::chrono::milliseconds(1500),
       .arguments = {"batches", "then=evaluate"}},
      kStatusOfFailed,
      kNotHere);
}

} // namespace
} // namespace fsdp::testing
