// Failures in worlds of any kind; failure_test.cpp and split_failure_test.cpp
// have the cases that need one thread to be all ranks.

#include "thread_world.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace fsdp::detail {
namespace {

TEST(FailureOfAChild, LeavesTheParentAlone) {
  run_ranks(4, [](Communicator& comm) {
    const auto child = comm.split(comm.rank() / 2, 0);
    if (comm.rank() == 0) {
      child->signal_failure("a");
    } else if (comm.rank() == 1) {
      const std::string text = error_of([&] { child->barrier("b"); });
      EXPECT_EQ(text, "rank 0/2 failed: a");
    }
    comm.barrier("all");
    child->barrier("again");
    EXPECT_EQ(comm.epoch(), 0u);
    EXPECT_EQ(child->epoch(), comm.rank() < 2 ? 1u : 0u);
  });
}

// In each round one rank fails, in the parent or in one of two children, after
// some calls; its peers go on until they have thrown wherever it failed.
TEST(FailureOfAParentAtRandom, AllMeetAgainInEveryGroup) {
  const int rounds = affordable(200);
  run_ranks(3, [=](Communicator& comm) {
    const std::vector<std::shared_ptr<Communicator>> children = {
        comm.split(0, 0), comm.split(0, 0)};
    const std::vector<Communicator*> all = {
        &comm, children[0].get(), children[1].get()};
    std::mt19937 plan(5); // the same on all ranks
    std::mt19937 own(static_cast<unsigned>(comm.rank()));
    for (int round = 0; round < rounds; ++round) {
      const int failing = static_cast<int>(plan() % 3);
      const size_t where = plan() % 3;
      std::vector<size_t> calls(3);
      for (size_t& each : calls) {
        each = plan() % 3;
      }
      const std::string text = "rank " + std::to_string(failing) +
          "/3 failed: round " + std::to_string(round);
      for (size_t i = 0; i < all.size(); ++i) {
        for (size_t n = 0; n < calls[i]; ++n) {
          all[i]->barrier("round " + std::to_string(round));
        }
      }
      if (comm.rank() == failing) {
        if (own() % 4 == 0) {
          std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
        all[where]->signal_failure("round " + std::to_string(round));
      } else {
        for (size_t i = where; i < (where == 0 ? 3 : where + 1); ++i) {
          EXPECT_EQ(error_of([&] { all[i]->barrier("b"); }), text);
        }
      }
      const auto epoch = std::to_string(children[0]->epoch());
      for (const auto& each : children[0]->exchange(epoch, "epoch")) {
        EXPECT_EQ(each, epoch);
      }
    }
  });
}

} // namespace
} // namespace fsdp::detail
