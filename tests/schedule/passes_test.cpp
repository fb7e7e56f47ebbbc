// Which recorded pass is followed.

#include "schedule_run.h"

#include <gtest/gtest.h>

namespace fsdp::detail {
namespace {

constexpr auto kForward = PassKind::kForward;
constexpr auto kBackward = PassKind::kBackward;

TEST(Passes, FirstBackwardPassAssumesTheReverseOfForward) {
  ScheduleRun net(4, 2);
  net.forward("A B C D");
  EXPECT_EQ(net.backward("D C B A"), "+D >C | -D >B | -C >A | .");
}

TEST(Passes, BackwardFollowsWhatItRecordedNotTheReverse) {
  ScheduleRun net(4, 2);
  net.forward("A B C D");
  EXPECT_EQ(net.backward("D B C A"), "+D >C | -C +B | -D +C | -B +A");
  net.forward("A B C D");
  EXPECT_EQ(net.backward("D B C A"), "+D >B | -D >C | -B >A | .");
}

TEST(Passes, WrongGuessIsForgotten) {
  ScheduleRun net(4, 2);
  net.forward("A B C D");
  net.backward("B");
  EXPECT_EQ(net.backward("D C B A"), "+D | +C | -D +B | -C +A");
}

TEST(Passes, ForwardAndBackwardAreRecordedApart) {
  ScheduleRun net(3, 2);
  net.forward("A B C");
  net.backward("A C B");
  EXPECT_EQ(net.forward("A B C"), "+A >B | -A >C | .");
  EXPECT_EQ(net.backward("A C B"), "+A >C | -A >B | .");
}

TEST(Passes, RecomputationIsPartOfTheBackwardPass) {
  ScheduleRun net(4, 2);
  net.forward("A B C D");
  net.backward("CD D C AB B A");
  EXPECT_EQ(net.backward("CD D C AB B A"), "+C +D | . | -D >A | -C +B | . | .");
}

TEST(Passes, BackwardInsideOfAForwardRegionEndsTheForwardPass) {
  ScheduleRun net(4, 2);
  net.begin(kForward);
  EXPECT_EQ(net.run("A B C"), "+A | +B | -A +C");
  net.begin(kBackward); // nothing is released
  EXPECT_EQ(net.run("C B A"), ". | -C >A | .");
  net.begin(kForward); // the next micro-batch
  EXPECT_EQ(net.run("A B C"), ". | -A >C | .");
  net.end();
  EXPECT_EQ(net.forward("A B C"), "+A >B | -A >C | .");
}

TEST(Passes, EmptyPassesAreNotRecorded) {
  ScheduleRun net(3, 2);
  net.forward("A B C");
  for (size_t i = 0; i < RecordedPasses::kRemembered; ++i) {
    net.forward("");
  }
  EXPECT_EQ(net.forward("A B C"), "+A >B | -A >C | .");
}

TEST(Passes, SubModelsInTurnKeepTheirPasses) {
  ScheduleRun net(6, 2);
  net.forward("A B C");
  net.forward("D E F");
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(net.forward("A B C"), "+A >B | -A >C | .");
    EXPECT_EQ(net.forward("D E F"), "+D >E | -D >F | .");
  }
}

TEST(Passes, EvaluationBetweenTrainingStepsChangesNothing) {
  ScheduleRun net(5, 2);
  net.forward("A B C D");
  net.backward("D C B A");
  for (int i = 0; i < 20; ++i) {
    net.forward("A B E");
  }
  net.forward("A B C D");
  EXPECT_EQ(net.forward("A B C D"), "+A >B | -A >C | -B >D | .");
  EXPECT_EQ(net.backward("D C B A"), "+D >C | -D >B | -C >A | .");
}

TEST(Passes, WherePassesPartTheMostRecentlyRunOneIsFollowed) {
  ScheduleRun net(6, 2);
  net.forward("A B C D");
  net.forward("A B E F");
  EXPECT_EQ(net.forward("A B C D"), "+A >B | -A >E | -E -B +C >D | .");
  EXPECT_EQ(net.forward("A B E F"), "+A >B | -A >C | -C -B +E >F | .");
}

TEST(Passes, APassThatEndsEarlyIsAPassOfItsOwn) {
  ScheduleRun net(4, 2);
  net.forward("A B C D");
  net.forward("A B");
  EXPECT_EQ(net.forward("A B"), "+A >B | .");
  EXPECT_EQ(net.forward("A B C D"), "+A >B | . | -A -B +C >D | .");
  EXPECT_EQ(net.forward("A B C D"), "+A >B | -A >C | -B >D | .");
}

TEST(Passes, FailedPassIsNotRecordedAndAllIsForgotten) {
  ScheduleRun net(4, 2);
  net.forward("A B C");
  net.backward("C B A");
  net.begin(kForward);
  EXPECT_EQ(net.run("A D"), "+A >B | -B +D");
  EXPECT_EQ(net.fail(), "-A -D");
  EXPECT_EQ(net.forward("A B C"), "+A | +B | -A +C");
  EXPECT_EQ(net.backward("C B A"), "+C >B | -C >A | .");
}

TEST(Passes, FailureReleasesKeptUnitsButNotThoseWithPins) {
  ScheduleRun net(3, 3);
  net.keep(0, true);
  net.begin(kForward);
  net.open({1});
  net.run("A C");
  net.begin(kBackward);
  EXPECT_EQ(net.fail(), "-A -C");
  EXPECT_EQ(net.whole(), "B");
  net.begin(kForward); // the region goes on
  EXPECT_EQ(net.run("A B"), "+A | .");
  net.close({1});
}

TEST(Passes, RulesOutliveAFailure) {
  ScheduleRun net(3, 2);
  net.schedule().set_prefetch(kForward, 0, {2});
  net.begin(kForward);
  net.run("A");
  net.fail();
  EXPECT_EQ(net.forward("A B C"), "+A >C | -A +B | .");
}

} // namespace
} // namespace fsdp::detail
