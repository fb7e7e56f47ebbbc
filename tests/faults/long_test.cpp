// What takes too long, or differs too little from other tests, to run each
// time.

#include "faults/job.h"

#include <gtest/gtest.h>

#include <string>

#include <sys/sysinfo.h>

namespace fsdp::testing {
namespace {

const std::string kAgree = "agrees with unsharded training";
const std::string kNotHere = "not arrived: ranks? [0-9]|gone without this call";

TEST(IdleRankLong, NeedsNoCallOverSharedMemory) {
  expect_job(
      {.backend = "shm", .size = 3, .arguments = {"idle", "idle=skip"}},
      0,
      kAgree);
}

TEST(IdleRankLong, TakesPartWithAnEmptyBatchOverSharedMemory) {
  expect_job(
      {.backend = "shm", .size = 3, .arguments = {"idle", "idle=empty batch"}},
      0,
      kAgree);
}

TEST(ParallelBranchesLong, RunInOneOrderWhateverTheirAddresses) {
  for (const int size : {2, 3, 4}) {
    expect_job(
        {.backend = "shm", .size = size, .arguments = {"branches"}}, 0, kAgree);
    expect_job(
        {.backend = "gloo", .size = size, .arguments = {"branches"}},
        0,
        kAgree);
  }
}

TEST(UnequalBatchesLong, AreAnErrorOnAllRanks) {
  for (const int size : {2, 3}) {
    for (const auto* backend : {"shm", "gloo"}) {
      for (const auto* then : {"evaluate", "shutdown"}) {
        expect_job(
            {.backend = backend,
             .size = size,
             .timeout = std::chrono::seconds(2),
             .arguments = {"batches", std::string("then=") + then}},
            kStatusOfFailed,
            kNotHere);
      }
    }
  }
}

TEST(SharedMemoryLong, IsRefusedToAModelThatIsTooLargeForTheHost) {
  struct sysinfo info {};
  ASSERT_EQ(::sysinfo(&info), 0);
  const auto megabytes = (info.totalram * info.mem_unit) >> 20;
  expect_job(
      {.backend = "shm",
       .timeout = std::chrono::minutes(2),
       .arguments =
           {"construct", "megabytes=" + std::to_string(megabytes * 11 / 10)}},
      kStatusOfFailed,
      "construction: .* wants .* more of shared memory, but .* are available");
}

} // namespace
} // namespace fsdp::testing
