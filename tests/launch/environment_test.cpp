#include "launch/environment.h"

#include "launch/launcher_variables.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace fsdp::testing {
namespace {

using detail::Launcher;

void expect_place(const Environment& environment, int rank, int size) {
  EXPECT_EQ(environment.rank, rank);
  EXPECT_EQ(environment.size, size);
}

void expect_local_place(const Environment& environment, int rank, int size) {
  EXPECT_EQ(environment.local_rank, rank);
  EXPECT_EQ(environment.local_size, size);
}

void expect_store(
    const Environment& environment,
    const std::string& text,
    bool is_served = false) {
  ASSERT_TRUE(environment.store.has_value());
  EXPECT_EQ(environment.store->text(), text);
  EXPECT_EQ(environment.store_is_served, is_served);
}

TEST(Environment, NothingIsAWorldOfOne) {
  const auto environment = read({});
  EXPECT_EQ(environment.launcher, Launcher::kNone);
  expect_place(environment, 0, 1);
  EXPECT_FALSE(environment.store.has_value());
  EXPECT_EQ(environment.note, "");
}

TEST(Environment, Torchrun) {
  const auto environment = read(kTorchrun);
  EXPECT_EQ(environment.launcher, Launcher::kTorchrun);
  expect_place(environment, 5, 8);
  expect_local_place(environment, 1, 4);
  expect_store(environment, "tcp://node1:29511", true);
  EXPECT_EQ(environment.rank_variable, "RANK");
}

TEST(Environment, TorchrunWithoutAStoreOfTheAgent) {
  const auto environment =
      read(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}}));
  expect_store(environment, "tcp://node1:29511", false);
}

TEST(Environment, ARestartOfTorchrunIsAnotherJob) {
  EXPECT_NE(
      read(kTorchrun).job,
      read(with(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "3"}})).job);
}

TEST(Environment, FsdpRun) {
  const auto environment = read(
      {{"RANK", "1"},
       {"WORLD_SIZE", "2"},
       {"LOCAL_RANK", "1"},
       {"LOCAL_WORLD_SIZE", "2"},
       {"MASTER_ADDR", "127.0.0.1"},
       {"MASTER_PORT", "41001"},
       {"LIBFSDP_JOB", "77-1"}});
  EXPECT_EQ(environment.launcher, Launcher::kFsdpRun);
  expect_place(environment, 1, 2);
  EXPECT_TRUE(environment.on_one_host());
  EXPECT_EQ(environment.job, "77-1");
}

TEST(Environment, VariablesSetByHand) {
  const auto environment = read(
      {{"RANK", "0"},
       {"WORLD_SIZE", "2"},
       {"MASTER_ADDR", "fd00::2"},
       {"MASTER_PORT", "5000"}});
  EXPECT_EQ(environment.launcher, Launcher::kVariables);
  EXPECT_FALSE(environment.local_rank.has_value());
  EXPECT_FALSE(environment.on_one_host());
  expect_store(environment, "tcp://[fd00::2]:5000");
}

TEST(Environment, ALocalRankWithoutALocalSizeTellsNothing) {
  const auto environment =
      read({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}});
  EXPECT_FALSE(environment.local_rank.has_value());
}

TEST(Environment, AnEmptyVariableIsNotSet) {
  const auto environment =
      read({{"RANK", ""}, {"WORLD_SIZE", ""}, {"MASTER_PORT", ""}});
  EXPECT_EQ(environment.launcher, Launcher::kNone);
}

TEST(Environment, OpenMpi) {
  const auto environment = read(kOpenMpi);
  EXPECT_EQ(environment.launcher, Launcher::kOpenMpi);
  expect_place(environment, 1, 2);
  expect_local_place(environment, 1, 2);
  EXPECT_FALSE(environment.store.has_value());
  EXPECT_EQ(environment.job, "865992705|865992705");
  EXPECT_EQ(environment.rank_variable, "OMPI_COMM_WORLD_RANK");
}

