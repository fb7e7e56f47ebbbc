// A rank that is killed or stopped, at places that it chooses itself. The
// campaign (campaign_test.cpp) strikes at any moment.

#include "faults/strike.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <iostream>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr std::chrono::milliseconds kShort(1500);

void expect_all_seen(const std::vector<Strike>& strikes) {
  std::vector<std::future<std::chrono::milliseconds>> seen; // at once
  for (const auto& strike : strikes) {
    seen.push_back(std::async(std::launch::async, expect_seen, strike));
  }
  std::chrono::milliseconds longest(0);
  for (auto& each : seen) {
    longest = std::max(longest, each.get());
  }
  std::cout << "seen after at most " << longest.count() << " ms\n";
}

TEST(KilledRank, IsSeenWhileOthersWaitForItsWeights) {
  expect_all_seen(
      {{.backend = "shm",
        .size = 3,
        .place = "between steps", // before it publishes
        .where = "forward",
        .parts = {"all_gather of unit 'blocks.0'", ", dead) died"}},
       {.backend = "gloo",
        .place = "backward",
        .where = "backward",
        // That of blocks.1 was started ahead.
        .parts = {"all_gather of unit 'blocks.0'", "has died"}}});
}

TEST(KilledRank, IsSeenWhileOthersSettleTheirGradients) {
  expect_all_seen(
      {{.backend = "shm",
        .place = "forward", // the other is in backward by then
        .where = "backward",
        .parts = {"settlement of gradients", ", dead) died"}}});
}

TEST(KilledRank, MayBeTheOneThatServesTheStore) {
  expect_all_seen(
      {{.backend = "gloo",
        .victim = 0,
        .place = "between steps",
        .where = "forward",
        .parts = {"unit 'blocks.0'"}}});
}

TEST(StoppedRank, IsNamedAfterTheTimeLimit) {
  expect_all_seen(
      {{.backend = "shm",
        .signal = SIGSTOP,
        .timeout = kShort,
        .place = "gradient",
        .where = "backward",
        .parts = {"timed out after 1500 ms", ", stopped, last call here"}},
       {.backend = "gloo",
        .signal = SIGSTOP,
        .timeout = kShort,
        .place = "forward",
        .where = "forward",
        .parts = {"timed out after 1500 ms", "not arrived: rank 1"}}});
}

TEST(StoppedRank, MayBeTheOneThatServesTheStore) {
  expect_all_seen(
      {{.backend = "gloo",
        .size = 3,
        .victim = 0,
        .signal = SIGSTOP,
        .timeout = kShort,
        .place = "between steps",
        .where = "forward",
        .parts = {"unit 'blocks.0'"}}});
}

} // namespace
} // namespace fsdp::testing
