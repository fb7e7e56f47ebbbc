#include "start/jobs.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

/// How a job ends, with each back end of processes.
class Ends : public ::testing::TestWithParam<std::string> {
 protected:
  std::vector<Ended> run_two(
      const Words& arguments,
      const Variables& more = {}) {
    const Variables common = {
        {"LIBFSDP_BACKEND", GetParam()},
        {"LIBFSDP_TIMEOUT", "20"},
        {"MASTER_ADDR", "127.0.0.1"},
        {"MASTER_PORT", std::to_string(free_port())}};
    return run_ranks(2, arguments, [&](int rank) {
      return by_hand(rank, 2) + common + more;
    });
  }
};

INSTANTIATE_TEST_SUITE_P(
    Backends,
    Ends,
    ::testing::Values("shm", "gloo"),
    [](const auto& tested) { return tested.param; });

TEST_P(Ends, RightAfterAStepWithoutShutdown) {
  expect_trained(run_two({"train"}), 2, {});
}

TEST_P(Ends, WithShutdown) {
  expect_trained(run_two({"shutdown"}), 2, {});
}

TEST_P(Ends, AnyOrderOfDestruction) {
  for (const auto& ended :
       run_two({"destroy", "wnom", "onwm", "nmwo", "mown", "womn"})) {
    expect_ended_well(ended);
    expect_has(ended.out, "destroyed all");
  }
}

TEST_P(Ends, WithStatics) {
  expect_trained(run_two({"statics"}), 2, {});
}

TEST_P(Ends, AnExceptionOfOneRankEndsAll) {
  const auto ended = run_two({"throw"});
  expect_failed(ended[1], {"the disk is full"});
  expect_failed(ended[0], {"rank 1"});
}

TEST_P(Ends, AnExceptionThatNobodyCatchesEndsAll) {
  const auto ended = run_two({"terminate"});
  EXPECT_EQ(ended[1].status, 128 + 6) << ended[1].err;
  EXPECT_GT(ended[0].status, 0) << ended[0].err;
}

TEST_P(Ends, FewerBatchesOnOneRankAreAnErrorOnTheOther) {
  const auto ended = run_two({"unequal"});
  expect_failed(ended[0], {"rank 1"});
}

TEST_P(Ends, FewerBatchesAreAnErrorOnAllWithShutdown) {
  const auto ended =
      run_two({"unequal", "shutdown"}, {{"LIBFSDP_TIMEOUT", "2"}});
  expect_failed(ended[0], {"rank 1"});
  expect_failed(ended[1], {"shutdown of the world", "rank 0"});
  // The other may hear it from the first that waited too long.
  expect_has(ended[0].err + ended[1].err, "timed out after 2000 ms");
}

TEST_P(Ends, AWorldAfterAWorld) {
  for (const auto& ended : run_two({"twice"})) {
    expect_ended_well(ended);
    expect_has(ended.out, "this process has a world already");
    expect_has(ended.out, "shutdown()");
  }
}

TEST_P(Ends, NothingCanBeCalledAfterShutdown) {
  for (const auto& ended : run_two({"after_shutdown"})) {
    expect_ended_well(ended);
    for (const auto* call :
         {"barrier",
          "split",
          "part",
          "communicator",
          "forward",
          "whole",
          "backward"}) {
      const auto start = ended.out.find(std::string(": ") + call + ": ");
      ASSERT_NE(start, std::string::npos) << ended.out;
      expect_has(
          ended.out.substr(start, ended.out.find("\nrank", start) - start),
          "the world was shut down");
    }
  }
}

TEST(Single, NothingCanBeCalledAfterShutdown) {
  const auto ended = run({{rank_program(), "after_shutdown"}, {}});
  expect_ended_well(ended);
  for (const auto* call : {"barrier", "part", "forward", "whole"}) {
    const auto start = ended.out.find(std::string(": ") + call + ": ");
    ASSERT_NE(start, std::string::npos) << ended.out;
    expect_has(ended.out.substr(start, 200), "the world was shut down");
  }
}

TEST(Single, AWorldAfterAWorld) {
  const auto ended = run({{rank_program(), "twice"}, {}});
  expect_trained({ended}, 1, {});
  expect_has(ended.out, "this process has a world already");
}

TEST(Split, HalvesKnowTheirPlaces) {
  const auto ended =
      run_ranks(4, {"split"}, [](int rank) { return by_hand(rank, 4); });
  for (int rank = 0; rank < 4; ++rank) {
    const auto place = std::to_string(rank / 2) + "/2";
    const auto& each = ended[static_cast<size_t>(rank)];
    expect_ended_well(each);
    expect_has(each.out, "half " + place + " local " + place);
  }
}

} // namespace
} // namespace fsdp::testing
