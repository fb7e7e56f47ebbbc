#include "launch/job_environment.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace fsdp::detail {
namespace {

using Environment = std::vector<std::string>;

JobEnvironment job_of_four() {
  JobEnvironment job;
  job.job = "job-1";
  job.ranks = 4;
  job.master_port = 2345;
  job.default_threads = 3;
  return job;
}

bool contains(const Environment& environment, const std::string& entry) {
  return std::count(environment.begin(), environment.end(), entry) == 1;
}

bool sets(const Environment& environment, const std::string& name) {
  return std::any_of(
      environment.begin(), environment.end(), [&](const std::string& entry) {
        return entry.starts_with(name + "=");
      });
}

TEST(JobEnvironment, TellsARankWhoItIs) {
  const Environment environment = rank_environment({}, job_of_four(), 2);
  for (const char* entry :
       {"RANK=2",
        "LOCAL_RANK=2",
        "WORLD_SIZE=4",
        "LOCAL_WORLD_SIZE=4",
        "GROUP_RANK=0",
        "MASTER_ADDR=127.0.0.1",
        "MASTER_PORT=2345",
        "LIBFSDP_JOB=job-1",
        "OMP_NUM_THREADS=3"}) {
    EXPECT_TRUE(contains(environment, entry)) << entry;
  }
  EXPECT_FALSE(sets(environment, "LIBFSDP_BACKEND"));
  EXPECT_FALSE(sets(environment, "LIBFSDP_TIMEOUT"));
}

TEST(JobEnvironment, KeepsWhatIsInherited) {
  const Environment environment =
      rank_environment({"A=b=c", "EMPTY="}, job_of_four(), 0);
  EXPECT_TRUE(contains(environment, "A=b=c"));
  EXPECT_TRUE(contains(environment, "EMPTY="));
}

TEST(JobEnvironment, ReplacesWhatSpeaksOfAnotherJob) {
  const Environment environment = rank_environment(
      {"RANK=7", "MASTER_PORT=1", "TORCHELASTIC_RESTART_COUNT=3"},
      job_of_four(),
      1);
  EXPECT_TRUE(contains(environment, "RANK=1"));
  EXPECT_FALSE(contains(environment, "RANK=7"));
  EXPECT_TRUE(contains(environment, "MASTER_PORT=2345"));
  EXPECT_FALSE(sets(environment, "TORCHELASTIC_RESTART_COUNT"));
}

TEST(JobEnvironment, ThreadsOfTheUserWinUnlessTheyAreAskedFor) {
  JobEnvironment job = job_of_four();
  EXPECT_TRUE(contains(
      rank_environment({"OMP_NUM_THREADS=9"}, job, 0), "OMP_NUM_THREADS=9"));
  job.threads = 5;
  EXPECT_TRUE(contains(
      rank_environment({"OMP_NUM_THREADS=9"}, job, 0), "OMP_NUM_THREADS=5"));
}

TEST(JobEnvironment, PassesBackendAndTimeoutOn) {
  JobEnvironment job = job_of_four();
  job.backend = "gloo";
  job.timeout_s = "2.5";
  const Environment environment =
      rank_environment({"LIBFSDP_BACKEND=shm"}, job, 0);
  EXPECT_TRUE(contains(environment, "LIBFSDP_BACKEND=gloo"));
  EXPECT_TRUE(contains(environment, "LIBFSDP_TIMEOUT=2.5"));
}

TEST(JobEnvironment, EveryJobHasANameOfItsOwn) {
  std::set<std::string> names;
  for (int i = 0; i < 100; ++i) {
    names.insert(new_job_name());
  }
  EXPECT_EQ(names.size(), 100u);
}

} // namespace
} // namespace fsdp::detail
