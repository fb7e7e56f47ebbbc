#include "start/jobs.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace fsdp::testing {
namespace {

Variables place_unknown(int rank, int size) {
  return {{"RANK", std::to_string(rank)}, {"WORLD_SIZE", std::to_string(size)}};
}

TEST(Stores, ATcpPortLetsTheRanksFindOutThatTheyShareAHost) {
  const Variables address = {
      {"MASTER_ADDR", "localhost"},
      {"MASTER_PORT", std::to_string(free_port())}};
  const auto ended = run_ranks(2, {"train"}, [&](int rank) {
    return place_unknown(rank, 2) + kInfo + address;
  });
  expect_trained(ended, 2, {"2 ranks on 1 host,", "back end shm"});
  expect_has(ended[1].out, "local 1/2");
}

TEST(Stores, AFileNeedsNoPortAndIsRemoved) {
  const TemporaryFolder folder;
  const auto file = folder.path() + "/store";
  for (const std::string backend : {"gloo", "shm"}) {
    const auto ended = run_ranks(2, {"train"}, [&](int rank) {
      return place_unknown(rank, 2) + kInfo +
          Variables{
              {"LIBFSDP_STORE", "file://" + file},
              {"LIBFSDP_BACKEND", backend}};
    });
    expect_trained(ended, 2, {"back end " + backend});
    EXPECT_FALSE(std::filesystem::exists(file)) << backend;
  }
}

TEST(Stores, AnAddressOfLibfsdp) {
  const auto store = "tcp://127.0.0.1:" + std::to_string(free_port());
  const auto ended = run_ranks(2, {"train"}, [&](int rank) {
    return by_hand(rank, 2) + kInfo +
        Variables{{"LIBFSDP_STORE", store}, {"LIBFSDP_BACKEND", "gloo"}};
  });
  expect_trained(ended, 2, {"back end gloo; store " + store});
}

TEST(Stores, AFileThatAnEarlierJobHasLeftIsRefused) {
  const TemporaryFolder folder;
  const auto run_with = [&](const std::string& mode, const Variables& more) {
    return run_ranks(
        2,
        {mode, "60"},
        [&](int rank) {
          return place_unknown(rank, 2) + more +
              Variables{
                  {"LIBFSDP_STORE", "file://" + folder.path() + "/store"}};
        },
        std::chrono::seconds(20));
  };
  // Aborted, so that it can not remove the file.
  run_with("terminate", {{"LIBFSDP_TIMEOUT", "5"}});
  ASSERT_TRUE(std::filesystem::exists(folder.path() + "/store"));
  for (const auto& ended : run_with("train", {{"LIBFSDP_TIMEOUT", "5"}})) {
    expect_failed(ended, {"store at file://", "earlier job"});
  }
}

TEST(Stores, GlooNeedsOne) {
  const auto ended = run_ranks(
      2, {"options", "gloo"}, [](int rank) { return by_hand(rank, 2); });
  for (const auto& each : ended) {
    expect_failed(
        each,
        {"2 ranks (started by RANK and WORLD_SIZE)",
         "nothing says where",
         "MASTER_PORT",
         "LIBFSDP_STORE"});
  }
}

TEST(Stores, OptionsOfTheProgramWinOverVariables) {
  const auto ended = run_ranks(2, {"options", "shm"}, [](int rank) {
    return by_hand(rank, 2) + kInfo +
        Variables{{"LIBFSDP_BACKEND", "gloo"}, {"LIBFSDP_TIMEOUT", "7"}};
  });
  expect_trained(ended, 2, {"back end shm", "time limit 20 s"});
}

TEST(MissingRank, IsNamedByShm) {
  const auto ended = run_ranks(2, {"train"}, [](int rank) {
    return by_hand(rank, 3) + Variables{{"LIBFSDP_TIMEOUT", "1.5"}};
  });
  for (const auto& each : ended) {
    expect_failed(
        each,
        {"have not joined: 2 (of 3)", "waited 1.", "Gloo", "LIBFSDP_STORE"});
  }
}

TEST(MissingRank, IsNamedByAStore) {
  const Variables address = {
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(free_port())},
      {"LIBFSDP_TIMEOUT", "1.5"}};
  const auto ended = run_ranks(
      2, {"train"}, [&](int rank) { return place_unknown(rank, 3) + address; });
  expect_failed(ended[0], {"rank 0/3", "did not come: 2", "waited 1.5 s"});
  expect_failed(ended[1], {"rank 1/3"});
}

