#include "start/jobs.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <unistd.h>

namespace fsdp::testing {
namespace {

Variables open_mpi(int rank, int size, int local_size) {
  return {
      {"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
      {"OMPI_COMM_WORLD_SIZE", std::to_string(size)},
      {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(rank % local_size)},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", std::to_string(local_size)},
      {"PMIX_NAMESPACE", "prterun-1@" + std::to_string(::getpid())},
      {"PMIX_RANK", std::to_string(rank)}};
}

/// A step of `tasks` tasks on `nodes`, which has `per_node` on each.
Variables slurm(int rank, int tasks, const std::string& nodes, int per_node) {
  return {
      {"SLURM_JOB_ID", std::to_string(::getpid())},
      {"SLURM_STEP_ID", "0"},
      {"SLURM_PROCID", std::to_string(rank)},
      {"SLURM_LOCALID", std::to_string(rank % per_node)},
      {"SLURM_NODEID", std::to_string(rank / per_node)},
      {"SLURM_NTASKS", std::to_string(tasks)},
      {"SLURM_STEP_NUM_TASKS", std::to_string(tasks)},
      {"SLURM_STEP_TASKS_PER_NODE",
       std::to_string(per_node) + "(x" + std::to_string(tasks / per_node) +
           ")"},
      {"SLURM_STEP_NODELIST", nodes}};
}

Command torchrun(
    const Words& options,
    const Words& arguments,
    const Variables& variables) {
  Words words = {FSDP_TEST_TORCHRUN, "--no-python"};
  words.insert(words.end(), options.begin(), options.end());
  words.push_back(rank_program());
  words.insert(words.end(), arguments.begin(), arguments.end());
  return {words, variables};
}

/// Two ranks, at a port that is free.
const Words kTwoRanks = {
    "--nproc-per-node=2",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=localhost:0"};

/// A test that starts `tool` ends here where it is not installed.
#define FSDP_SKIP_WITHOUT(tool)                  \
  if (!is_there(tool)) {                         \
    GTEST_SKIP() << tool << " is not installed"; \
  }                                              \
  static_assert(true)

bool is_there(const std::string& tool) {
  return tool.starts_with("/") ? ::access(tool.c_str(), X_OK) == 0
                               : !path_of(tool).empty();
}

TEST(Start, AProgramStartedAloneIsAWorldOfOne) {
  const auto ended = run({{rank_program(), "train"}, kInfo});
  expect_trained({ended}, 1, {"started by nobody; back end single"});
  expect_has(ended.out, "local 0/1");
}

TEST(Start, VariablesSetByHandNeedNoPortOnOneHost) {
  const auto ended = run_ranks(
      3, {"train"}, [](int rank) { return by_hand(rank, 3) + kInfo; });
  expect_trained(ended, 3, {"back end shm; store none", "RANK and WORLD_SIZE"});
  expect_has(ended[2].out, "local 2/3");
}

TEST(Start, FsdpRun) {
  const Command job{
      {fsdp_tool(), "run", "-n", "2", "--", rank_program(), "train"}, kInfo};
  for (const auto& ended : run_all({job, job})) {
    expect_trained(
        {ended}, 2, {"started by fsdp run; back end shm; store none"});
  }
}

TEST(Start, FsdpRunWithGloo) {
  const auto ended = run(
      {{fsdp_tool(),
        "run",
        "-n",
        "2",
        "--backend",
        "gloo",
        "--",
        rank_program(),
        "train"},
       kInfo});
  expect_trained({ended}, 2, {"back end gloo; store tcp://127.0.0.1:"});
}

TEST(Start, Torchrun) {
  FSDP_SKIP_WITHOUT(FSDP_TEST_TORCHRUN);
  expect_trained(
      {run(torchrun(kTwoRanks, {"train"}, kInfo))},
      2,
      {"started by torchrun; back end shm; store none"});
}

TEST(Start, TorchrunWithGlooUsesTheStoreOfItsAgent) {
  FSDP_SKIP_WITHOUT(FSDP_TEST_TORCHRUN);
  const auto ended = run(torchrun(
      kTwoRanks, {"train"}, kInfo + Variables{{"LIBFSDP_BACKEND", "gloo"}}));
  expect_trained(
      {ended}, 2, {"started by torchrun; back end gloo; store tcp://"});
  // libtorch goes on when rank 0 tries to open the port of the agent.
  EXPECT_FALSE(has(ended.err, "failed to bind")) << ended.err;
}

TEST(Start, TorchrunInsideOfSlurmIsTorchrun) {
  FSDP_SKIP_WITHOUT(FSDP_TEST_TORCHRUN);
  expect_trained(
      {run(
          torchrun(kTwoRanks, {"train"}, kInfo + slurm(0, 1, "localhost", 1)))},
      2,
      {"started by torchrun"});
}

TEST(Start, ARestartOfTorchrunDoesNotMeetTheRoundBefore) {
  FSDP_SKIP_WITHOUT(FSDP_TEST_TORCHRUN);
  auto options = kTwoRanks;
  options.push_back("--max-restarts=1");
  for (const auto* backend : {"shm", "gloo"}) {
    const auto ended =
        run(torchrun(options, {"restart"}, {{"LIBFSDP_BACKEND", backend}}));
    expect_ended_well(ended);
    expect_has(ended.out, "rank 0/2: went on in round 1");
    expect_has(ended.out, "rank 1/2: went on in round 1");
  }
}

TEST(Start, TwoTorchrunsOnOneHost) {
  FSDP_SKIP_WITHOUT(FSDP_TEST_TORCHRUN);
  const auto port = std::to_string(free_port());
  const auto node = [&](const std::string& number) {
    return torchrun(
        {"--nnodes=2",
         "--node-rank=" + number,
         "--nproc-per-node=1",
         "--master-addr=127.0.0.1",
         "--master-port=" + port},
        {"train"},
        kInfo);
  };
  expect_trained(
      run_all({node("0"), node("1")}),
      2,
      {"2 ranks on 1 host, started by torchrun; back end shm"});
}

TEST(Start, Mpich) {
  FSDP_SKIP_WITHOUT("mpirun.mpich");
  const Command job{
      {"mpirun.mpich", "-n", "2", rank_program(), "train"}, kInfo};
  // At the same time, and nothing but their launchers tells them apart.
  for (const auto& ended : run_all({job, job})) {
    expect_trained({ended}, 2, {"started by MPICH; back end shm; store none"});
  }
}

TEST(Start, OpenMpi) {
  FSDP_SKIP_WITHOUT("mpirun.openmpi");
  const Command job{
      {"mpirun.openmpi",
       "--allow-run-as-root",
       "--oversubscribe",
       "-n",
       "2",
       rank_program(),
       "train"},
      kInfo};
  for (const auto& ended : run_all({job, job})) {
    expect_trained(
        {ended}, 2, {"started by Open MPI; back end shm; store none"});
  }
}

TEST(Start, VariablesOfOpenMpi) {
  const auto ended = run_ranks(
      2, {"train"}, [](int rank) { return open_mpi(rank, 2, 2) + kInfo; });
  expect_trained(ended, 2, {"started by Open MPI; back end shm; store none"});
}

TEST(Start, MpiOnSeveralHostsSaysWhatToSet) {
  for (const auto& ended :
       run_ranks(2, {"train"}, [](int rank) { return open_mpi(rank, 2, 1); })) {
    expect_failed(
        ended,
        {"2 ranks (started by Open MPI)", "MASTER_ADDR", "LIBFSDP_STORE"});
  }
}

TEST(Start, MpiOnSeveralHostsWithAnAddress) {
  const Variables address = {
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(free_port())}};
  const auto ended = run_ranks(2, {"train"}, [&](int rank) {
    return open_mpi(rank, 2, 1) + kInfo + address;
  });
  // The ranks find out that both hosts are this one.
  expect_trained(ended, 2, {"2 ranks on 1 host,", "back end shm"});
}

TEST(Start, SlurmOnOneNode) {
  const auto ended = run_ranks(2, {"train"}, [](int rank) {
    return slurm(rank, 2, "node7", 2) + kInfo;
  });
  expect_trained(ended, 2, {"started by Slurm; back end shm; store none"});
}

TEST(Start, SlurmOnTwoNodesMeetsAtTheFirst) {
  const auto ended = run_ranks(2, {"train"}, [](int rank) {
    return slurm(rank, 2, "localhost,node[8-9]", 1) + kInfo +
        Variables{{"LIBFSDP_BACKEND", "gloo"}};
  });
  expect_trained(
      ended, 2, {"started by Slurm; back end gloo; store tcp://localhost:2"});
  expect_has(ended[1].out, "local 0/1");
}

TEST(Start, AProgramInAnAllocationWithoutSrunIsTold) {
  const auto ended = run(
      {{rank_program(), "train"},
       {{"SLURM_JOB_ID", "12"}, {"SLURM_NTASKS", "4"}}});
  expect_trained({ended}, 1, {"SLURM_NTASKS=4", "srun"});
}

TEST(Start, VariablesThatCanNotBeRight) {
  const auto failed = [](const Variables& variables) {
    return run({{rank_program(), "train"}, variables});
  };
  expect_failed(failed({{"RANK", "0"}}), {"RANK=\"0\"", "WORLD_SIZE is not"});
  expect_failed(
      failed({{"LIBFSDP_BACKEND", "nccl"}}), {"LIBFSDP_BACKEND", "\"nccl\""});
  expect_failed(
      failed(by_hand(0, 2) + Variables{{"LIBFSDP_BACKEND", "single"}}),
      {"single", "2 ranks"});
}

} // namespace
} // namespace fsdp::testing
