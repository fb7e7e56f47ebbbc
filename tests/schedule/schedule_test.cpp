// What is gathered and released; prefetch_test.cpp and passes_test.cpp have the
// rest.

#include "schedule_run.h"

#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

namespace fsdp::detail {
namespace {

TEST(Schedule, FirstPassGathersAtTheTouchAndReleasesTheLeastRecentlyUsed) {
  ScheduleRun net(4, 2);
  EXPECT_EQ(net.forward("A B A C D"), "+A | +B | . | -B +C | -A +D");
}

TEST(Schedule, UnitThatIsWholeNeedsNothing) {
  ScheduleRun net(2, 2);
  EXPECT_EQ(net.forward("A A B B A A B"), "+A | . | +B | . | . | . | .");
}

TEST(Schedule, EndOfThePassReleasesAll) {
  ScheduleRun net(3, 3);
  net.begin(PassKind::kForward);
  net.run("C A");
  EXPECT_EQ(net.end(), "-A -C");
  EXPECT_EQ(net.whole(), "");
}

TEST(Schedule, OperatorOfMoreUnitsThanSlotsHasThemAllWhole) {
  ScheduleRun net(4, 2);
  EXPECT_EQ(net.forward("D ABC D"), "+D | -D +A +B +C | -A -B +D");
}

TEST(Schedule, UnitsThatOneOperatorReadsCountOnceEach) {
  ScheduleRun net(3, 2);
  EXPECT_EQ(net.forward("AA AA ABA C"), "+A | . | +B | -A +C");
}

TEST(Schedule, OperatorThatReadsItsUnitTwiceIsNoFurtherTouch) {
  ScheduleRun net(2, 2);
  net.forward("A AA A B");
  EXPECT_EQ(net.forward("A B"), "+A >B | .");
}

TEST(Schedule, FurtherTouchesOfTheSameUnitAreNotLookedAt) {
  ScheduleRun net(3, 2);
  net.forward("A B C");
  net.begin(PassKind::kForward);
  net.set_whole(1, true);
  EXPECT_EQ(net.run("A"), "+A");
  net.keep(1, true); // now there would be room for C
  EXPECT_EQ(net.run("A AA A B"), ". | . | . | -A >C");
}

TEST(Schedule, RecordsWhichUnitsOneOperatorReads) {
  using Touches = std::vector<UnitTouch>;
  ScheduleRun net(3, 3);
  const auto recorded = [&](PassKind kind) {
    const auto touches = net.schedule().recorded(kind);
    return Touches(touches.begin(), touches.end());
  };
  EXPECT_EQ(recorded(PassKind::kForward), Touches{});
  net.forward("A AB BAB B BC");
  EXPECT_EQ(
      recorded(PassKind::kForward),
      (Touches{{0}, {0}, {1, true}, {1}, {0, true}, {1}, {1}, {2, true}}));
  EXPECT_EQ(recorded(PassKind::kBackward), Touches{});
}

TEST(Schedule, TouchOfTheUnitThatWasTouchedLastIsNotRecorded) {
  ScheduleRun net(4, 3);
  net.forward("AB B C D");
  EXPECT_EQ(net.forward("AB C D"), "+A +B >C | -A >D | .");
  net.begin(PassKind::kForward);
  net.run("AB");
  net.set_whole(1, false); // it is gathered again, in the same pass
  EXPECT_EQ(net.run("B C D"), "-A +B >D | . | .");
}

TEST(Schedule, UnitsWithPinsStayAndTakeNoSlot) {
  ScheduleRun net(4, 1);
  net.begin(PassKind::kForward);
  EXPECT_EQ(net.open({0}), "+A");
  EXPECT_EQ(net.run("B C"), "+B | -B +C"); // inside of the operator
  net.close({0});
  EXPECT_EQ(net.run("D"), "-A -C +D");
}

TEST(Schedule, PinsAreCounted) {
  ScheduleRun net(2, 1);
  net.begin(PassKind::kForward);
  net.open({0});
  EXPECT_EQ(net.open({0}), "."); // not looked at: read last
  net.close({0});
  EXPECT_EQ(net.run("B"), "+B");
  net.close({0});
  EXPECT_EQ(net.run("A B"), ". | .");
  EXPECT_EQ(net.whole(), "AB"); // room is made only when something is gathered
}

TEST(Schedule, PinsOfOneOperatorThatReadsItsUnitTwiceAreCounted) {
  ScheduleRun net(2, 1);
  net.begin(PassKind::kForward);
  net.open({0});
  net.open({0, 0}); // not looked at either
  net.close({0, 0});
  EXPECT_EQ(net.run("B"), "+B");
}

TEST(Schedule, KeptUnitsStayAndTakeNoSlot) {
  ScheduleRun net(4, 1);
  net.keep(0, true);
  net.begin(PassKind::kForward);
  EXPECT_EQ(net.run("A B C"), "+A | +B | -B +C");
  EXPECT_EQ(net.end(), "-C");
  EXPECT_EQ(net.whole(), "A");
  net.begin(PassKind::kBackward);
  net.keep(0, false);
  EXPECT_EQ(net.run("B"), "-A +B");
}

TEST(Schedule, WhatTheCallerGathersAndReleasesIsKnown) {
  ScheduleRun net(3, 1);
  net.set_whole(1, true);
  net.begin(PassKind::kForward);
  EXPECT_EQ(net.run("B A"), ". | -B +A");
  net.set_whole(0, false);
  EXPECT_EQ(net.run("A"), "+A");
}

TEST(Schedule, OutsideOfAPassNothingIsRecordedOrExpected) {
  ScheduleRun net(3, 2);
  EXPECT_EQ(net.run("A B C"), "+A | +B | -A +C");
  EXPECT_EQ(net.end(), "-B -C");
  EXPECT_EQ(net.forward("A B C"), "+A | +B | -A +C");
  EXPECT_EQ(net.run("A B C"), "+A | +B | -A +C");
}

TEST(Schedule, AnOperatorWithoutUnitsNeedsNothing) {
  ScheduleRun net(3, 2);
  net.forward("A B C");
  net.begin(PassKind::kForward);
  net.run("A");
  EXPECT_EQ(net.open({}), ".");
  EXPECT_EQ(net.run("B"), "-A >C");
}

TEST(Schedule, ResetTakesPinsAway) {
  ScheduleRun net(2, 1);
  net.begin(PassKind::kForward);
  net.open({0});
  net.schedule().reset();
  EXPECT_FALSE(net.schedule().is_whole(0));
  net.schedule().unpin(Units{0}); // its operator ends later
  net.schedule().touch(Units{0});
  net.schedule().unpin(Units{0});
  EXPECT_EQ(text_of(net.schedule().touch(Units{1})), "-A +B");
}

TEST(Schedule, EndOfThePassTakesPinsAway) {
  Schedule schedule(2, 1);
  schedule.begin_pass(PassKind::kForward);
  schedule.touch(Units{0});
  EXPECT_EQ(text_of(schedule.end_pass()), "-A");
}

template <typename Call>
void expect_refused(const Call& call, const std::string& text) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown instead of: " << text;
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
        << error.what();
  }
}