TEST(Environment, Mpich) {
  const auto environment = read(kMpich);
  EXPECT_EQ(environment.launcher, Launcher::kMpich);
  expect_place(environment, 2, 3);
  expect_local_place(environment, 2, 3);
  EXPECT_EQ(environment.job, "");
  EXPECT_EQ(environment.rank_variable, "PMI_RANK");
}

TEST(Environment, IntelMpi) {
  const auto environment = read(with(kMpich, {{"I_MPI_MPIRUN", "mpirun"}}));
  EXPECT_EQ(environment.launcher, Launcher::kIntelMpi);
  expect_place(environment, 2, 3);
}

TEST(Environment, MpiWithAnAddress) {
  const auto environment =
      read(with(kMpich, {{"MASTER_ADDR", "node1"}, {"MASTER_PORT", "29500"}}));
  expect_store(environment, "tcp://node1:29500");
}

TEST(Environment, MpiOnOneHostNeedsNoAddress) {
  expect_store(
      read(with(kMpich, {{"MASTER_PORT", "29500"}})), "tcp://127.0.0.1:29500");
}

TEST(Environment, TheTextForAMissingStoreSaysWhatToSet) {
  const auto text = detail::missing_store_text(
      read(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}})));
  for (const auto* part :
       {"started by Open MPI",
        "2 ranks",
        "MASTER_ADDR",
        "MASTER_PORT",
        "mpirun -x"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

TEST(Environment, PmixAloneDoesNotTellTheSize) {
  expect_refused({{"PMIX_RANK", "0"}}, {"PMIX_RANK=\"0\"", "WORLD_SIZE"});
}

TEST(Environment, Slurm) {
  const auto environment = read(kSlurm);
  EXPECT_EQ(environment.launcher, Launcher::kSlurm);
  expect_place(environment, 4, 5);
  expect_local_place(environment, 0, 1);
  EXPECT_EQ(environment.store->host, "node003");
  EXPECT_EQ(environment.store->port, detail::slurm_port(1234567, 0));
  EXPECT_EQ(environment.job, "1234567.0.0");
}

TEST(Environment, SlurmOnOneNode) {
  const auto environment = read(with(
      kSlurm,
      {{"SLURM_NODEID", "0"},
       {"SLURM_LOCALID", "4"},
       {"SLURM_STEP_NODELIST", "node003"},
       {"SLURM_STEP_TASKS_PER_NODE", "5"}}));
  EXPECT_TRUE(environment.on_one_host());
  EXPECT_EQ(environment.store->host, "127.0.0.1");
}

TEST(Environment, SlurmWithAnAddress) {
  expect_store(
      read(with(kSlurm, {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}})),
      "tcp://a:1");
  EXPECT_EQ(
      read(with(kSlurm, {{"MASTER_ADDR", "a"}})).store->port,
      detail::slurm_port(1234567, 0));
  EXPECT_EQ(
      read(with(kSlurm, {{"MASTER_PORT", "1"}})).store->text(),
      "tcp://node003:1");
}

TEST(Environment, ARequeuedJobOfSlurmIsAnotherJob) {
  EXPECT_NE(
      read(kSlurm).job, read(with(kSlurm, {{"SLURM_RESTART_COUNT", "1"}})).job);
}

TEST(Environment, SlurmTellsTheSizeOfTheStepNotOfTheAllocation) {
  EXPECT_EQ(read(with(kSlurm, {{"SLURM_NTASKS", "16"}})).size, 5);
  EXPECT_EQ(read(without(kSlurm, "SLURM_STEP_NUM_TASKS")).size, 5);
}

TEST(Environment, TheBatchScriptOfSlurmIsOneRankAndIsTold) {
  auto script = without(kSlurm, "SLURM_STEP_ID");
  script["SLURM_PROCID"] = "0";
  const auto environment = read(script);
  EXPECT_EQ(environment.launcher, Launcher::kNone);
  expect_place(environment, 0, 1);
  EXPECT_NE(environment.note.find("SLURM_NTASKS=5"), std::string::npos);
  EXPECT_NE(environment.note.find("srun"), std::string::npos);
}

TEST(Environment, TheInteractiveStepOfSallocIsOneRank) {
  const auto environment = read(
      with(kSlurm, {{"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", "4294967290"}}));
  EXPECT_EQ(environment.launcher, Launcher::kNone);
  expect_place(environment, 0, 1);
}

TEST(Environment, AnAllocationWithoutATaskIsOneRank) {
  const auto environment =
      read({{"SLURM_JOB_ID", "12"}, {"SLURM_NTASKS", "4"}});
  EXPECT_EQ(environment.launcher, Launcher::kNone);
  EXPECT_NE(environment.note, "");
  EXPECT_EQ(read({{"SLURM_JOB_ID", "12"}, {"SLURM_NTASKS", "1"}}).note, "");
}

TEST(Environment, SlurmsPmi2IsSlurm) {
  const auto environment =
      read(with(kSlurm, {{"PMI_RANK", "4"}, {"PMI_SIZE", "5"}}));
  EXPECT_EQ(environment.launcher, Launcher::kSlurm);
}

TEST(Environment, TorchrunWinsOverSlurmAndMpi) {
  auto all = with(kSlurm, kMpich);
  all = with(all, kOpenMpi);
  const auto environment = read(with(all, kTorchrun));
  EXPECT_EQ(environment.launcher, Launcher::kTorchrun);
  expect_place(environment, 5, 8);
  expect_store(environment, "tcp://node1:29511", true);
}

TEST(Environment, MpirunInsideOfSlurmIsMpirun) {
  EXPECT_EQ(read(with(kSlurm, kMpich)).launcher, Launcher::kMpich);
  EXPECT_EQ(read(with(kSlurm, kOpenMpi)).launcher, Launcher::kOpenMpi);
  EXPECT_FALSE(
      read(with(without(kSlurm, "SLURM_STEP_ID"), kOpenMpi)).store.has_value());
}

TEST(Environment, OpenMpiInsideOfASingleTaskOfPmiIsOpenMpi) {
  const auto environment =
      read(with(kOpenMpi, {{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}));
  EXPECT_EQ(environment.launcher, Launcher::kOpenMpi);
}

TEST(Environment, TwoLaunchersThatDisagree) {
  expect_refused(
      with(kOpenMpi, kMpich),
      {"two jobs", "Open MPI", "rank 1/2", "MPICH", "rank 2/3"});
}

TEST(Environment, TheStoreOfLibfsdpWins) {
  expect_store(
      read(with(kTorchrun, {{"LIBFSDP_STORE", "file:///scratch/run 1"}})),
      "file:///scratch/run 1");
  expect_store(
      read(with(kOpenMpi, {{"LIBFSDP_STORE", "tcp://[::1]:77"}})),
      "tcp://[::1]:77");
}

TEST(Environment, OneRankNeedsNoStore) {
  EXPECT_FALSE(read({{"MASTER_ADDR", "node1"}}).store.has_value());
}

TEST(Environment, AWorldSizeThatAgreesWithTheLauncherIsAccepted) {
  expect_place(read(with(kMpich, {{"WORLD_SIZE", "3"}})), 2, 3);
  expect_place(read({{"WORLD_SIZE", "1"}}), 0, 1);
}

TEST(SlurmPort, IsStableAndInItsRange) {
  EXPECT_EQ(detail::slurm_port(1234567, 0), 24567);
  EXPECT_EQ(detail::slurm_port(1234567, 1), 24668);
  std::set<int> ports;
  for (int64_t job = 9990; job < 10010; ++job) {
    for (int64_t step = 0; step < 4; ++step) {
      const auto port = detail::slurm_port(job, step);
      EXPECT_GE(port, 20000);
      EXPECT_LE(port, 29999);
      ports.insert(port);
    }
  }
  EXPECT_EQ(ports.size(), 80u); // neighbours do not meet
  EXPECT_LE(detail::slurm_port(INT64_MAX, INT64_MAX), 29999);
}

} // namespace
} // namespace fsdp::testing