TEST(MissingRank, RankZeroIsNamed) {
  const Variables address = {
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(free_port())},
      {"LIBFSDP_TIMEOUT", "1.5"}};
  const auto ended =
      run({{rank_program(), "train"}, place_unknown(1, 2) + address});
  expect_failed(ended, {"rank 1/2", "no answer from rank 0", "127.0.0.1"});
}

Variables address_of_job() {
  return {
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(free_port())}};
}

TEST(WithoutSharedMemory, AllRanksUseGlooAndRankZeroWarns) {
  const auto address = address_of_job();
  const auto ended = run_ranks(2, {"no_memfd"}, [&](int rank) {
    return by_hand(rank, 2) + kInfo + address;
  });
  expect_trained(
      ended,
      2,
      {"the ranks use Gloo, since shared memory could not be set up",
       "back end gloo; store tcp://127.0.0.1:"});
  EXPECT_FALSE(has(ended[1].err, "use Gloo")) << ended[1].err;
}

TEST(WithoutSharedMemory, AllRanksUseGlooAlsoWhenRankZeroAloneHasNone) {
  const auto address = address_of_job();
  const auto ended = run_ranks(2, {"no_memfd", "0"}, [&](int rank) {
    return by_hand(rank, 2) + kInfo + address;
  });
  expect_trained(ended, 2, {"the ranks use Gloo", "back end gloo"});
}

TEST(WithoutSharedMemory, IsAnErrorWhereItWasAskedForByName) {
  const auto address = address_of_job();
  for (const auto& ended : run_ranks(2, {"no_memfd"}, [&](int rank) {
         return by_hand(rank, 2) + address +
             Variables{{"LIBFSDP_BACKEND", "shm"}};
       })) {
    expect_failed(ended, {"memfd"});
  }
}

TEST(WithoutSharedMemory, GlooNeedsAnAddress) {
  for (const auto& ended :
       run_ranks(2, {"no_memfd"}, [](int rank) { return by_hand(rank, 2); })) {
    expect_failed(ended, {"memfd", "MASTER_ADDR", "LIBFSDP_STORE"});
  }
}

TEST(LateRank, IsWaitedFor) {
  const auto ended = run_ranks(
      2, {"late", "1"}, [](int rank) { return by_hand(rank, 2) + kInfo; });
  expect_trained(ended, 2, {"back end shm"});
}

TEST(StrategyVariable, WinsOverTheProgram) {
  for (const auto& [name, number] :
       {std::pair("shard_grad_op", "1"),
        std::pair("shard_optimizer", "2"),
        std::pair("no_shard", "3")}) {
    const auto ended =
        run({{rank_program(), "train"}, Variables{{"LIBFSDP_STRATEGY", name}}});
    expect_trained({ended}, 1, {});
    expect_has(ended.out, std::string("strategy ") + number);
  }
}

TEST(StrategyVariable, MustBeTheSameOnAllRanks) {
  const auto ended = run_ranks(2, {"train"}, [](int rank) {
    return by_hand(rank, 2) +
        Variables{{"LIBFSDP_STRATEGY", rank == 0 ? "" : "no_shard"}};
  });
  for (const auto& each : ended) {
    expect_failed(each, {"the ranks differ", "full_shard", "no_shard"});
  }
}

TEST(StrategyVariable, MustBeKnown) {
  expect_failed(
      run({{rank_program(), "train"}, {{"LIBFSDP_STRATEGY", "zero3"}}}),
      {"LIBFSDP_STRATEGY", "\"zero3\"", "shard_grad_op"});
}

TEST(LogVariable, DebugHasALineOfEachRank) {
  const auto ended = run_ranks(2, {"shutdown"}, [](int rank) {
    return by_hand(rank, 2) + Variables{{"LIBFSDP_LOG", "debug"}};
  });
  for (int rank = 0; rank < 2; ++rank) {
    const auto& text = ended[static_cast<size_t>(rank)].err;
    const auto lead = "fsdp rank " + std::to_string(rank) + "/2: ";
    expect_has(text, lead + "pid ");
    expect_has(text, lead + "shuts the world down");
  }
  EXPECT_FALSE(has(ended[1].err, "started by")) << ended[1].err;
}

} // namespace
} // namespace fsdp::testing
