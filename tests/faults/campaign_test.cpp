// A rank that is killed or stopped, at all places that it knows and at moments
// by chance. FSDP_TEST_SEED chooses others.

#include "faults/strike.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <tuple>

namespace fsdp::testing {
namespace {

using std::chrono::milliseconds;

constexpr int kMoments = 20;
constexpr milliseconds kShort(2000);

uint32_t seed() {
  const char* const text = std::getenv("FSDP_TEST_SEED");
  return text == nullptr ? 1 : static_cast<uint32_t>(std::stoul(text));
}

milliseconds limit_for(int signal) {
  return signal == SIGSTOP ? kShort : milliseconds(20'000);
}

class Campaign
    : public ::testing::TestWithParam<std::tuple<std::string, int, int>> {
 protected:
  Strike strike() const {
    const auto& [backend, size, signal] = GetParam();
    return {
        .backend = backend,
        .size = size,
        .signal = signal,
        .timeout = limit_for(signal)};
  }

  void expect(const Strike& strike) {
    longest_ = std::max(longest_, expect_seen(strike));
  }

  void TearDown() override {
    std::cout << "seen after at most " << longest_.count() << " ms\n";
  }

 private:
  milliseconds longest_{0};
};

std::string name_of_campaign(
    const ::testing::TestParamInfo<Campaign::ParamType>& tested) {
  const auto& [backend, size, signal] = tested.param;
  return backend + "_" + std::to_string(size) +
      (signal == SIGKILL ? "_killed" : "_stopped");
}

INSTANTIATE_TEST_SUITE_P(
    All,
    Campaign,
    ::testing::Combine(
        ::testing::Values("shm", "gloo"),
        ::testing::Values(2, 3, 4),
        ::testing::Values(SIGKILL, SIGSTOP)),
    name_of_campaign);

TEST_P(Campaign, AtEveryPlace) {
  int count = 0;
  for (const auto* place :
       {"start",
        "after start",
        "making of the net",
        "between steps",
        "forward",
        "before backward",
        "backward",
        "gradient",
        "before the optimizer"}) {
    auto next = strike();
    next.place = place;
    next.victim = count++ % next.size;
    if (next.place == "start") {
      next.timeout = kShort;
      next.may_be_missing = true;
    }
    expect(next);
    if (HasFailure()) {
      break;
    }
  }
}

TEST_P(Campaign, DuringTraining) {
  for (uint32_t i = 0; i < kMoments && !HasFailure(); ++i) {
    std::mt19937 random(seed() * 1000 + i);
    auto next = strike();
    next.victim = static_cast<int>(random() % static_cast<uint32_t>(next.size));
    const std::chrono::microseconds delay(random() % 50'000);
    next.moment = [delay](Job& job) {
      for (int rank = 0; rank < job.size(); ++rank) {
        ASSERT_TRUE(job.await_line(rank, "trains"));
      }
      std::this_thread::sleep_for(delay);
    };
    SCOPED_TRACE("moment " + std::to_string(i));
    expect(next);
  }
}

TEST_P(Campaign, DuringStartUp) {
  for (uint32_t i = 0; i < kMoments && !HasFailure(); ++i) {
    std::mt19937 random(seed() * 1000 + i);
    auto next = strike();
    next.victim = static_cast<int>(random() % static_cast<uint32_t>(next.size));
    next.timeout = kShort;
    const std::chrono::microseconds delay(random() % 40'000);
    next.moment = [delay](Job& job) {
      for (int rank = 0; rank < job.size(); ++rank) {
        ASSERT_TRUE(job.await_line(rank, "starts"));
      }
      std::this_thread::sleep_for(delay);
    };
    next.may_be_missing = true;
    SCOPED_TRACE("moment " + std::to_string(i));
    expect(next);
  }
}

} // namespace
} // namespace fsdp::testing
