#include "schedule_run.h"

#include <gtest/gtest.h>

namespace fsdp::detail {
namespace {

constexpr auto kForward = PassKind::kForward;
constexpr auto kBackward = PassKind::kBackward;

TEST(Prefetch, SecondPassGathersTheNextUnitAhead) {
  ScheduleRun net(4, 2);
  net.forward("A B C D");
  EXPECT_EQ(net.forward("A B C D"), "+A >B | -A >C | -B >D | .");
}

TEST(Prefetch, MoreSlotsGatherFurtherAhead) {
  ScheduleRun net(5, 3);
  net.forward("A B C D E");
  EXPECT_EQ(net.forward("A B C D E"), "+A >B >C | -A >D | -B >E | . | .");
}

TEST(Prefetch, OneSlotGathersNothingAhead) {
  ScheduleRun net(3, 1);
  net.forward("A B C");
  EXPECT_EQ(net.forward("A B C"), "+A | -A +B | -B +C");
}

TEST(Prefetch, UnitsOfOneOperatorTakeSlotsTogether) {
  ScheduleRun net(5, 3);
  net.forward("AB C DE A");
  EXPECT_EQ(net.forward("AB C DE A"), "+A +B >C | -A -B >D >E | -C >A | .");
  ScheduleRun full(3, 2);
  full.forward("AB C");
  EXPECT_EQ(full.forward("AB C"), "+A +B | -A +C");
}

TEST(Prefetch, UnitUsedTwiceIsGatheredAgainWhenItWasReleased) {
  ScheduleRun net(3, 2);
  net.forward("A B C A B");
  EXPECT_EQ(net.forward("A B C A B"), "+A >B | -A >C | -B >A | -C >B | .");
}

TEST(Prefetch, UnitsWhoseLastTouchIsOverAreReleasedFirst) {
  // For D. A was touched less recently than B, but comes again.
  ScheduleRun net(4, 3);
  net.forward("A B C A D");
  EXPECT_EQ(net.forward("A B C A D"), "+A >B >C | . | -B >D | . | .");
}

TEST(Prefetch, AmongOtherUnitsTheLeastRecentlyTouchedGoesFirst) {
  ScheduleRun net(5, 3);
  net.forward("B A C");
  net.begin(kForward);
  net.run("B A C");
  EXPECT_EQ(net.run("E D"), "-B +E | -A +D");
}

TEST(Prefetch, KeptUnitsAreSkippedWhenTheyAreWhole) {
  ScheduleRun net(4, 2);
  net.forward("A B C D");
  net.keep(1, true);
  net.set_whole(1, true);
  EXPECT_EQ(net.forward("A B C D"), "+A >C | . | -A >D | .");
}

TEST(Prefetch, KeptUnitsAreGatheredAheadLikeOthers) {
  ScheduleRun net(4, 2);
  for (uint32_t unit = 0; unit < 4; ++unit) {
    net.keep(unit, true);
  }
  net.forward("A B C D");
  for (uint32_t unit = 0; unit < 4; ++unit) {
    net.set_whole(unit, false);
  }
  EXPECT_EQ(net.forward("A B C D"), "+A >B | >C | >D | .");
  EXPECT_EQ(net.forward("A B C D"), ". | . | . | .");
}

TEST(Prefetch, PinnedUnitsAreSkipped) {
  ScheduleRun net(4, 2);
  net.forward("A B A C");
  net.begin(kForward);
  EXPECT_EQ(net.open({0}), "+A >B");
  EXPECT_EQ(net.run("B"), ">C"); // A has a pin: no room needed
  net.close({0});
}

TEST(Prefetch, UnitsThatAreNeverTouchedAreNeverGathered) {
  ScheduleRun net(5, 4);
  net.forward("A C");
  EXPECT_EQ(net.forward("A C"), "+A >C | .");
}

TEST(Prefetch, LooksOnlySoFarAhead) {
  std::string turns;
  for (int i = 0; i < 100; ++i) {
    turns += "A B ";
  }
  ScheduleRun net(3, 3);
  net.forward(turns + "C");
  net.begin(kForward);
  EXPECT_EQ(net.run("A B A"), "+A >B | . | .");
  net.run(turns.substr(6)); // to the end of the turns
  EXPECT_EQ(net.whole(), "ABC");
  EXPECT_EQ(net.run("C"), ".");
}

// Departures.

TEST(Prefetch, DepartureGathersAtOnceAndReleasesFirstWhatCameInVain) {
  ScheduleRun net(5, 3);
  net.forward("A B C D");
  net.begin(kForward);
  net.run("A");                     // and B, C ahead
  EXPECT_EQ(net.run("E"), "-B +E"); // A is older, but was used
  EXPECT_EQ(net.whole(), "ACE");
}

TEST(Prefetch, WhatCameInVainGoesBeforeWhatWasTouchedLessRecently) {
  ScheduleRun net(8, 3);
  net.forward("A B C D E B F");
  net.begin(kForward);
  net.open({0}); // A stays all the while
  EXPECT_EQ(net.run("B C D"), ">D | -B >E | -C >B");
  net.close({0});
  EXPECT_EQ(net.run("H"), "-E -B +H");
  net.set_whole(1, true); // not ahead of anything any more
  EXPECT_EQ(net.run("G"), "-A -B +G");
}

TEST(Prefetch, WhatIsLeftOutIsCaughtUpWith) {
  ScheduleRun net(5, 2);
  net.forward("A B C D E");
  EXPECT_EQ(net.forward("A C D E"), "+A >B | -B +C | -A -C +D >E | .");
}

TEST(Prefetch, AfterAnInsertionTheRestIsExpected) {
  ScheduleRun net(5, 2);
  net.forward("A B C D");
  EXPECT_EQ(net.forward("A E B C D"), "+A >B | -B +E | -A -E +B >C | -B >D | .")
      << "B is the expected one again";
}

TEST(Prefetch, APassThatBeginsAnewIsFollowedFromItsBeginning) {
  ScheduleRun net(3, 2);
  net.forward("A B C");
  EXPECT_EQ(
      net.forward("A B C A B C"), "+A >B | -A >C | . | -B +A | -A +B | .");
}

TEST(Prefetch, DepartureIsRecordedAsAFurtherPass) {
  ScheduleRun net(5, 2);
  net.forward("A B C D");
  net.forward("A E C D");
  EXPECT_EQ(net.forward("A E C D"), "+A >E | -A >C | -E >D | .");
  EXPECT_EQ(net.forward("A B C D"), "+A >E | -E -A +B >C | -B >D | .");
  EXPECT_EQ(net.forward("A B C D"), "+A >B | -A >C | -B >D | .");
}

// Rules of the program.

TEST(Prefetch, RuleReplacesTheRecordedOrder) {
  ScheduleRun net(4, 2);
  net.forward("A B C D");
  net.schedule().set_prefetch(kForward, 0, {2});
  EXPECT_EQ(net.forward("A B C D"), "+A >C | -A +B | -B >D | .");
}

TEST(Prefetch, RuleReplacesAllOfTheRecordedOrderForItsTouch) {
  ScheduleRun net(4, 3);
  net.forward("A B C D");
  net.schedule().set_prefetch(kForward, 0, {3});
  EXPECT_EQ(net.forward("A B C D"), "+A >D | -A +B >C | . | .");
}

TEST(Prefetch, UnitOfSeveralRulesIsRequestedOnce) {
  ScheduleRun net(5, 2);
  net.schedule().set_prefetch(kForward, 0, {2});
  net.schedule().set_prefetch(kForward, 1, {2});
  EXPECT_EQ(net.forward("A B C D E"), "+A >C | -A +B | . | -B +D | -C +E");
}

TEST(Prefetch, RuleHoldsInTheFirstPass) {
  ScheduleRun net(4, 2);
  net.schedule().set_prefetch(kForward, 0, {1});
  net.schedule().set_prefetch(kForward, 1, {2});
  EXPECT_EQ(net.forward("A B C D"), "+A >B | -A >C | . | -B +D");
}

TEST(Prefetch, WhatARuleHasNoRoomForFollows) {
  ScheduleRun net(4, 2);
  net.schedule().set_prefetch(kForward, 0, {1, 2, 3});
  EXPECT_EQ(net.forward("A B C D"), "+A >B | -A >C | -B >D | .");
}

TEST(Prefetch, RuleStaysUntilItsUnitIsTouched) {
  ScheduleRun net(4, 2);
  net.schedule().set_prefetch(kForward, 0, {3});
  EXPECT_EQ(net.forward("A B C D"), "+A >D | -A +B | -B +C | .");
}

TEST(Prefetch, RuleHoldsForTheFirstTouchOfAPass) {
  ScheduleRun net(4, 2);
  net.schedule().set_prefetch(kForward, 0, {1});
  net.forward("A B C A D");
  EXPECT_EQ(net.forward("A B C A D"), "+A >B | -A >C | -B >A | -C >D | .");
}

TEST(Prefetch, RuleKeepsWhatTheOrderHasGathered) {
  ScheduleRun net(5, 3);
  net.forward("A B C D E");
  net.schedule().set_prefetch(kForward, 1, {4});
  EXPECT_EQ(net.forward("A B C D E"), "+A >B >C | -A >E | -B >D | . | .");
}

TEST(Prefetch, RulesOfForwardAndBackwardAreApart) {
  ScheduleRun net(4, 2);
  net.schedule().set_prefetch(kBackward, 3, {1});
  EXPECT_EQ(net.forward("D A"), "+D | +A");
  EXPECT_EQ(net.backward("D A B"), "+D >B | -D +A | .");
}

TEST(Prefetch, EmptyListRemovesTheRule) {
  ScheduleRun net(3, 2);
  net.schedule().set_prefetch(kForward, 0, {2});
  net.forward("A B C");
  net.schedule().set_prefetch(kForward, 0, {});
  EXPECT_EQ(net.forward("A B C"), "+A >B | -A >C | .");
}

TEST(Prefetch, RequestsOfARuleEndWithThePass) {
  ScheduleRun net(4, 2);
  net.schedule().set_prefetch(kForward, 0, {3});
  net.forward("A B");
  EXPECT_EQ(net.backward("B A C"), "+B >A | . | -B +C");
}

TEST(Prefetch, RuleNamesItsOwnUnitOrAUnitOfTheOperatorInVain) {
  ScheduleRun net(4, 3);
  net.schedule().set_prefetch(kForward, 0, {0, 1, 2});
  EXPECT_EQ(net.forward("AB D"), "+A +B >C | -A +D");
}

} // namespace
} // namespace fsdp::detail
