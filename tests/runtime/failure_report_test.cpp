// What each rank is told of a failure, and failures in unusual places.

#include "harness/failing_training.h"

#include <gtest/gtest.h>

#include <barrier>
#include <chrono>

namespace fsdp::testing::failure_report {
namespace {

using at::Tensor;
using ::testing::IsSubstring;

TEST(FailureReport, PeersGetADistBackendErrorWithTheRankAndTheText) {
  in_worlds({2, 3}, kAllStrategies, [](const World& world, Strategy strategy) {
    BreakableRank rank(world, strategy);
    const bool breaks = world.rank() == 1;
    try {
      rank.net
          .call([&] {
            const auto loss = rank.m->loss(torch::arange(kRows));
            return breaks ? loss + torch::ones({2, 3}).mm(torch::ones({2, 3}))
                          : loss;
          })
          .sum()
          .backward();
      ADD_FAILURE() << "no exception";
    } catch (const c10::DistBackendError& error) {
      EXPECT_FALSE(breaks);
      const std::string text = error.what_without_backtrace();
      const auto who = "rank 1/" + std::to_string(world.size()) + " failed: ";
      EXPECT_PRED_FORMAT2(IsSubstring, who, text);
      EXPECT_PRED_FORMAT2(IsSubstring, "mat1 and mat2 shapes", text);
      EXPECT_EQ(text.find("Exception raised from"), std::string::npos) << text;
      EXPECT_EQ(text.find("frame #"), std::string::npos);
    } catch (const c10::Error& error) {
      EXPECT_TRUE(breaks);
      EXPECT_PRED_FORMAT2(
          IsSubstring, "mat1 and mat2 shapes", error.what_without_backtrace());
    }
    rank.expect_pass_works();
  });
}

TEST(FailureReport, AnExceptionKeepsItsTypeOnItsOwnRank) {
  struct Special : std::logic_error {
    using std::logic_error::logic_error;
  };
  in_worlds({1, 2}, kAllStrategies, [](const World& world, Strategy strategy) {
    BreakableRank rank(world, strategy);
    EXPECT_THROW(
        rank.net.call([&] {
          rank.m->loss(torch::arange(kRows));
          throw Special("special");
        }),
        Special);
    const auto loss =
        rank.net.call([&] { return rank.m->loss(torch::arange(kRows)); });
    loss.register_hook([](const Tensor& gradient) {
      throw Special("special");
      return gradient;
    });
    EXPECT_THROW(loss.backward(), Special);
    rank.expect_pass_works();
  });
}

TEST(FailureReport, WhatIsNoStdExceptionIsReportedToo) {
  in_worlds({1, 2, 3}, kAllStrategies, [](const World& world, Strategy s) {
    BreakableRank rank(world, s);
    const Snapshot before(rank.net);
    std::string text;
    try {
      rank.net
          .call([&] {
            const auto loss = rank.m->loss(torch::arange(kRows));
            if (world.rank() == 0) {
              throw 42;
            }
            return loss;
          })
          .backward();
    } catch (int number) {
      EXPECT_EQ(number, 42);
      text = "an exception left a region";
    } catch (const std::exception& error) {
      text = error.what();
    }
    EXPECT_PRED_FORMAT2(IsSubstring, "an exception left a region", text);
    before.expect_unchanged(rank.net);
    rank.expect_pass_works();
  });
}

TEST(FailureReport, AScopeThatAnExceptionLeavesIsReported) {
  in_worlds({1, 2, 3}, kAllStrategies, [](const World& world, Strategy s) {
    BreakableRank rank(world, s);
    const Snapshot before(rank.net);
    const auto text = error_of([&] {
      const auto region = rank.net.region();
      const auto loss = rank.m->loss(torch::arange(kRows));
      if (world.rank() == 0) {
        throw std::runtime_error("an exception left a region");
      }
    });
    // Others may have closed theirs, and learn of it at the next call.
    const auto later =
        text.empty() ? error_of([&] { rank.pass(); }) : std::string();
    EXPECT_PRED_FORMAT2(
        IsSubstring, "an exception left a region", text + later);
    before.expect_unchanged(rank.net);
    rank.expect_pass_works();
  });
}

TEST(FailureReport, AfterAPassInsideTheRegionOthersLearnOfItNext) {
  in_worlds({2, 3}, kAllStrategies, [](const World& world, Strategy s) {
    BreakableRank rank(world, s);
    rank.pass();
    const Snapshot before(rank.net);
    const auto text = error_of([&] {
      rank.net.call([&] {
        rank.m->loss(torch::arange(kRows)).backward();
        if (world.rank() == 0) {
          throw std::runtime_error("after the pass");
        }
      });
    });
    if (world.rank() == 0) {
      EXPECT_EQ(text, "after the pass");
      before.expect_unchanged(rank.net); // also the gradient of the first pass
    } else {
      EXPECT_EQ(text, ""); // the pass is over, with gradients of all ranks
      const Snapshot settled(rank.net);
      EXPECT_PRED_FORMAT2(
          IsSubstring, "after the pass", error_of([&] { rank.pass(); }));
      settled.expect_unchanged(rank.net);
    }
    rank.expect_pass_works();
  });
}

TEST(FailureReport, WhatTheProgramHandlesInsideItsRegionIsNoFailure) {
  expect_same_program(program_with([](TanhLayers& m, Trial& run) {
    for (int step = 0; step < 3; ++step) {
      const auto loss = run.forward([&] {
        const bool breaks = run.sharded() && run.net()->world().rank() == 0;
        const auto text = error_of([&] {
          run.forward([&] {
            if (breaks) {
              throw std::runtime_error("handled");
            }
          });
        });
        EXPECT_EQ(text, breaks ? "handled" : "");
        return m.loss(run.rows());
      });
      loss.backward();
      run.record_gradients("of step " + std::to_string(step));
      run.step();
    }
    run.record_parameters("at the end");
  }));
}

TEST(FailureReport, ARankThatGivesUpEndsTheOthersSoon) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::string> texts(3);
  const auto text = error_of([&] {
    run_ranks(
        3,
        [&](const World& world) {
          BreakableRank rank(world, Strategy::kFullShard);
          rank.expect_pass_works();
          if (world.rank() == 1) {
            throw std::runtime_error("out of data");
          }
          texts[static_cast<size_t>(world.rank())] =
              error_of([&] { rank.pass(); });
        },
        std::chrono::seconds(20));
  });
  EXPECT_EQ(text, "out of data");
  share_results(texts);
  for (const size_t rank : {0, 2}) {
    EXPECT_PRED_FORMAT2(IsSubstring, "rank 1", texts[rank]);
    EXPECT_PRED_FORMAT2(IsSubstring, "out of data", texts[rank]);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

TEST(FailureReport, ARankThatDoesNotComeIsNamed) {
  FSDP_SKIP_IF(!survives_time_outs(), "training goes on here");
  std::barrier together(2);
  std::vector<std::string> texts(2);
  run_ranks(
      2,
      [&](const World& world) {
        BreakableRank rank(world, Strategy::kFullShard);
        rank.expect_pass_works();
        if (world.rank() == 0) {
          texts[0] = error_of([&] { rank.pass(); });
          together.arrive_and_wait();
        } else {
          together.arrive_and_wait();
          texts[1] = error_of([&] { rank.pass(); });
        }
        together.arrive_and_wait();
        rank.expect_pass_works();
      },
      std::chrono::milliseconds(400));
  EXPECT_PRED_FORMAT2(IsSubstring, "all_gather of unit 'layer0'", texts[0]);
  EXPECT_PRED_FORMAT2(IsSubstring, "timed out after 400 ms", texts[0]);
  EXPECT_PRED_FORMAT2(IsSubstring, "not arrived: rank 1", texts[0]);
  EXPECT_PRED_FORMAT2(IsSubstring, "rank 0/2 failed: ", texts[1]);
  EXPECT_PRED_FORMAT2(IsSubstring, "timed out after 400 ms", texts[1]);
}

} // namespace
} // namespace fsdp::testing::failure_report
