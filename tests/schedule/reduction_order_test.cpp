#include "schedule/reduction_order.h"

#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace fsdp::detail {
namespace {

using Groups = std::vector<uint32_t>;
using Flags = std::vector<bool>;

// All groups in turn.
Groups turns(ReductionOrder& order) {
  Groups groups;
  while (const auto group = order.turn()) {
    groups.push_back(*group);
    order.started_turn();
  }
  return groups;
}

template <typename Error, typename Call>
void expect_thrown(const Call& call, const std::string& text) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown instead of: " << text;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
        << error.what();
  }
}

TEST(ReductionOrder, BeginsWithTheReverseOrderOfRegistration) {
  ReductionOrder order(4);
  EXPECT_EQ(order.agreed(), (Groups{3, 2, 1, 0}));
  EXPECT_EQ(turns(order), (Groups{3, 2, 1, 0}));
  EXPECT_EQ(order.turn(), std::nullopt);
}

TEST(ReductionOrder, OfNoGroupsHasNoTurns) {
  ReductionOrder order(0);
  EXPECT_EQ(order.turn(), std::nullopt);
  EXPECT_EQ(order.proposed({}), Groups{});
}

TEST(ReductionOrder, TurnPassesOnWhenItsGroupIsStarted) {
  ReductionOrder order(2);
  EXPECT_EQ(order.turn(), 1U);
  EXPECT_EQ(order.turn(), 1U);
  order.started_turn();
  EXPECT_EQ(order.turn(), 0U);
  order.start_over();
  EXPECT_EQ(order.turn(), 1U);
}

TEST(ReductionOrder, ProposesTheOrderInWhichGroupsWereCompleted) {
  ReductionOrder order(4);
  for (const uint32_t group : {2, 3, 0, 1}) {
    order.completed(group);
  }
  EXPECT_EQ(order.proposed(Flags(4, true)), (Groups{2, 3, 0, 1}));
}

TEST(ReductionOrder, ProposesIncompleteGroupsWithGradientsAfterTheOthers) {
  ReductionOrder order(5);
  order.completed(4);
  order.completed(1);
  EXPECT_EQ(
      order.proposed({true, true, false, true, true}), (Groups{4, 1, 0, 3}));
}

TEST(ReductionOrder, GroupThatIsCompletedTwiceIsProposedOnce) {
  ReductionOrder order(3);
  for (const uint32_t group : {2, 0, 2, 1}) {
    order.completed(group);
  }
  EXPECT_EQ(order.proposed(Flags(3, true)), (Groups{2, 0, 1}));
}

TEST(ReductionOrder, ProposalsAreOfOnePass) {
  ReductionOrder order(3);
  order.completed(1);
  order.start_over();
  EXPECT_EQ(order.proposed(Flags(3, false)), Groups{});
  order.completed(0);
  order.completed(1);
  EXPECT_EQ(order.proposed(Flags(3, false)), (Groups{0, 1}));
}

TEST(ReductionOrder, FollowsWhatWasAgreedFromTheNextPassOn) {
  ReductionOrder order(3);
  order.started_turn();
  order.agree({1, 0});
  order.start_over();
  EXPECT_EQ(order.agreed(), (Groups{1, 0}));
  EXPECT_TRUE(order.has(0));
  EXPECT_TRUE(order.has(1));
  EXPECT_FALSE(order.has(2));
  EXPECT_EQ(turns(order), (Groups{1, 0}));
  order.start_over();
  EXPECT_EQ(turns(order), (Groups{1, 0})) << "until another one is agreed on";
  order.agree({2});
  EXPECT_TRUE(order.has(2));
  EXPECT_FALSE(order.has(0));
}

TEST(ReductionOrder, FailureBringsTheFirstOrderBack) {
  ReductionOrder order(3);
  order.agree({0, 1});
  order.start_over();
  order.completed(1);
  order.started_turn();
  order.forget();
  EXPECT_TRUE(order.has(2));
  EXPECT_EQ(order.proposed(Flags(3, false)), Groups{});
  EXPECT_EQ(turns(order), (Groups{2, 1, 0}));
}

TEST(ReductionOrder, RefusesOrdersThatAreNone) {
  ReductionOrder order(2);
  expect_thrown<std::invalid_argument>(
      [&] {
        order.agree({0, 2});
      },
      "ReductionOrder: the group index is out of range: expected less than 2, "
      "but got 2. ");
  expect_thrown<std::invalid_argument>(
      [&] {
        order.agree({1, 0, 1});
      },
      "ReductionOrder: the agreed order has a group twice: expected each of 2 "
      "at most once, but got group 1 again. ");
  expect_thrown<std::invalid_argument>(
      [&] { order.completed(2); }, "expected less than 2, but got 2. ");
  EXPECT_EQ(order.agreed(), (Groups{1, 0})) << "nothing has changed";
}

TEST(ReductionOrder, RefusesAStartWhenItIsNobodysTurn) {
  ReductionOrder order(1);
  order.started_turn();
  expect_thrown<std::logic_error>(
      [&] { order.started_turn(); }, "expected at most 1 in this pass");
}

} // namespace
} // namespace fsdp::detail
