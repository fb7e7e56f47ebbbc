#include "launch/ending.h"

#include <gtest/gtest.h>

#include <csignal>

namespace fsdp::detail {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const Ending::Time kStart{seconds(1000)};

TEST(Ending, IsNeverDueWhileAllGoesWell) {
  Ending ending(seconds(5));
  EXPECT_EQ(ending.next(), std::nullopt);
  EXPECT_EQ(ending.take_due(kStart), 0);
  EXPECT_FALSE(ending.is_over(kStart));
}

TEST(Ending, AFailureIsFollowedByTermThenKillWithinASecond) {
  Ending ending(seconds(5));
  ending.rank_failed(kStart);
  EXPECT_EQ(ending.next(), kStart + milliseconds(300));
  EXPECT_EQ(ending.take_due(kStart + milliseconds(299)), 0);
  EXPECT_EQ(ending.take_due(kStart + milliseconds(300)), SIGTERM);
  EXPECT_EQ(ending.take_due(kStart + milliseconds(301)), 0);
  ending.rank_failed(kStart + milliseconds(350)); // the others fail too
  EXPECT_EQ(ending.next(), kStart + milliseconds(700));
  EXPECT_EQ(ending.take_due(kStart + milliseconds(700)), SIGKILL);
  EXPECT_EQ(ending.take_due(kStart + milliseconds(800)), 0);
}

TEST(Ending, ALateLookKillsAtOnce) {
  Ending ending(seconds(5));
  ending.rank_failed(kStart);
  EXPECT_EQ(ending.take_due(kStart + seconds(2)), SIGKILL);
  EXPECT_EQ(ending.take_due(kStart + seconds(2)), 0);
}

TEST(Ending, ARequestIsFollowedByKillAfterTheGrace) {
  Ending ending(seconds(5));
  EXPECT_TRUE(ending.requested(kStart));
  ending.rank_failed(kStart + seconds(1)); // it has ended by the request
  EXPECT_EQ(ending.take_due(kStart + milliseconds(4999)), 0);
  EXPECT_EQ(ending.take_due(kStart + seconds(5)), SIGKILL);
}

TEST(Ending, ASecondRequestKillsAtOnce) {
  Ending ending(seconds(5));
  EXPECT_TRUE(ending.requested(kStart));
  EXPECT_FALSE(ending.requested(kStart + milliseconds(500)));
  EXPECT_EQ(ending.take_due(kStart + milliseconds(500)), SIGKILL);
}

TEST(Ending, TwoRequestsAtOnceAreOne) {
  Ending ending(seconds(5));
  EXPECT_TRUE(ending.requested(kStart));
  EXPECT_FALSE(ending.requested(kStart + milliseconds(10)));
  EXPECT_EQ(ending.take_due(kStart + seconds(1)), 0);
}

TEST(Ending, ARequestDoesNotProlongAFailure) {
  Ending ending(seconds(5));
  ending.rank_failed(kStart);
  EXPECT_TRUE(ending.requested(kStart + milliseconds(100)));
  EXPECT_EQ(ending.take_due(kStart + milliseconds(700)), SIGKILL);
}

TEST(Ending, IsOverWhenKillingDoesNotHelp) {
  Ending ending(seconds(0));
  ending.requested(kStart);
  EXPECT_EQ(ending.take_due(kStart), SIGKILL);
  EXPECT_FALSE(ending.is_over(kStart + seconds(4)));
  EXPECT_EQ(ending.next(), kStart + seconds(5));
  EXPECT_TRUE(ending.is_over(kStart + seconds(5)));
}

} // namespace
} // namespace fsdp::detail