TEST(Schedule, RefusesFewerSlotsThanOne) {
  expect_refused(
      [] { Schedule(1, 0); },
      "Schedule: the number of slots is too small: expected at least 1, but "
      "got 0. Pass Options::slots.");
}

TEST(Schedule, RefusesUnitsThatItDoesNotHave) {
  Schedule schedule(2, 1);
  const std::string text =
      ": the unit index is out of range: expected less than 2, but got 2. ";
  const auto refused = [&](const std::string& who, const auto& call) {
    expect_refused(call, "Schedule::" + who + text);
  };
  refused("touch", [&] { schedule.touch(Units{0, 2}); });
  refused("unpin", [&] { schedule.unpin(Units{2}); });
  refused("keep", [&] { schedule.keep(2, true); });
  refused("set_whole", [&] { schedule.set_whole(2, true); });
  refused("set_prefetch", [&] {
    schedule.set_prefetch(PassKind::kForward, 2, {});
  });
  refused("set_prefetch", [&] {
    schedule.set_prefetch(PassKind::kForward, 0, {1, 2});
  });
}

TEST(Schedule, FurtherTouchesOfTheSameUnitCostNanoseconds) {
  Schedule schedule(200, 2);
  schedule.begin_pass(PassKind::kForward);
  schedule.touch(Units{7});
  const Units unit{7};
  constexpr int kTouches = 1'000'000;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kTouches; ++i) {
    ASSERT_TRUE(schedule.touch(unit).empty());
    schedule.unpin(unit);
  }
  const std::chrono::duration<double, std::nano> spent =
      std::chrono::steady_clock::now() - start;
  // About 5 ns; a look at all units would cost a hundred times as much. The
  // bound holds on a busy machine and under sanitizers, too.
  EXPECT_LT(spent.count() / kTouches, 1000);
}

} // namespace
} // namespace fsdp::detail
